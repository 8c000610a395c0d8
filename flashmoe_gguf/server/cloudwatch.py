"""Sends how the cache does to Amazon CloudWatch, from a thread that the server never waits for.

| metric | unit | over one interval |
|---|---|---|
| CacheHitRate | Percent | lookups that found their expert in memory, prefill included |
| TokenThroughput | Count/Second | tokens of answers per second of decoding: idle time is left out |
| ExpertLoadLatency | Milliseconds | time that compute waited per miss: `wait_seconds / misses` |
| CacheEvictionCount | Count | experts that left the cache |

The dimension is ModelName. Where nothing was computed nothing is sent: an idle server is no slow
one. Zero evictions and a hit rate of zero are sent; a latency without a miss and a rate without a
token are not, for there is no such figure.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.stats import Stats

METRICS = {
    "CacheHitRate": "Percent",
    "TokenThroughput": "Count/Second",
    "ExpertLoadLatency": "Milliseconds",
    "CacheEvictionCount": "Count",
}
DIMENSION = "ModelName"
EVERY_SECONDS = 60.0

# The server is gone five seconds after a signal, and answers may take 3.5 of them.
_CLOSE_SECONDS = 1.0
# While the service cannot be reached: what two hours of one model take, well below the limits of
# one call (1000 figures) and of the past (two weeks).
_MOST_UNSENT = 480
_NAMESPACE = re.compile(r"[A-Za-z0-9._/#:-]{1,255}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """What the server has counted so far.

    `llm` tells one load of a model from the next, whose counters begin at zero. `stats` is None
    where nothing is streamed. `decoded_tokens` took `decode_seconds` (those of all models).
    """

    model: str
    llm: weakref.ref[Any]
    stats: Stats | None
    decoded_tokens: int
    decode_seconds: float


def figures(before: Moment | None, now: Moment) -> dict[str, float]:
    """Metric to value of what was computed between two moments; {} for nothing.

    `before` is None at first: then everything so far counts. After another load the counters of
    the cache count from zero; which model decoded the tokens is not known then, so that
    TokenThroughput is left out.
    """
    found: dict[str, float] = {}
    switched = before is not None and before.llm != now.llm
    done = now.stats
    if done is not None and before is not None and before.stats is not None and not switched:
        done = done - before.stats
    if done is not None and done.lookups > 0:
        found["CacheHitRate"] = 100.0 * done.hit_rate
        found["CacheEvictionCount"] = float(done.evicted)
    if done is not None and done.misses > 0:
        found["ExpertLoadLatency"] = 1e3 * done.wait_seconds / done.misses
    tokens, seconds = now.decoded_tokens, now.decode_seconds
    if before is not None:
        tokens, seconds = tokens - before.decoded_tokens, seconds - before.decode_seconds
    if tokens > 0 and seconds > 0 and not switched:
        found["TokenThroughput"] = tokens / seconds
    return found


class Publisher:
    """Sends the figures of each interval until it is closed.

    `read` is called from its own thread and gives None while no model is in memory. What cannot be
    sent is kept (the latest two hours of it) and sent with what comes next; of a row of failures
    the first is logged. Nothing that happens here reaches the server.

    Raises OptionError without boto3, for a namespace that CloudWatch would refuse, and where no
    region is set. Credentials are boto3's own: those of the instance, the environment or a profile.
    """

    def __init__(
        self,
        namespace: str,
        read: Callable[[], Moment | None],
        *,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        check_namespace(namespace)
        self._namespace = namespace
        self._read = read
        self._every_seconds = every_seconds
        self._client = _client()
        self._before: Moment | None = None
        self._unsent: deque[dict[str, Any]] = deque(maxlen=_MOST_UNSENT)
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cloudwatch", daemon=True)

    def start(self) -> Publisher:
        """Starts the thread; the first figures go out one interval from now."""
        self._thread.start()
        return self

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> bool:
        """Sends the rest, before the model is closed; False where that was not done in time.

        It may be called twice, and from any thread.
        """
        self._closing.set()
        if self._thread.ident is None:  # never started
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and not self._unsent

    def _run(self) -> None:
        self._guarded(self._collect)
        while not self._closing.wait(self._every_seconds):
            self._guarded(self._collect)
            self._guarded(self._send)
        self._guarded(self._collect)
        self._guarded(self._send)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            if not self._failing:
                self._failing = True
                reason = " ".join(str(error).split()) or type(error).__name__
                _log.warning("CloudWatch: %s; it is tried again", reason)

    def _collect(self) -> None:
        now = self._read()
        if now is None:
            return
        before, self._before = self._before, now
        time = datetime.now(timezone.utc)
        for name, value in figures(before, now).items():
            self._unsent.append(
                {
                    "MetricName": name,
                    "Dimensions": [{"Name": DIMENSION, "Value": now.model[:1024]}],
                    "Timestamp": time,
                    "Value": value,
                    "Unit": METRICS[name],
                }
            )

    def _send(self) -> None:
        if not self._unsent:
            return
        self._client.put_metric_data(Namespace=self._namespace, MetricData=list(self._unsent))
        self._unsent.clear()
        if self._failing:
            self._failing = False
            _log.warning("CloudWatch: figures are sent again")


def check_namespace(namespace: str) -> None:
    """Raises OptionError for a namespace that CloudWatch refuses."""
    if not _NAMESPACE.fullmatch(namespace):
        raise OptionError(
            f"{namespace!r} is no CloudWatch namespace",
            "letters, digits and . _ / # : -, 255 at most, such as FlashMoE",
        )
    if namespace.startswith(("AWS/", ":")):
        raise OptionError(f"the CloudWatch namespace {namespace!r} is reserved", "take another one")


def _client() -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise OptionError(
            "--cloudwatch needs a package that is not installed: boto3",
            "pip install 'flashmoe-gguf[aws]'",
        )
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(connect_timeout=5, read_timeout=5, retries={"max_attempts": 2})
    try:
        # boto3 itself knows AWS_DEFAULT_REGION only
        session = boto3.Session(region_name=os.environ.get("AWS_REGION") or None)
        return session.client("cloudwatch", config=config)
    except (BotoCoreError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(
            f"CloudWatch: {reason}", "set AWS_REGION, or a region in ~/.aws/config"
        ) from None
