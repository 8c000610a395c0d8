"""The models of one server: llama_cpp.server's LlamaProxy, which loads streamed models on demand.

One model is in memory; a request for another one closes it and loads that.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.server.failures import ApiError
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.served import ServedLlama
from flashmoe_gguf.server.settings import ServedModelSettings

# isort: split
import llama_cpp
from llama_cpp.server.model import LlamaProxy

State = Literal["empty", "loading", "ready", "failed"]


class Models(LlamaProxy):  # type: ignore[misc,unused-ignore]
    """Loads on `load`, which one thread at a time may call; the rest may be asked by any thread.

    `on_loaded(alias, llm)` is called after each load, from the loading thread.
    """

    def __init__(
        self,
        settings: Sequence[ServedModelSettings],
        meters: Meters,
        on_loaded: Callable[[str, ServedLlama], None] = lambda alias, llm: None,
    ) -> None:
        # not LlamaProxy's, which would load the first model here and now
        self._served = {str(s.model_alias): s for s in settings}
        self._model_settings_dict = dict(self._served)
        self._default_model_settings = settings[0]
        self._default_model_alias = str(settings[0].model_alias)
        self._current_model: ServedLlama | None = None
        self._current_model_alias: str | None = None
        self._meters = meters
        self._on_loaded = on_loaded
        self._stopped = False
        self.state: State = "empty"
        self.loaded_fraction = 0.0
        self.error: FlashMoEError | None = None

    @property
    def default(self) -> str:
        """The model that is loaded first, and meant where a request names none."""
        return self._default_model_alias

    @property
    def current_alias(self) -> str | None:
        """The name of the model in memory, or of the one that is being loaded."""
        return self._current_model_alias

    @property
    def current(self) -> tuple[str, ServedLlama] | None:
        """The model in memory and its name."""
        llm, alias = self._current_model, self._current_model_alias
        return (alias, llm) if llm is not None and alias is not None else None

    def name(self, wanted: str | None) -> str:
        """The alias that a request means; raises ApiError for a model that is not served."""
        if not wanted:
            return self._default_model_alias
        if wanted in self._served:
            return wanted
        for alias, settings in self._served.items():
            if settings.model == wanted:
                return alias
        known = ", ".join(self._served)
        raise ApiError(
            404,
            f"the model {wanted[:200]!r} is not served here; there is: {known}",
            code="model_not_found",
            param="model",
        )

    def __call__(self, model: str | None = None) -> ServedLlama:
        """The model in memory, which the gate has loaded before it let the request in."""
        if self._current_model is None:
            raise ApiError(503, "no model is loaded", code="model_loading")
        return self._current_model

    def load(self, alias: str) -> None:
        """Makes `alias` the model in memory; raises what `Llama` raises, and then there is none."""
        if alias == self._current_model_alias and self._current_model is not None:
            return
        previous, self._current_model = self._current_model, None
        self._current_model_alias = alias
        self.state, self.loaded_fraction, self.error = "loading", 0.0, None
        try:
            if previous is not None:
                previous.close()
            llm = self._build(alias)
            self._on_loaded(alias, llm)
        except BaseException as error:
            self.state = "failed"
            if isinstance(error, FlashMoEError):
                self.error = error
            else:
                self.error = FlashMoEError(" ".join(str(error).split()) or type(error).__name__)
            raise
        self._current_model = llm
        self.state = "ready"

    def stop(self) -> None:
        """Ends a load that is going on, from any thread."""
        self._stopped = True

    def free(self) -> None:
        """Closes the model in memory."""
        llm, self._current_model = self._current_model, None
        self.state = "empty"
        if llm is not None:
            llm.close()

    def _build(self, alias: str) -> ServedLlama:
        settings = self._served[alias]
        if settings.lora_path is not None and settings.stream:
            raise OptionError(f"{alias}: LoRA adapters need a model that is not streamed")

        if settings.repeatable and settings.cache:
            raise OptionError(
                f"{alias}: of a cached state nothing can be taken over with repeatable",
                "leave out cache, or repeatable",
            )

        class Bound(ServedLlama):
            pass

        Bound.alias = alias
        Bound.meters = self._meters
        Bound.ours = {**settings.ours(), "progress": self._progress}
        llm: ServedLlama = _constructor(Bound)(settings)
        return llm

    def _progress(self, fraction: float) -> None:
        self.loaded_fraction = fraction
        if self._stopped:
            raise FlashMoEError("the server is stopping")


class _With:
    """A module with one name of it replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _constructor(llama: type[ServedLlama]) -> Callable[[ServedModelSettings], Any]:
    """LlamaProxy's own function from settings to a model, which knows every setting, with another
    class in the place of `llama_cpp.Llama`. The module itself stays as it is.
    """
    upstream = LlamaProxy.load_llama_from_model_settings
    names = {**upstream.__globals__, "llama_cpp": _With(llama_cpp, Llama=llama)}
    return types.FunctionType(upstream.__code__, names)
