"""Request bodies: checked before anything is computed, and put into the words of llama_cpp.server
where OpenAI's clients say the same thing in newer ones.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import flashmoe_gguf.llama  # noqa: F401  first: it chooses the libraries that llama_cpp loads

# isort: split
from llama_cpp.llama_grammar import json_schema_to_gbnf
from llama_cpp.server.types import (
    CreateChatCompletionRequest,
    CreateCompletionRequest,
    CreateEmbeddingRequest,
    DetokenizeInputRequest,
    TokenizeInputRequest,
)
from pydantic import BaseModel, ValidationError

from flashmoe_gguf.grammar import check_schema
from flashmoe_gguf.server.failures import ApiError
from flashmoe_gguf.server.settings import first_problem

CHAT = "/v1/chat/completions"

# Every path that computes, and what its body must be.
SCHEMAS: dict[str, type[BaseModel]] = {
    CHAT: CreateChatCompletionRequest,
    "/v1/completions": CreateCompletionRequest,
    "/v1/engines/copilot-codex/completions": CreateCompletionRequest,
    "/v1/embeddings": CreateEmbeddingRequest,
    "/extras/tokenize": TokenizeInputRequest,
    "/extras/tokenize/count": TokenizeInputRequest,
    "/extras/detokenize": DetokenizeInputRequest,
}

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Request:
    """A body that is in order. `model`: as the client named it."""

    body: bytes
    model: str | None
    stream: bool
    wants_usage: bool


def read_request(path: str, raw: bytes) -> Request:
    """Checks a body; raises ApiError with the field that is wrong. Large ones take a while."""
    values = _parse(raw)
    if path == CHAT:
        _translate_chat(values)
    try:
        checked = SCHEMAS[path].model_validate(values)
    except ValidationError as error:
        problem = first_problem(error)
        raise ApiError(400, problem, param=problem.split(":")[0].split(".")[0]) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    _check_values(values, checked)
    options = values.get("stream_options")
    return Request(
        body=json.dumps(values).encode("utf-8", "surrogatepass"),
        model=values.get("model"),
        stream=bool(getattr(checked, "stream", False)),
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        values = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    if _SURROGATE.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ApiError(400, "a string holds half a character: a lone surrogate") from None
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _translate_chat(values: dict[str, Any]) -> None:
    """What OpenAI's clients send and llama_cpp.server calls otherwise."""
    most = values.pop("max_completion_tokens", None)
    if most is not None:
        if type(most) not in (int, float) or most < 1:
            raise ApiError(
                400, "max_completion_tokens: give a number from 1 on", param="max_completion_tokens"
            )
        if values.get("max_tokens") is None:
            values["max_tokens"] = most
    if values.get("logprobs") is True and values.get("top_logprobs") is None:
        values["top_logprobs"] = 0  # llama_cpp.server would give none at all
    form = values.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(
                400, "response_format.json_schema.schema is missing", param="response_format"
            )
        form = values["response_format"] = {"type": "json_object", "schema": schema}
    if isinstance(form, dict) and "schema" in form and form.get("type") == "json_object":
        # llama_cpp.server would take any JSON where it does not understand a schema
        values["grammar"] = _grammar_of(form["schema"], "response_format")
        values["response_format"] = None
    messages = values.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            _translate_message(message)


def _grammar_of(schema: Any, param: str) -> str:
    """A JSON schema as GBNF; raises ApiError for one that llama_cpp does not understand."""
    try:
        check_schema(schema)
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except Exception as error:  # it fails in many ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApiError(
            400, f"the JSON schema cannot be used: {reason:.300}", code="bad_schema", param=param
        ) from None


def _translate_message(message: dict[str, Any]) -> None:
    if message.get("role") == "developer":
        message["role"] = "system"
    content = message.get("content")
    if message.get("role") == "assistant" and content is None:
        message["content"] = ""  # it called tools and said nothing; templates add to it
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            message["content"] = "".join(texts)
        elif any(part.get("type") != "text" for part in parts):
            raise ApiError(400, "messages: only text can be read here", param="messages")


def _check_values(values: dict[str, Any], checked: BaseModel) -> None:
    for name, value in checked.model_dump(exclude={"messages", "tools", "functions"}).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(400, f"{name}: {value} is no number", param=name)
    for name in ("n", "best_of"):
        if getattr(checked, name, None) not in (None, 1):
            raise ApiError(400, f"{name}: one answer per request", param=name)
    if (stop := getattr(checked, "stop", None)) is not None:
        values["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    prompt = getattr(checked, "prompt", "")
    if isinstance(prompt, list):
        if len(prompt) != 1:
            raise ApiError(400, "prompt: one per request", param="prompt")
        values["prompt"] = prompt[0]
    if getattr(checked, "repeat_penalty", 1.0) <= 0:
        raise ApiError(400, "repeat_penalty: give more than 0", param="repeat_penalty")
    if isinstance(checked, CreateChatCompletionRequest) and not values.get("messages"):
        raise ApiError(400, "messages: give at least one", param="messages")
    if isinstance(checked, CreateChatCompletionRequest):
        _check_tools(values)


def _check_tools(values: dict[str, Any]) -> None:
    """A forced tool must be there; its parameters become the grammar."""
    if isinstance(called := values.get("function_call"), dict):  # the older way to force one
        for function in values.get("functions") or []:
            if function["name"] == called.get("name"):
                _grammar_of(function.get("parameters") or {}, "functions")
    choice, tools = values.get("tool_choice"), values.get("tools")
    if not isinstance(choice, dict) and choice != "required":
        return
    if not tools:
        raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
    if choice == "required":  # llama_cpp.server forces none but by its name
        if len(tools) > 1:
            raise ApiError(
                400,
                "tool_choice: 'required' is for one tool; name it",
                param="tool_choice",
            )
        name = tools[0]["function"]["name"]
        values["tool_choice"] = {"type": "function", "function": {"name": name}}
    wanted = values["tool_choice"]["function"]["name"]
    for function in (tool["function"] for tool in tools):
        schema = function.setdefault("parameters", {"type": "object", "properties": {}})
        if function["name"] == wanted:
            _grammar_of(schema, "tools")
