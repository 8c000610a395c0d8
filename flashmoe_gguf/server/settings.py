"""Settings: llama_cpp.server's, with ours added, from its config file or the command line."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flashmoe_gguf.llama  # noqa: F401  first: it chooses the libraries that llama_cpp loads

# isort: split
from llama_cpp.llama_chat_format import LlamaChatCompletionHandlerRegistry
from llama_cpp.server.settings import ModelSettings, ServerSettings
from pydantic import Field, ValidationError

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.host import default_threads
from flashmoe_gguf.store import Geometry, read_geometry

DEFAULT_CTX = 4096
_TYPE_NAMES = ("str", "int", "float", "bool")
# llama_cpp.server.model makes these chat formats out of files of the model's
_MADE_WHEN_LOADED = ("hf-autotokenizer", "hf-tokenizer-config")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


class ServedModelSettings(ModelSettings):  # type: ignore[misc,unused-ignore]
    """A model of the config file: llama_cpp.server's fields and those of `flashmoe_gguf.Llama`."""

    ram: str | int | None = Field(default=None, description="Budget of the whole process.")
    policy: str = Field(default="auto", description="Which expert leaves the cache.")
    policy_file: str | None = Field(
        default=None, description="Where a policy keeps what it learns."
    )
    learn: bool = Field(default=True, description="False: a policy stays as it is.")
    forget: bool = Field(default=False, description="Begin without what was learned before.")
    lookahead: str | int = Field(default="auto", description="Reading before the router has run.")
    io: str = Field(default="auto", description="How experts are read.")
    verify: str = Field(default="first", description="When packed experts are checked.")
    n_slots: int | None = Field(default=None, description="Experts cached per layer.")
    repeatable: bool = Field(
        default=False, description="A greedy answer does not depend on the requests before it."
    )
    stream: bool = Field(default=True, description="False: load it as llama_cpp does.")

    def ours(self) -> dict[str, Any]:
        """Arguments of `flashmoe_gguf.Llama` that llama_cpp.server does not know."""
        names = set(ServedModelSettings.model_fields) - set(ModelSettings.model_fields)
        return {name: getattr(self, name) for name in sorted(names)}


class ServedSettings(ServerSettings):  # type: ignore[misc,unused-ignore]
    """llama_cpp.server's, but a new request waits for its turn unless it is told otherwise."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    interrupt_requests: bool = False

    def check_tls(self) -> None:
        """Raises OptionError for a key and a certificate that cannot be used together."""
        if self.ssl_keyfile is None and self.ssl_certfile is None:
            return
        if self.ssl_keyfile is None or self.ssl_certfile is None:
            raise OptionError("ssl_keyfile and ssl_certfile belong together", "give both, or none")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:
            raise OptionError(
                f"ssl_certfile {self.ssl_certfile} and ssl_keyfile {self.ssl_keyfile}: "
                f"{error.strerror or error}",
                "give PEM files that belong together",
            ) from None


class ConfigFile(ServedSettings):
    """The config file: server settings and `models`."""

    models: list[ServedModelSettings] = Field(default_factory=list)


def read_config(path: str) -> ConfigFile:
    """Reads JSON, or YAML by its name; raises OptionError naming the field that is wrong."""
    name = Path(path).name
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = _parse_yaml(text) if name.endswith((".yaml", ".yml")) else json.loads(text)
    except OSError as error:
        raise OptionError(f"{path}: cannot read: {error.strerror}", "check the path") from None
    except ValueError as error:
        raise OptionError(f"{name}: {_one_line(error)}", "it must be JSON or .yaml") from None
    if not isinstance(values, dict):
        raise OptionError(f"{name}: it holds no settings", 'for example {"models": [...]}')
    try:
        return ConfigFile(**values)
    except ValidationError as error:
        raise OptionError(f"{name}: {first_problem(error)}", "see docs/SERVER.md") from None


def _parse_yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise OptionError("a YAML config needs the package PyYAML", "pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def first_problem(error: ValidationError) -> str:
    """ "models.0.n_ctx: input should be a valid integer".

    Of a value that may have several shapes, pydantic tells what is wrong with each; what counts is
    the shape whose fixed words, such as a message's role, are right.
    """
    problems = error.errors(include_url=False, include_input=False)
    unfit = [p["loc"][:-1] for p in problems if p["type"] == "literal_error" and len(p["loc"]) > 1]
    fitting = [p for p in problems if not any(p["loc"][: len(loc)] == loc for loc in unfit)]
    problem = (fitting or problems)[0]
    where = _place(problem)
    if problem["type"] == "literal_error":
        same = [p for p in problems if p["type"] == "literal_error" and _place(p) == where]
        text = "it should be " + ", ".join(str(p["ctx"]["expected"]) for p in same)
    else:
        text = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{where}: {text}" if where else text


def _place(problem: Any) -> str:
    """Names and numbers on the way to a value, without those of types."""
    parts = [str(part) for part in problem["loc"]]
    return ".".join(p for p in parts if re.fullmatch(r"[a-z0-9_]+", p) and p not in _TYPE_NAMES)


def complete(
    models: Sequence[ServedModelSettings],
) -> tuple[list[ServedModelSettings], dict[str, Geometry]]:
    """Fills in what was left open, and reads each header, by alias.

    llama_cpp.server's defaults of logits_all and mlock would break every budget: they are off
    unless asked for. Raises OptionError for names that are there twice, and what read_geometry
    raises.
    """
    done: list[ServedModelSettings] = []
    geometries: dict[str, Geometry] = {}
    for model in models:
        _check_model(model)
        alias = model.model_alias or _SHARD.sub("", Path(model.model).name.removesuffix(".gguf"))
        if alias in geometries or alias in (m.model_alias for m in done):
            raise OptionError(f"two models are called {alias}", "give each a model_alias")
        n_ctx = DEFAULT_CTX
        if model.hf_model_repo_id is None:  # else it is fetched when it is loaded
            geometries[alias] = geometry = read_geometry(model.model)
            trained = geometry.header.get("context_length")
            if isinstance(trained, int) and 0 < trained < n_ctx:
                n_ctx = trained
        n_ctx = model.n_ctx if "n_ctx" in model.model_fields_set else n_ctx
        n_batch = min(model.n_batch, n_ctx) if n_ctx else model.n_batch
        defaults: dict[str, Any] = {
            "n_ctx": n_ctx,
            "n_threads": default_threads(),
            "n_threads_batch": default_threads(),
            "use_mlock": False,
            "logits_all": False,
            "verbose": False,
        }
        update = {k: v for k, v in defaults.items() if k not in model.model_fields_set}
        update |= {
            "model_alias": alias,
            "n_batch": n_batch,
            "n_ubatch": min(model.n_ubatch, n_batch),
        }
        done.append(model.model_copy(update=update))
    if not done:
        raise OptionError("there is no model to serve", "name one, or give --config with `models`")
    return done, geometries


def _check_model(model: ServedModelSettings) -> None:
    """Raises OptionError for settings that a request would find out about."""
    if model.vocab_only:
        raise OptionError("vocab_only loads no weights: there is nothing to serve", "leave it out")
    if model.clip_model_path is not None:
        raise OptionError("clip_model_path: only text can be read here", "leave it out")
    known = {*LlamaChatCompletionHandlerRegistry._chat_handlers, *_MADE_WHEN_LOADED}
    if model.chat_format is not None and model.chat_format not in known:
        raise OptionError(
            f"there is no chat_format '{model.chat_format}'",
            f"leave it out for the model's own template, or take one of {', '.join(sorted(known))}",
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
