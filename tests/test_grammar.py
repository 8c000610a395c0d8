"""Grammars that llama.cpp would not survive are refused, and others choose as llama.cpp does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_tools import flashmoe, flashmoe_child
from flashmoe_gguf import Llama, OptionError
from flashmoe_gguf.grammar import MAX_REPEATS, _Places, check_grammar, check_schema

LONG = 1 / 16  # what counts of a part that is more than a character


@pytest.mark.parametrize(
    ("grammar", "most"),
    [
        ('root ::= "a" | [b-c]+', 1),
        ('root ::= ("a"?){500}', 500),
        ('root ::= ("a"?){0000000000000000000500}', 500),
        ('root ::= a{3,70}\na ::= b*\nb ::= "x" # (c?){9}', 70),
        ('root ::= "a"{0,500} "b"{,7}', 2),
        ('root ::= (("x" | "") "y"?){20}', 40),
        ('root ::= (a{9}){9}\na ::= "x"? b\nb ::= "y"?', 162),
        ('root ::= "(" ws "a" ws ws ")"\nws ::= [ \\t]*', 3),
        ('root ::= "a"? ' + '"b"? ' * 80, 81),
        ('root ::= "ab"? ' + '"\\"b"? ' * 79, 80 * LONG),
        ('root ::= ("a" "b"*)? ' + '("," "b")? ' * 9, 1 + 9 * LONG),
        ('root ::= "\\x41"? "\\""{2}? "" .', 3 + LONG),
        ('root ::= "\\"{9}?" ["?{8}] "" .', 1 + LONG),
        (" ".join(f'r{i} ::= ws "," (ws "b" r{i + 1})?' for i in range(90)) + " ws ::= [ ]*", 2),
    ],
)
def test_places(grammar: str, most: float) -> None:
    assert min(_Places(grammar).most, 500) == pytest.approx(most)


def test_rules_in_a_long_row_and_in_circles() -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000))
    check_grammar(f'root ::= r0\n{rules}\nr3000 ::= ""')
    check_grammar('root ::= "(" root? ")" | [0-9]+ ("+" root)?')
    check_grammar("root ::= (no rule of this name) {2} ) |")
    empty = " | ".join(f'"y" a{i}' for i in range(3000))
    check_grammar(f"root ::= {empty}\n" + "\n".join(f'a{i} ::= ""' for i in range(3000)))
    row = "\n".join(f"c{i} ::= c{i - 1}" for i in range(1, 70))
    for grammar in (
        'root ::= "a"? root? "b"?',
        f'root ::= c69 c69\nc0 ::= ("a"?){{50}}\n{row}',
    ):
        with pytest.raises(OptionError, match="in a row"):
            check_grammar(grammar)


def test_what_people_write_is_let_through(chat_model: Path) -> None:
    from flashmoe_gguf.llama import llama_cpp  # noqa: F401  first: it chooses the libraries

    # isort: split
    from llama_cpp.llama_grammar import JSON_GBNF, LIST_GBNF, json_schema_to_gbnf

    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 200} for i in range(60)},
    }
    optional = {"properties": {f"p{i}": {"type": ["string", "null"]} for i in range(300)}}
    listed = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 50}
    long = {"type": "string", "minLength": 3, "maxLength": MAX_REPEATS}
    for schema in (
        wide,
        optional,
        listed,
        long,
        {"type": "string", "pattern": "^[a-z]{2,20}(-[0-9]+)?$"},
    ):
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
    check_schema({"default": {"maxLength": 4000}, "const": [{"minItems": 1e9}]})
    for odd in (True, None, 3, [schema]):
        with pytest.raises(OptionError, match="is an object"):
            check_schema(odd)


def test_where_no_token_fits(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "g").write_text('root ::= "\\x00"')
    (tmp_path / "s").write_text('{"const": "a\\u0000b"}')
    (tmp_path / "slow").write_text('root ::= ("a"?){500}')
    run = ("run", chat_model, "-p", "a", "-n", "9", "--temp", "0", "-t", "1", "--n-slots", "2")
    schema = ("--json-schema-file", tmp_path / "s")
    for options in (("--grammar-file", tmp_path / "g"), schema):
        done = flashmoe(*run, *options)
        assert done.exit_code == 2 and "Traceback" not in done.stderr
        assert "error: the grammar allows none of the model's tokens here" in done.stderr
    done = flashmoe_child(*run[:-2], "--no-stream", *schema)
    assert done.returncode == 2 and "error: the grammar allows none" in done.stderr
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
