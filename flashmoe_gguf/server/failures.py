"""What clients are told when something fails: OpenAI's error JSON, made in this one place."""

from __future__ import annotations

import re
from typing import Any

import fastapi
from starlette.exceptions import HTTPException

from flashmoe_gguf.errors import BudgetError, ExpertReadError, FlashMoEError, OptionError

# llama_cpp says it in these words, src llama_cpp/llama.py.
_TOO_LONG = re.compile(r"Requested tokens \((\d+)\) exceed context window of (\d+)")
_CLIENT_ERRORS = (ValueError, TypeError, KeyError, IndexError, AssertionError, OverflowError)


class ApiError(fastapi.HTTPException):
    """An answer that is an error. FastAPI passes it on; `body` is what the client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {message, type, param, code}}."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Cancelled(Exception):
    """Raised inside llama_cpp to end a generation that nobody wants any more."""


def api_error(error: BaseException) -> ApiError:
    """The answer for what a request has raised."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, HTTPException):
        error = error.__cause__  # starlette's way to say that the answer had begun
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, ExpertReadError):
        return ApiError(500, str(error), code="expert_read_failed")
    if isinstance(error, OptionError):
        return ApiError(400, str(error))
    if isinstance(error, BudgetError):
        return ApiError(503, str(error), code="not_enough_memory")
    if isinstance(error, FlashMoEError):
        return ApiError(500, str(error))
    if isinstance(error, Cancelled):
        return ApiError(503, "the answer was cancelled", code="cancelled")
    text = " ".join(str(error).split()) or type(error).__name__
    if found := _TOO_LONG.search(text):
        return ApiError(
            400,
            f"the prompt takes {found[1]} tokens, the context holds {found[2]}",
            code="context_length_exceeded",
            param="messages",
        )
    if "logits_all" in text:
        return ApiError(
            400,
            "this server was started without log probabilities; start it with --logprobs",
            param="logprobs",
        )
    if isinstance(error, _CLIENT_ERRORS) or _is_template_error(error):
        return ApiError(400, text)
    if isinstance(error, RecursionError):
        return ApiError(400, "the request is nested too deeply")
    return ApiError(500, f"{type(error).__name__}: {text}")


def _is_template_error(error: BaseException) -> bool:
    """A model's chat template refuses some conversations, and is a program of its maker."""
    return any(base.__module__.startswith("jinja2.") for base in type(error).__mro__)
