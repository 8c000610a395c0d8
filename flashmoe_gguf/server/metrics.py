"""/metrics for Prometheus, read from the counters when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from flashmoe_gguf import __version__
from flashmoe_gguf.host import process_memory
from flashmoe_gguf.server.meters import FIRST_TOKEN_BUCKETS, Counts
from flashmoe_gguf.server.status import Status, regret
from flashmoe_gguf.stats import ExpertUse, Stats


class Metrics(Collector):
    """`text()` is one page; it has a registry of its own."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        counts = self._status.meters.counts()
        gate, models = self._status.gate, self._status.models
        cache, use = self._status.cache()
        info = {"version": __version__, "model": models.current_alias or ""}
        if cache is not None:
            info |= {"policy": cache.policy, "io_mode": cache.io_mode}
        yield InfoMetricFamily("flashmoe", "What is served, and how experts are read.", info)
        yield _gauge("up_seconds", "Time since the server started.", self._status.uptime_seconds)
        yield _gauge("ready", "1 while a model is loaded.", models.current is not None)
        yield _gauge("requests_running", "Requests that compute.", gate.running is not None)
        yield _gauge("requests_waiting", "Requests that wait for their turn.", gate.waiting)
        yield _gauge("process_resident_bytes", "Memory of the process now.", process_memory()[0])
        yield from _request_metrics(counts)
        if cache is not None:
            yield from _cache_metrics(cache, use)


def _request_metrics(counts: Counts) -> Iterator[Metric]:
    tokens = CounterMetricFamily("flashmoe_tokens", "Tokens computed.", labels=["kind"])
    tokens.add_metric(["prompt"], counts.prompt_tokens)
    tokens.add_metric(["answer"], counts.answer_tokens)
    yield tokens
    seconds = CounterMetricFamily("flashmoe_compute_seconds", "Time computing.", labels=["kind"])
    seconds.add_metric(["prefill"], counts.prefill_seconds)
    seconds.add_metric(["decode"], counts.decode_seconds)
    yield seconds
    yield _gauge("tokens_per_second", "Answer tokens per second lately.", counts.tokens_per_second)
    first = HistogramMetricFamily(
        "flashmoe_time_to_first_token_seconds", "From a request's arrival to its first token."
    )
    total, buckets = 0, []
    edges = [*(str(edge) for edge in FIRST_TOKEN_BUCKETS), "+Inf"]
    for edge, n in zip(edges, counts.first_token_buckets, strict=True):
        total += n
        buckets.append((edge, float(total)))
    first.add_metric([], buckets, counts.first_token_seconds)
    yield first
    requests = CounterMetricFamily(
        "flashmoe_requests", "Answers given; 499: the client left.", labels=["path", "status"]
    )
    for (path, status), n in sorted(counts.requests.items()):
        requests.add_metric([path, str(status)], n)
    yield requests
    errors = CounterMetricFamily("flashmoe_errors", "Answers that were errors.", labels=["code"])
    for code, n in sorted(counts.errors.items()):
        errors.add_metric([code], n)
    yield errors


def _cache_metrics(cache: Stats, use: list[ExpertUse]) -> Iterator[Metric]:
    hits = CounterMetricFamily(
        "flashmoe_expert_hits", "Experts that were in memory.", labels=["layer"]
    )
    misses = CounterMetricFamily(
        "flashmoe_expert_misses", "Experts that had to be read.", labels=["layer"]
    )
    by_layer: dict[int, tuple[int, int]] = {}
    for row in use:  # some architectures have two groups in a layer
        before = by_layer.get(row.counts.layer, (0, 0))
        by_layer[row.counts.layer] = (
            before[0] + row.counts.hits,
            before[1] + row.counts.lookups - row.counts.hits,
        )
    for layer, (hit, missed) in sorted(by_layer.items()):
        hits.add_metric([str(layer)], hit)
        misses.add_metric([str(layer)], missed)
    yield hits
    yield misses
    yield _gauge("hit_rate", "Share of experts found in memory, 0 to 1.", cache.hit_rate)
    yield _gauge("decode_hit_rate", "The same while decoding.", cache.decode_hit_rate)
    for name, what, value in (
        ("read_bytes", "Bytes read from the model's files.", cache.bytes_read),
        ("reads", "Read requests.", cache.reads),
        ("wait_seconds", "Time that compute threads slept for experts.", cache.wait_seconds),
        ("evictions", "Experts that left the cache.", cache.evicted),
        ("bypassed", "Missing experts used without being kept.", cache.bypassed),
        ("prefetch_issued", "Expert parts read ahead.", cache.ahead_issued),
        ("prefetch_used", "Of these, used.", cache.ahead_used),
        ("prefetch_wasted", "Of these, dropped.", cache.ahead_dropped),
        ("guesses", "Experts read before their router had run (lookahead).", cache.guesses),
        ("guesses_used", "Of these, used.", cache.guesses_used),
        ("guesses_wasted", "Of these, not used.", cache.guesses_wasted),
        ("read_errors", "Experts that could not be read.", cache.failed_loads),
    ):
        yield CounterMetricFamily(f"flashmoe_{name}", what, value=value)
    for name, what, value in (
        ("resident_bytes", "Experts in memory.", cache.resident_bytes),
        ("slot_bytes", "Memory reserved for experts.", cache.slot_bytes),
        ("given_back_bytes", "Slots closed for want of memory.", cache.given_back_bytes),
        ("dense_bytes", "Weights that every token needs.", cache.dense_bytes),
        ("ring_bytes", "Buffers for experts that are not kept.", cache.ring_bytes),
        ("budget_bytes", "The budget of the whole process; 0: none was given.", cache.budget_bytes),
    ):
        yield _gauge(name, what, value)
    compared = regret(cache)
    if compared is not None:
        rates = GaugeMetricFamily(
            "flashmoe_regret", "This run compared with LRU and Belady.", labels=["figure"]
        )
        for name, number in compared.items():
            if number is not None:
                rates.add_metric([name], number)
        yield rates


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"flashmoe_{name}", what, value=float(value))
