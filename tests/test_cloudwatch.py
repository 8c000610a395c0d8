"""What is sent to CloudWatch, against a stand-in of the service that keeps what it is sent."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.server import cloudwatch
from flashmoe_gguf.server.cloudwatch import METRICS, Moment, Publisher, check_namespace, figures
from flashmoe_gguf.stats import Stats

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
moto = pytest.importorskip("moto", reason="moto is not installed")


class Loaded:
    """Stands for a model: two moments of one load refer to the same."""


def stats(**values: Any) -> Stats:
    """Counters that are zero but for those given."""
    words = {"policy", "policy_reason", "policy_failure", "io_mode"}
    zeros: dict[str, Any] = {
        f.name: "" if f.name in words else 0 for f in dataclasses.fields(Stats)
    }
    return Stats(**{**zeros, "regret": None, **values})


EARLY = stats(lookups=1000, hits=400, evicted=90, wait_seconds=3.0, tokens=70)
LATE = stats(lookups=1400, hits=700, evicted=130, wait_seconds=3.5, tokens=90)


def moment(llm: Loaded, counted: Stats | None, tokens: int = 0, seconds: float = 0.0) -> Moment:
    return Moment("olmoe", weakref.ref(llm), counted, tokens, seconds)


# What the figures are


def test_figures_are_of_the_interval_alone() -> None:
    llm = Loaded()
    found = figures(moment(llm, EARLY, 100, 10.0), moment(llm, LATE, 130, 12.0))
    assert found == {
        "CacheHitRate": pytest.approx(75.0),  # 300 of 400
        "CacheEvictionCount": 40.0,
        "ExpertLoadLatency": pytest.approx(5.0),  # 0.5 s over 100 misses
        "TokenThroughput": pytest.approx(15.0),
    }
    assert set(found) == set(METRICS)


def test_the_first_moment_counts_from_the_start() -> None:
    found = figures(None, moment(Loaded(), EARLY, 100, 10.0))
    assert found == {
        "CacheHitRate": pytest.approx(40.0),
        "CacheEvictionCount": 90.0,
        "ExpertLoadLatency": pytest.approx(5.0),  # 3 s over 600 misses
        "TokenThroughput": pytest.approx(10.0),
    }


def test_an_idle_server_sends_nothing() -> None:
    llm = Loaded()
    assert figures(moment(llm, LATE, 130, 12.0), moment(llm, LATE, 130, 12.0)) == {}


def test_zeros_that_mean_something_are_sent_and_the_others_left_out() -> None:
    llm, zero = Loaded(), stats()
    all_hit = figures(moment(llm, zero), moment(llm, stats(lookups=10, hits=10)))
    assert all_hit == {"CacheHitRate": 100.0, "CacheEvictionCount": 0.0}
    none_hit = figures(moment(llm, zero), moment(llm, stats(lookups=10)))
    assert none_hit == {"CacheHitRate": 0.0, "CacheEvictionCount": 0.0, "ExpertLoadLatency": 0.0}


def test_counters_of_another_load_begin_at_zero() -> None:
    """Also where they have already passed those of the load before."""
    first, second = Loaded(), Loaded()
    found = figures(moment(first, EARLY, 100, 10.0), moment(second, LATE, 130, 12.0))
    assert found == {
        "CacheHitRate": pytest.approx(50.0),
        "CacheEvictionCount": 130.0,
        "ExpertLoadLatency": pytest.approx(5.0),
    }


def test_a_model_that_is_not_streamed_has_its_speed_alone() -> None:
    llm = Loaded()
    assert figures(moment(llm, None, 10, 1.0), moment(llm, None, 30, 2.0)) == {
        "TokenThroughput": pytest.approx(20.0)
    }


# Sending


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of moto's CloudWatch, and an environment where boto3 finds a region and a key."""
    for name, value in (
        ("AWS_DEFAULT_REGION", "eu-central-1"),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
    ):
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    with moto.mock_aws():
        yield boto3.client("cloudwatch")


def values(aws: Any, metric: str, namespace: str = "FlashMoE") -> list[float]:
    """What was sent for the model, oldest first."""
    now = datetime.now(timezone.utc)
    found = aws.get_metric_statistics(
        Namespace=namespace,
        MetricName=metric,
        Dimensions=[{"Name": "ModelName", "Value": "olmoe"}],
        StartTime=now - timedelta(minutes=10),
        EndTime=now + timedelta(minutes=10),
        Period=60,
        Statistics=["Sum", "SampleCount", "Maximum", "Minimum"],
        Unit=METRICS[metric],
    )["Datapoints"]
    return sorted(v for point in found for v in {point["Minimum"], point["Maximum"]})


class Counting:
    """`read` of a publisher: each call gives the next moment, the last one again and again."""

    def __init__(self, *moments: Moment | None) -> None:
        self._moments = list(moments)
        self.calls = threading.Semaphore(0)

    def __call__(self) -> Moment | None:
        now = self._moments.pop(0) if len(self._moments) > 1 else self._moments[0]
        self.calls.release()
        return now


def wait_for(semaphore: threading.Semaphore, n: int) -> None:
    for _ in range(n):
        assert semaphore.acquire(timeout=20)


def test_close_sends_what_is_left(aws: Any) -> None:
    llm = Loaded()
    publisher = Publisher(
        "FlashMoE", Counting(moment(llm, EARLY, 100, 10.0), moment(llm, LATE, 130, 12.0))
    ).start()
    assert publisher.close(20)
    assert values(aws, "CacheHitRate") == [pytest.approx(40.0), pytest.approx(75.0)]
    assert values(aws, "CacheEvictionCount") == [40.0, 90.0]
    assert values(aws, "ExpertLoadLatency") == [pytest.approx(5.0)]
    assert values(aws, "TokenThroughput") == [pytest.approx(10.0), pytest.approx(15.0)]
    names = {(m["Namespace"], m["MetricName"]) for m in aws.list_metrics()["Metrics"]}
    assert names == {("FlashMoE", name) for name in METRICS}
    assert publisher.close(20)  # a second time changes nothing


def test_figures_go_out_while_the_server_runs(aws: Any) -> None:
    llm = Loaded()
    read = Counting(None, moment(llm, EARLY), moment(llm, EARLY))
    publisher = Publisher("Team/flash-moe", read, every_seconds=0.01).start()
    wait_for(read.calls, 4)  # the fourth reading is after the second has been sent
    assert values(aws, "CacheHitRate", "Team/flash-moe") == [pytest.approx(40.0)]
    assert publisher.close(20)
    assert values(aws, "CacheHitRate", "Team/flash-moe") == [pytest.approx(40.0)]


class Failing:
    """A client whose calls fail until it is told otherwise; keeps what it was given."""

    def __init__(self) -> None:
        self.error: Exception | None = OSError("no route\nto host")
        self.sent: list[dict[str, Any]] = []
        self.calls = threading.Semaphore(0)

    def put_metric_data(self, **given: Any) -> None:
        try:
            if self.error is not None:
                raise self.error
            self.sent.append(given)
        finally:
            self.calls.release()


def with_client(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    monkeypatch.setattr(cloudwatch, "_client", lambda: client)


def test_failures_are_logged_once_and_sent_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client, llm = Failing(), Loaded()
    with_client(monkeypatch, client)
    read = Counting(moment(llm, EARLY, 100, 10.0), moment(llm, LATE, 130, 12.0))
    publisher = Publisher("FlashMoE", read, every_seconds=0.01).start()
    wait_for(client.calls, 3)
    client.error = None
    assert publisher.close(20)
    assert [r.getMessage() for r in caplog.records] == [
        "CloudWatch: no route to host; it is tried again",
        "CloudWatch: figures are sent again",
    ]
    data = [d for call in client.sent for d in call["MetricData"]]
    assert sorted(d["MetricName"] for d in data) == sorted([*METRICS, *METRICS])
    assert all(d["Timestamp"].tzinfo is not None for d in data)


def test_a_read_that_fails_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, llm, calls = Failing(), Loaded(), threading.Semaphore(0)
    client.error = None
    with_client(monkeypatch, client)
    broken = threading.Event()
    broken.set()

    def read() -> Moment | None:
        calls.release()
        if broken.is_set():
            raise RuntimeError("closed meanwhile")
        return moment(llm, EARLY)

    publisher = Publisher("FlashMoE", read, every_seconds=0.01).start()
    wait_for(calls, 3)
    broken.clear()
    assert publisher.close(20)
    assert len(client.sent) == 1
    assert caplog.messages[0] == "CloudWatch: closed meanwhile; it is tried again"


def test_what_is_kept_while_nothing_can_be_sent_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, llm = Failing(), Loaded()
    with_client(monkeypatch, client)
    monkeypatch.setattr(cloudwatch, "_MOST_UNSENT", 4)
    moments = [moment(llm, stats(lookups=10 * n, hits=10 * n, evicted=n * n)) for n in range(1, 9)]
    publisher = Publisher("FlashMoE", Counting(*moments), every_seconds=0.001).start()
    wait_for(client.calls, 10)
    client.error = None
    assert publisher.close(20)
    evicted = [
        d["Value"]
        for call in client.sent
        for d in call["MetricData"]
        if d["MetricName"] == "CacheEvictionCount"
    ]
    assert evicted == [13.0, 15.0]  # 7 * 7 - 6 * 6, 8 * 8 - 7 * 7: the latest two


def test_close_does_not_wait_for_a_service_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hanging:
        def put_metric_data(self, **_given: Any) -> None:
            assert release.wait(20)

    llm = Loaded()
    with_client(monkeypatch, Hanging())
    publisher = Publisher("FlashMoE", lambda: moment(llm, EARLY)).start()
    started = time.monotonic()
    assert publisher.close(0.05) is False
    assert time.monotonic() - started < 10
    release.set()
    assert publisher.close(20)


def test_a_publisher_that_never_started_can_be_closed(aws: Any) -> None:
    assert Publisher("FlashMoE", lambda: None).close()


# What is refused before the server starts


@pytest.mark.parametrize("namespace", ["", "AWS/EC2", ":x", "a" * 256, "Flash\nMoE", "Überblick"])
def test_namespaces_that_the_service_refuses(namespace: str) -> None:
    with pytest.raises(OptionError) as raised:
        check_namespace(namespace)
    assert "namespace" in raised.value.message and raised.value.hint
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("namespace", ["FlashMoE", "team/flash-moe_1.0#x:y", "a" * 255])
def test_namespaces_that_are_fine(namespace: str) -> None:
    check_namespace(namespace)


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(OptionError) as raised:
        Publisher("FlashMoE", lambda: None)
    assert raised.value.message == "--cloudwatch needs a package that is not installed: boto3"
    assert raised.value.hint == "pip install 'flashmoe-gguf[aws]'"


def test_without_a_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="region"):
        Publisher("FlashMoE", lambda: None)


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_the_region_is_that_of_the_environment(
    aws: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv(name, "eu-north-1")
    llm = Loaded()
    assert Publisher("FlashMoE", lambda: moment(llm, EARLY)).start().close(20)
    assert boto3.client("cloudwatch", region_name="eu-north-1").list_metrics()["Metrics"]
    assert not aws.list_metrics()["Metrics"]


def test_the_module_alone_imports_no_boto3() -> None:
    code = "import sys, flashmoe_gguf.server.cloudwatch; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
