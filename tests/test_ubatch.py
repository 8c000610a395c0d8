"""How many prompt tokens are computed at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import scenarios
from flashmoe_gguf import Llama
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.ubatch import ubatch_that_pays

GIB = 1 << 30


@pytest.mark.parametrize(
    ("missing", "n_ctx", "ram", "wanted"),
    [
        (0, 4096, 8 * GIB, 512),
        (4 * GIB, 4096, 8 * GIB, 512),
        (4 * GIB + 1, 4096, 8 * GIB, 1024),
        (8 * GIB + 1, 4096, 8 * GIB, 2048),
        (500 * GIB, 65536, 64 * GIB, 2048),
        (500 * GIB, 1024, 8 * GIB, 1024),  # no more than the context
        (500 * GIB, 256, 8 * GIB, 256),
        (500 * GIB, 4096, GIB // 2, 512),  # buffers would take too much of it
        (500 * GIB, 4096, GIB, 1024),
    ],
)
def test_more_where_reading_dominates(missing: int, n_ctx: int, ram: int, wanted: int) -> None:
    assert ubatch_that_pays(missing, n_ctx, ram, lambda n: n * (120 << 10)) == wanted


def test_auto_is_a_number_of_tokens(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**scenarios.context_options(1, n_ctx=2048), "n_batch": 512}
    for missing, wanted in ((0, 512), (1 << 40, 2048)):
        monkeypatch.setattr(
            "flashmoe_gguf.loading.ubatch_that_pays",
            lambda _missing, n_ctx, ram, buffers, m=missing: ubatch_that_pays(
                m, n_ctx, 64 * GIB, lambda n: 0
            ),
        )
        llm = Llama(str(tiny_model("qwen3moe")), ram="8G", **{**options, "n_ubatch": "auto"})
        assert llm.context_params.n_ubatch == wanted
        assert llm.n_batch == wanted
        llm.eval(list(range(1, 40)))
        llm.close()


def test_another_word_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(OptionError, match="n_ubatch is 'many'"):
        Llama(str(tiny_model("qwen3moe")), n_ubatch="many")
