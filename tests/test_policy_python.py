"""A policy in Python at run time: decisions, cost, failures, names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import scenarios
from cli_tools import flashmoe, make_replay_model
from flashmoe_gguf import Llama, OptionError, Stats
from flashmoe_gguf._native import ForeignPolicy, simulate
from flashmoe_gguf.bench.synthetic import replay_text
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.policy import Policy, find_class
from flashmoe_gguf.streaming import choose_policy

OPTIONS = scenarios.context_options(1, n_ctx=512)
POLICIES = '''
import numpy as np

class Highest:
    """The expert with the highest number leaves."""

    def __init__(self, n_expert, n_slots):
        self.sizes = n_expert, n_slots

    def victim(self, layer, may_leave):
        return int(np.flatnonzero(may_leave)[-1])

class Raises(Highest):
    def __init__(self, n_expert, n_slots):
        self.calls = 0

    def on_hit(self, layer, expert):
        self.calls += 1
        if self.calls > 10:
            raise ValueError("enough")

class Wrong(Highest):
    def victim(self, layer, may_leave):
        return int(np.flatnonzero(~may_leave)[0])

class Nothing(Highest):
    def victim(self, layer, may_leave):
        return None

class Unmakeable:
    def __init__(self):
        pass

    def victim(self, layer, may_leave):
        return 0

class Interrupted(Highest):
    done = False

    def victim(self, layer, may_leave):
        if not Interrupted.done:
            Interrupted.done = True
            raise KeyboardInterrupt
        return super().victim(layer, may_leave)

def function():
    pass
'''


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3moe")


@pytest.fixture(autouse=True)
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `mine` in the current folder."""
    (tmp_path / "mine.py").write_text(dedent(POLICIES))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine", None)


def run(model: Path, policy: str, n_tokens: int = 12) -> tuple[scenarios.Logits, Stats]:
    llm = Llama(str(model), n_slots=4, policy=policy, **OPTIONS)
    try:
        rows = scenarios.follow(llm, range(5, 15), n_tokens)
        stats = llm.stats()
        assert stats is not None and llm._experts is not None
        llm._experts.native.verify()
        return rows, stats
    finally:
        llm.close()


def test_a_twin_decides_as_its_original(model: Path) -> None:
    rows, stats = run(model, "lru")
    again, twin = run(model, "flashmoe_gguf.policy.lru:Lru")
    assert np.array_equal(rows, again)
    assert twin.policy == "flashmoe_gguf.policy.lru:Lru" and twin.policy_failure == ""
    assert twin.policy_seconds > 0 and stats.policy_seconds == 0
    assert (twin.hits, twin.evicted, twin.tokens) == (stats.hits, stats.evicted, stats.tokens)


def test_a_users_policy_decides(model: Path) -> None:
    rows, lru = run(model, "lru")
    again, stats = run(model, "mine:Highest")
    assert np.array_equal(rows, again)
    assert stats.policy == "mine:Highest" and stats.policy_failure == ""
    assert stats.evicted > 0 and stats.hits != lru.hits


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Raises", "ValueError: enough"),
        ("Wrong", r"it named expert \d, which may not leave"),
        ("Nothing", "TypeError: .*NoneType"),
    ],
)
def test_lru_takes_over_from_one_that_fails(model: Path, name: str, why: str) -> None:
    rows, _ = run(model, "lru")
    again, stats = run(model, f"mine:{name}")
    assert np.array_equal(rows, again)
    assert stats.policy == f"lru, as mine:{name} failed"
    assert re.match(why, stats.policy_failure)


def test_lru_goes_on_where_the_policy_failed() -> None:
    """From the failure on every victim is lru's."""

    class Fails(Policy):
        calls = 0

        def victim(self, layer: int, may_leave: Any) -> int:
            Fails.calls += 1
            raise RuntimeError("no idea")

    experts = synthetic_trace(300, 2, 16, 3, seed=1)
    sizes = np.array([16, 16], np.int32), np.array([5, 5], np.int32)
    foreign = ForeignPolicy("fails", Fails(*(s.tolist() for s in sizes)), sizes[0].tolist())
    begins = np.zeros(1, np.int64)
    ours = simulate(foreign, experts, begins, *sizes, victims=True)
    lru = simulate("lru", experts, begins, *sizes, victims=True)
    assert np.array_equal(ours.victims, lru.victims)
    assert Fails.calls == 1 and foreign.failure == "RuntimeError: no idea"


def test_sequences_and_tokens_are_told() -> None:
    class Listens(Policy):
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def begin_sequence(self) -> None:
            self.heard.append("begin")

        def on_hit(self, layer: int, expert: int) -> None:
            self.heard.append(("hit", layer, expert))

        def on_miss(self, layer: int, expert: int) -> None:
            self.heard.append(("miss", layer, expert))

        def on_insert(self, layer: int, expert: int) -> None:
            self.heard.append(("insert", layer, expert))

        def on_remove(self, layer: int, expert: int) -> None:
            self.heard.append(("remove", layer, expert))

        def end_token(self, layer: int) -> None:
            self.heard.append(("end", layer))

        def victim(self, layer: int, may_leave: Any) -> int:
            self.heard.append(("victim", layer, may_leave.tolist()))
            return int(np.flatnonzero(may_leave)[0])

    policy = Listens()
    experts = np.array([[[1, 0]], [[1, 2]]], np.uint16)
    sizes = np.array([3], np.int32), np.array([2], np.int32)
    simulate(ForeignPolicy("listens", policy, [3]), experts, np.array([0, 1]), *sizes)
    first = [
        "begin",
        ("miss", 0, 1),
        ("miss", 0, 0),
        ("end", 0),
        ("insert", 0, 0),
        ("insert", 0, 1),
    ]
    second = ["begin", ("hit", 0, 1), ("miss", 0, 2), ("end", 0)]
    leaves = [("victim", 0, [True, False, False]), ("remove", 0, 0), ("insert", 0, 2)]
    assert policy.heard == [*first, *second, *leaves]


def test_ctrl_c_in_a_policy_reaches_the_program(model: Path) -> None:
    llm = Llama(str(model), n_slots=4, policy="mine:Interrupted", **OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        scenarios.follow(llm, range(5, 15), 12)
    llm.reset()  # type: ignore[no-untyped-call]
    scenarios.follow(llm, [5], 10)
    stats = llm.stats()
    assert stats is not None and stats.policy == "mine:Interrupted"
    llm.close()


def test_the_command_line_says_what_it_costs_and_that_it_failed(tmp_path: Path) -> None:
    model = make_replay_model(tmp_path / "replay.gguf", 60)
    options = ("run", model, "--n-slots", 3, "--ctx", 128, "-t", 1, "--temp", 0, "-n", 20)
    arguments = (*map(str, options), "-p", replay_text(0, 2))
    works = flashmoe(*arguments, "--policy", "mine:Highest")
    assert works.exit_code == 0, works.output
    assert re.search(r"; policy [\d.]+ ms per token\n$", works.stderr)
    fails = flashmoe(*arguments, "--policy", "mine:Raises")
    assert (fails.exit_code, fails.stdout) == (0, works.stdout)
    last = fails.stderr.splitlines()[-1]
    assert last == "the policy is lru, as mine:Raises failed: ValueError: enough"


def test_a_failure_is_news_once(model: Path) -> None:
    llm = Llama(str(model), n_slots=4, policy="mine:Raises", **OPTIONS)
    before = llm.stats()
    scenarios.follow(llm, range(5, 15), 5)
    middle = llm.stats()
    scenarios.follow(llm, [5], 5)
    assert before is not None and middle is not None
    assert (middle - before).policy_failure == "ValueError: enough"
    assert (llm.stats() - middle).policy_failure == ""
    assert (llm.stats() - middle).policy_seconds == 0  # it is not called any more
    llm.close()


def test_the_class_in_the_manual() -> None:
    page = Path(__file__).parent.parent / "docs" / "POLICIES.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    Path("manual.py").write_text(code)
    experts = synthetic_trace(200, 1, 16, 2, seed=1)
    sizes = np.array([16], np.int32), np.array([4], np.int32)
    policy = find_class("manual:Oldest").make(*(s.tolist() for s in sizes))
    foreign = ForeignPolicy("oldest", policy, [16])
    counts = simulate(foreign, experts, np.zeros(1, np.int64), *sizes, victims=True)
    assert foreign.failure == ""
    assert counts.evicted[0] == counts.lookups[0] - counts.hits[0] - 4
    sys.modules.pop("manual", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mine:Lowest", "mine has no Lowest"),
        ("mine:function", "not a class with a method victim"),
        ("yours:Policy", "cannot import: ModuleNotFoundError"),
        (":Policy", "not the name"),
        ("mine:", "not the name"),
        ("belady", "needs to know the future"),
        ("belady-bypass", "needs to know the future"),
        ("mine", "no policy 'mine'"),
    ],
)
def test_what_is_no_policy(name: str, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        choose_policy(name)
    assert caught.value.hint


def test_a_module_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    with pytest.raises(OptionError, match="cannot import: ZeroDivisionError"):
        choose_policy("broken_policy:Policy")


def test_a_class_that_cannot_be_made(model: Path) -> None:
    with pytest.raises(OptionError, match=r"mine:Unmakeable cannot be made: TypeError"):
        Llama(str(model), n_slots=4, policy="mine:Unmakeable", **OPTIONS)
