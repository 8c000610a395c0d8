"""`flashmoe models`: every known model with a verdict."""

from __future__ import annotations

import json

import pytest

from cli_tools import assert_error, flashmoe
from flashmoe_gguf.models import known_models

TABLE = """\
name              size      experts   floor     verdict  cached
olmoe-1b-7b       3.92 GiB  8 of 64   1.15 GiB  fits     100 %
qwen3-30b-a3b     17.3 GiB  8 of 128  1.89 GiB  streams  37 %
qwen3-235b-a22b   132 GiB   8 of 128  6.2 GiB   streams  1 %
gpt-oss-20b       11.3 GiB  4 of 32   2.79 GiB  streams  55 %
gpt-oss-120b      59 GiB    4 of 128  3.4 GiB   streams  8 %
mixtral-8x7b      26.4 GiB  2 of 8    2.23 GiB  streams  23 %
deepseek-v2-lite  9.65 GiB  6 of 64   2.3 GiB   streams  64 %
glm-4.5-air       68 GiB    8 of 128  6.84 GiB  streams  2 %

for a budget of 8 GiB
"""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_gguf.cli import models

    monkeypatch.setattr(models, "default_threads", lambda: 2)


def test_the_table() -> None:
    result = flashmoe("models", "--ram", "8G")
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "")


def test_json_has_all_of_them() -> None:
    data = json.loads(flashmoe("models", "--ram", "4G", "--json").stdout)
    assert data["ram_bytes"] == 4 << 30
    rows = {row["name"]: row for row in data["models"]}
    assert list(rows) == list(known_models())
    assert {row["verdict"] for row in rows.values()} == {"streams", "too big"}
    for row in rows.values():
        too_big = row["floor_bytes"] > 4 << 30
        assert (row["verdict"] == "too big") == too_big == (row["cached_share"] is None)
    assert rows["gpt-oss-20b"]["repository"] == "ggml-org/gpt-oss-20b-GGUF"


def test_by_default_this_machine_decides() -> None:
    result = flashmoe("models")
    assert result.exit_code == 0
    assert "less a tenth)\n" in result.stdout
    assert json.loads(flashmoe("models", "--json").stdout)["ram_source"] != "given"


def test_a_budget_that_is_none() -> None:
    assert_error(flashmoe("models", "--ram", "much"), "'much' is not an amount", "8G")
