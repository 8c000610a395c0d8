"""What is filled in where settings are left open, and what is refused before anything loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tiny_models
from cli_tools import flashmoe
from flashmoe_gguf import OptionError
from flashmoe_gguf.server.app import build
from flashmoe_gguf.server.gate import Limits
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.models import Models
from flashmoe_gguf.server.settings import ServedModelSettings, ServedSettings, complete
from flashmoe_gguf.server.ticket import Ticket


def test_defaults_that_no_budget_survives_are_off(chat_model: Path) -> None:
    (model,), geometries = complete([ServedModelSettings(model=str(chat_model))])
    assert (model.model_alias, list(geometries)) == ("chat", ["chat"])
    assert (model.logits_all, model.use_mlock, model.verbose, model.n_ctx) == (
        False,
        False,
        False,
        4096,
    )
    assert not ServedSettings().interrupt_requests and ServedSettings().host == "127.0.0.1"


def test_what_was_set_stays(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N_THREADS", "7")  # llama_cpp.server's settings read the environment
    given = ServedModelSettings(
        model=str(chat_model), logits_all=True, verbose=True, n_ctx=100, model_alias="me"
    )
    (model,), _ = complete([given])
    assert (model.logits_all, model.verbose, model.n_ctx, model.n_threads) == (True, True, 100, 7)
    assert model.model_alias == "me"
    assert model.n_batch == model.n_ubatch == 100  # no more than the context holds


def test_names_of_shards(tmp_path: Path) -> None:
    first = tiny_models.make(tmp_path / "big.model.gguf", "split")
    (model,), _ = complete([ServedModelSettings(model=str(first))])
    assert model.model_alias == "big.model"


def test_equal_names_are_refused(chat_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "chat.gguf"
    shutil.copy(chat_model, copy)
    paths = [ServedModelSettings(model=str(path)) for path in (chat_model, copy)]
    with pytest.raises(OptionError, match="two models are called chat"):
        complete(paths)
    complete([paths[0], ServedModelSettings(model=str(copy), model_alias="other")])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"lora_path": "x"}, "LoRA"),
        ({"cache": True, "repeatable": True}, "leave out cache"),
        ({"rpc_servers": "x"}, "rpc_servers"),
        ({"use_mlock": True}, "mlock"),
        ({"policy": "none such"}, "none such"),
    ],
)
def test_settings_that_cannot_be_honoured(
    chat_model: Path, setting: dict[str, object], words: str
) -> None:
    values = {"model": str(chat_model), "n_slots": 3, "n_threads": 1, **setting}
    (model,), _ = complete([ServedModelSettings(**values)])
    models = Models([model], Meters())
    with pytest.raises(OptionError, match=words):
        models.load("chat")
    assert models.state == "failed" and models.current is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"vocab_only": True}, "vocab_only"),
        ({"chat_format": "none such"}, "chat_format 'none such'"),
        ({"clip_model_path": "x", "chat_format": "llava-1-5"}, "only text can be read"),
    ],
)
def test_models_that_could_answer_nothing(
    chat_model: Path, setting: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        complete([ServedModelSettings(model=str(chat_model), **setting)])
    complete([ServedModelSettings(model=str(chat_model), chat_format="chatml")])


def test_addresses_and_keys(chat_model: Path, tmp_path: Path) -> None:
    def refused(**settings: object) -> str:
        config = tmp_path / "c.json"
        config.write_text(json.dumps({"models": [{"model": str(chat_model)}], **settings}))
        result = flashmoe("serve", "--config", config)
        assert result.exit_code == 2 and "Traceback" not in result.stderr
        return result.stderr

    assert "error: c.json: port: input should be less than" in refused(port=99999)
    assert "error: c.json: port: input should be greater than" in refused(port=-1)
    assert "error: c.json: host: string should have at least 1 character" in refused(host="")
    assert "ssl_keyfile and ssl_certfile belong together" in refused(ssl_keyfile="x")
    missing = refused(ssl_keyfile="/no/key", ssl_certfile="/no/cert")
    assert "error: ssl_certfile /no/cert and ssl_keyfile /no/key: No such file" in missing
    (tmp_path / "pem").write_text("no certificate")
    pem = str(tmp_path / "pem")
    assert "belong together" in refused(ssl_keyfile=pem, ssl_certfile=pem)


def test_pings_can_be_turned_off(chat_model: Path) -> None:
    completed, _ = complete([ServedModelSettings(model=str(chat_model))])
    served = build(ServedSettings(disable_ping_events=True), completed, limits=Limits(waiting=3))
    assert served.limits == Limits(waiting=3, ping_seconds=0)


def test_meters_tell_first_tokens_from_others() -> None:
    meters = Meters()
    ticket = Ticket("/v1/completions", "m")
    ticket.arrived -= 3.0
    for _ in range(5):
        meters.token(ticket)
    meters.prefilled(40, 2.5)
    meters.answered(ticket.path, 200)
    meters.answered(ticket.path, 400, "bad_schema")
    counts = meters.counts()
    assert (counts.answer_tokens, counts.decode_tokens, counts.first_tokens) == (5, 4, 1)
    assert (counts.prompt_tokens, counts.prefill_seconds) == (40, 2.5)
    assert 3.0 <= counts.first_token_seconds < 4.0
    assert counts.first_token_buckets.index(1) == 5  # up to 5 s
    assert counts.requests == {(ticket.path, 200): 1, (ticket.path, 400): 1}
    assert counts.errors == {"bad_schema": 1} and counts.tokens_per_second > 0
