"""`flashmoe serve`: the OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from flashmoe_gguf.cli.loading import note_memory
from flashmoe_gguf.cli.options import DEFAULT_BATCH, LoadOptions, load_options_of_many
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.plan_text import plan_rows
from flashmoe_gguf.cli.progress import Activity, State
from flashmoe_gguf.cli.screen import Screen
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.store import Geometry

if TYPE_CHECKING:
    from flashmoe_gguf.server.models import Models
    from flashmoe_gguf.server.served import ServedLlama
    from flashmoe_gguf.server.settings import ServedModelSettings, ServedSettings

_PACKAGES = (
    "fastapi",
    "pydantic_settings",
    "prometheus_client",
    "sse_starlette",
    "starlette_context",
    "uvicorn",
)


@click.command(short_help="Serve models over an OpenAI-compatible API.")
@load_options_of_many
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Where to listen.",
    show_default="127.0.0.1: this machine only",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port to listen on; 0: any that is free.",
    show_default="8000",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="FLASHMOE_API_KEY",
    help="What clients must send as a bearer token. Better given in the environment: arguments "
    "can be seen by others.",
    show_envvar=True,
)
@click.option(
    "--config",
    type=FilePath(),
    metavar="FILE",
    envvar="CONFIG_FILE",
    help="llama_cpp.server's config file, JSON or YAML; a model in it may also have ram, n_slots, "
    "policy, policy_file, learn, forget, lookahead, io, verify, repeatable and stream.",
    show_envvar=True,
)
@click.option(
    "--cloudwatch",
    metavar="NAMESPACE",
    help="Send hit rate, token rate, load latency and evictions to Amazon CloudWatch each minute "
    "(pip install 'flashmoe-gguf[aws]').",
)
@click.option(
    "--repeatable",
    is_flag=True,
    help="A greedy answer does not depend on the requests before it: of a prompt that begins like "
    "the last one only whole ubatches are not computed again. Otherwise all of it is taken over, "
    "which changes the last bits of logits, as in llama.cpp.",
)
@click.option(
    "--logprobs",
    is_flag=True,
    help="Answer requests for log probabilities; keeps all logits of a context in memory.",
)
def serve(
    load: LoadOptions,
    models: tuple[str, ...],
    host: str | None,
    port: int | None,
    api_key: str | None,
    config: str | None,
    cloudwatch: str | None,
    repeatable: bool,
    logprobs: bool,
) -> None:
    """Serve models over an OpenAI-compatible API, with a dashboard, until Ctrl-C or SIGTERM.

    It is llama-cpp-python's server: /v1/chat/completions, /v1/completions, /v1/embeddings and
    /v1/models, and besides /health, /metrics and, at /, the dashboard. Of several models the one
    that is asked for is in memory. Options say how the models named here are loaded; those of
    --config have their own settings.

    \b
    Examples:
      flashmoe serve model.gguf --ram 8G
      flashmoe serve small.gguf large.gguf --ram 16G --port 9000
      FLASHMOE_API_KEY=secret flashmoe serve model.gguf --host 0.0.0.0
    """
    _need_packages()
    from flashmoe_gguf.server.app import build
    from flashmoe_gguf.server.cloudwatch import Publisher
    from flashmoe_gguf.server.runner import Server, bind, is_loopback, url_of
    from flashmoe_gguf.server.settings import complete

    models_settings = [
        _model_settings(replace(load, model=model), repeatable, logprobs) for model in models
    ]
    settings, wanted = _settings(models_settings, host, port, api_key, config)
    completed, geometries = complete(wanted)
    with Screen() as screen:
        showing: list[Activity] = []

        def on_loaded(alias: str, llm: ServedLlama) -> None:
            while showing:
                showing.pop().stop()
            _print_plan(screen, geometries.get(alias), llm)
            screen.line(f"{alias} is ready: {url}")

        served = build(settings, completed, on_loaded=on_loaded)
        publisher = Publisher(cloudwatch, served.status.moment) if cloudwatch is not None else None
        with bind(settings.host, settings.port) as sock:
            url = url_of(sock, tls=settings.ssl_certfile is not None)
            screen.line(f"listening on {url}, API at {url}/v1")
            if not is_loopback(sock) and not settings.api_key:
                _warn_open(screen, settings.host)
            with Activity(screen, "loading", lambda: _state(served.models)) as activity:
                showing.append(activity)
                if publisher is None:
                    server = Server(served)
                else:
                    server = Server(served, before_free=publisher.start().close)
                server.run_until_stopped(sock)
        screen.line("stopped")
        if server.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt


def _need_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"the server needs packages that are not installed: {', '.join(missing)}",
            "pip install 'flashmoe-gguf[server]'",
        )


def _settings(
    named: list[ServedModelSettings],
    host: str | None,
    port: int | None,
    api_key: str | None,
    config: str | None,
) -> tuple[ServedSettings, list[ServedModelSettings]]:
    """What was asked for; the command line goes before the config file."""
    from flashmoe_gguf.server.settings import ConfigFile, read_config

    file = read_config(config) if config is not None else ConfigFile(host="127.0.0.1", port=8000)
    given: dict[str, Any] = {"host": host, "port": port, "api_key": api_key}
    settings = file.model_copy(update={k: v for k, v in given.items() if v is not None})
    if settings.api_key is not None and not settings.api_key.strip():
        raise OptionError("the API key is empty", "give one, or leave it out")
    settings.check_tls()
    return settings, [*named, *file.models]


def _model_settings(load: LoadOptions, repeatable: bool, logprobs: bool) -> ServedModelSettings:
    from flashmoe_gguf.server.settings import ServedModelSettings

    if not isinstance(load.ngl, int):
        raise OptionError("--ngl auto is not for serve", "give the number that `plan` shows")
    values: dict[str, Any] = {
        "model": load.model,
        **load.streaming,
        "n_threads": load.n_threads,
        "n_threads_batch": load.n_threads,
        "n_batch": load.n_batch,
        "n_ubatch": load.ubatch or DEFAULT_BATCH,
        "flash_attn": load.flash_attn,
        "n_gpu_layers": load.ngl,
        "repeatable": repeatable,
        "logits_all": logprobs,
        "verbose": load.verbose,
    }
    if load.ctx is not None:
        values["n_ctx"] = load.ctx
    return ServedModelSettings(**values)


def _print_plan(screen: Screen, geometry: Geometry | None, llm: ServedLlama) -> None:
    if geometry is None:
        geometry = llm.geometry
    screen.rows(
        plan_rows(
            geometry,
            streamed=llm.ours["stream"],
            plan=llm.plan,
            budgeted=llm.ours["n_slots"] is None,
            stats=llm.stats(),
            settings=f"context {llm.n_ctx()}, threads {llm.n_threads}, batch {llm.n_batch}, "
            f"ubatch {llm.context_params.n_ubatch}",
        )
    )
    if llm.plan is not None:
        note_memory(screen, llm.plan)


def _state(models: Models) -> State:
    fraction = models.loaded_fraction
    return State(fraction, 1.0) if fraction < 1 else State(words="making the context")


def _warn_open(screen: Screen, host: str) -> None:
    for line in (
        "*" * 72,
        f"WARNING: listening on {host} without an API key. Everyone who can reach this",
        "machine can use the model and read what it tells. Give --api-key, or leave",
        "--host at 127.0.0.1.",
        "*" * 72,
    ):
        screen.line(line, "bold red")
