"""llama_cpp.Llama without streaming, on either library set: what ours is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoe_gguf.grammar import guarded
from flashmoe_gguf.libs import LibrarySet, load_llama_cpp


def plain_llama(which: LibrarySet, adjust: Callable[[Any], None]) -> type:
    """A `llama_cpp.Llama` class on one library set; `adjust` gets its `llama_model_params` first.

    llama_cpp builds them inside its constructor and has no argument for some fields. Raises
    LibraryError when the process has the other set.
    """
    llama_cpp: Any = load_llama_cpp(which)

    class Plain(llama_cpp.Llama):  # type: ignore[misc]
        @property
        def model_params(self) -> Any:
            return self._model_params

        @model_params.setter
        def model_params(self, params: Any) -> None:
            adjust(params)
            self._model_params = params

        def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
            sampler = super()._init_sampler(*args, **kwargs)
            return guarded(llama_cpp, sampler, self._n_vocab, kwargs.get("grammar"))

    return Plain


def without_repacking(params: Any) -> None:
    """Repacked weights have other low bits, and repacked experts no longer fit. Ours are not."""
    params.use_extra_bufts = False
