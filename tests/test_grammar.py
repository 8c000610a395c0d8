"""Grammars that llama.cpp would not survive are refused, and others choose as llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_tools import flashmoe
from flashmoe_gguf import Llama, OptionError
from flashmoe_gguf.grammar import MAX_REPEATS, _Places, check_grammar, check_schema


@pytest.mark.parametrize(
    ("grammar", "most"),
    [
        ('root ::= "a" | [b-c]+', 1),
        ('root ::= ("a"?){500}', 500),
        ('root ::= a{3,70}\na ::= b*\nb ::= "x" # (c?){9}', 70),
        ('root ::= "a"{0,500} "b"{,7}', 2),
        ('root ::= (("x" | "") "y"?){20}', 40),
        ('root ::= (a{9}){9}\na ::= "x"? b\nb ::= "y"?', 162),
        ('root ::= "(" ws "a" ws ws ")"\nws ::= [ \\t]*', 3),
        ('root ::= "a"? ' + '"b"? ' * 80, 81),
        ('root ::= "\\"{9}?" ["?{8}] "" .', 2),
        (" ".join(f'r{i} ::= ws "," (ws "b" r{i + 1})?' for i in range(90)) + " ws ::= [ ]*", 2),
    ],
)
def test_places(grammar: str, most: int) -> None:
    assert _Places(grammar).most == most


def test_rules_in_a_long_row_and_in_circles() -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000))
    check_grammar(f'root ::= r0\n{rules}\nr3000 ::= ""')
    check_grammar('root ::= "(" root? ")" | [0-9]+ ("+" root)?')
    check_grammar("root ::= (no rule of this name) {2} ) |")
    with pytest.raises(OptionError, match="in a row"):
        check_grammar('root ::= "a"? root? "b"?')


def test_what_people_write_is_let_through(chat_model: Path) -> None:
    from flashmoe_gguf.llama import llama_cpp  # noqa: F401  first: it chooses the libraries

    # isort: split
    from llama_cpp.llama_grammar import JSON_GBNF, LIST_GBNF, json_schema_to_gbnf

    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 200} for i in range(60)},
    }
    listed = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 50}
    long = {"type": "string", "minLength": 3, "maxLength": MAX_REPEATS}
    for schema in (wide, listed, long, {"type": "string", "pattern": "^[a-z]{2,20}(-[0-9]+)?$"}):
        check_schema(schema)
        check_grammar(json_schema_to_gbnf(json.dumps(schema)))
    check_grammar(JSON_GBNF)
    check_grammar(LIST_GBNF)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**8, "items": {"type": "integer"}},
        {"anyOf": [{"properties": {"a": {"type": "string", "maxLength": MAX_REPEATS + 1}}}]},
        {"type": "string", "pattern": "^a{1,100000000}$"},
        {"type": "string", "minLength": 1e300},
    ],
)
def test_schemas_that_would_be_gigabytes(schema: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="repeats something"):
        check_schema(schema)
    check_schema({"properties": {"maxLength": {"type": "integer"}}, "enum": [10**9], "x": None})


def test_where_no_token_fits(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "g").write_text('root ::= "\\x00"')
    (tmp_path / "s").write_text('{"const": "a\\u0000b"}')
    (tmp_path / "slow").write_text('root ::= ("a"?){500}')
    run = ("run", chat_model, "-p", "a", "-n", "9", "--temp", "0", "-t", "1", "--n-slots", "2")
    for grammar in (("--grammar-file", tmp_path / "g"), ("--json-schema-file", tmp_path / "s")):
        done = flashmoe(*run, *grammar)
        assert done.exit_code == 2 and "Traceback" not in done.stderr
        assert "error: the grammar allows none of the model's tokens here" in done.stderr
    done = flashmoe(*run, "--grammar-file", tmp_path / "slow")
    assert done.exit_code == 2 and "error: the grammar has more than" in done.stderr
    done = flashmoe(*run, "--grammar-file", "/dev/zero")
    assert done.exit_code == 2 and "/dev/zero never ends" in done.stderr


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_chooses_as_llama_cpp_does(
    temperature: float, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe_gguf.llama import llama_cpp

    # isort: split
    from llama_cpp.llama_grammar import LlamaGrammar

    def answer() -> list[int]:
        llm = Llama(str(chat_model), n_slots=2, n_ctx=256, n_threads=1, verbose=False)
        llm.set_seed(7)
        grammar = LlamaGrammar.from_string("root ::= [a-f ]{40} | [0-9 ]{40}", verbose=False)
        tokens = llm.generate([5, 6, 7], temp=temperature, grammar=grammar, repeat_penalty=1.1)
        found = [token for token, _ in zip(tokens, range(24), strict=False)]
        llm.close()
        return found

    ours = answer()
    assert len(set(ours)) > 1
    monkeypatch.setattr(Llama, "_init_sampler", llama_cpp.Llama._init_sampler)
    assert answer() == ours
