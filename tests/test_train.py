"""Training policies: the network's table, the weights' file, the command, and what each refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import scenarios
from cli_tools import assert_error, flashmoe, lines_like
from flashmoe_gguf import Llama
from flashmoe_gguf._native import simulate
from flashmoe_gguf.errors import OptionError, TraceError
from flashmoe_gguf.policy.flashmoe import MAX_AGE, N_SHARES, Flashmoe
from flashmoe_gguf.policy_weights import load_weights
from flashmoe_gguf.trace import NO_EXPERT, Trace, write_trace
from flashmoe_gguf.train.compare import compare
from flashmoe_gguf.train.file import PolicyFile, write_policy_file
from flashmoe_gguf.train.training import (
    Split,
    join,
    split,
    train_flashmoe,
    train_learned,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

SIZES = (0.25, 0.5)


def make_trace(n_tokens: int = 1200, n_layers: int = 2, n_expert: int = 16, seed: int = 0) -> Trace:
    """Sequences with favourites of their own among experts that are drawn by lot."""
    random = np.random.default_rng(seed)
    seq = np.arange(0, n_tokens + 1, 100)
    experts = np.empty((n_tokens, n_layers, 3), np.uint16)
    for begin in seq[:-1]:
        for layer in range(n_layers):
            p = random.random(n_expert) ** 4
            for token in range(begin, begin + 100):
                experts[token, layer] = random.choice(n_expert, 3, replace=False, p=p / p.sum())
    counts = np.full(n_layers, n_expert, np.int32)
    return Trace(experts, seq, counts, np.arange(n_layers, dtype=np.int32), None, "abc")


TRACE = make_trace()


@pytest.fixture(scope="module")
def networks() -> Any:
    """Networks of two layers whose outputs bend: larger weights than training begins with."""
    from flashmoe_gguf.train.network import Networks

    made = Networks(2, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for weight in made.weights:
            weight *= 2
    return made


def test_the_network_is_the_papers(networks: Any) -> None:
    """Three linear layers with SiLU between them, as torch's own modules compute them."""
    nn = torch.nn
    for layer in range(2):
        plain = nn.Sequential(
            nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)
        )
        with torch.no_grad():
            for i, module in enumerate((plain[0], plain[2], plain[4])):
                module.weight.copy_(networks.weights[i][layer].T)
                module.bias.copy_(networks.biases[i][layer, 0])
            inputs = torch.rand(50, 2)
            expected = plain(inputs).squeeze(1)
            found = networks(inputs.expand(2, -1, -1))[layer]
        assert torch.allclose(found, expected, atol=1e-5)
        assert sum(p.numel() for p in plain.parameters()) == 17025
    assert sum(p.numel() for p in networks.parameters()) == 2 * 17025


def looked_up(table: Any, age: int, share: float) -> float:
    place = np.float32(share) * np.float32(N_SHARES - 1)
    node = min(int(place), N_SHARES - 2)
    row = table[age - 1, node : node + 2]
    return float(row[0] + (place - np.float32(node)) * (row[1] - row[0]))


def test_the_table_is_as_good_as_the_network() -> None:
    """At nodes it is the network; between them, interpolation is off by h^2 / 8 max |f''| at most.

    Of a trained network, that is well below a hundredth of the outputs' range.
    """
    from flashmoe_gguf.train.network import Networks, table

    learned = train_flashmoe(split(TRACE, 0), SIZES, max_epochs=2)
    networks = Networks(TRACE.n_layers, torch.Generator())
    with torch.no_grad():
        for i in range(3):
            networks.weights[i].copy_(torch.from_numpy(learned.networks[f"w{i + 1}"]))
            networks.biases[i].copy_(torch.from_numpy(learned.networks[f"b{i + 1}"]))
    made = table(networks)
    assert made.shape == (TRACE.n_layers, MAX_AGE, N_SHARES)
    assert np.array_equal(made.ravel(), learned.weights)
    shares = torch.linspace(0, 1, 64 * (N_SHARES - 1) + 1)
    for age in (1, 2, 3, 5, 9, 30, 200, MAX_AGE):
        inputs = torch.stack([torch.full_like(shares, 1 / age), shares], dim=1)
        with torch.no_grad():
            exact = networks(inputs.expand(TRACE.n_layers, -1, -1)).numpy()
        bend = np.abs(np.diff(exact.astype(np.float64), 2, axis=1)).max() * 64**2 / 8
        for layer in range(TRACE.n_layers):
            rows = [looked_up(made[layer], age, float(s)) for s in shares]
            error = np.abs(np.array(rows) - exact[layer]).max()
            assert error <= bend + 2e-4
            assert error <= 0.01 * np.ptp(made[layer])
            assert rows[::64] == pytest.approx(exact[layer, ::64], abs=1e-4)


@pytest.mark.parametrize("bypass", [False, True])
def test_the_same_victims_in_c_and_python(networks: Any, bypass: bool) -> None:
    from flashmoe_gguf.train.network import table

    made = table(networks)
    trace = make_trace(300)
    n_slots = np.array([4, 7], np.int32)
    arguments = (trace.experts, trace.seq[:-1], trace.n_expert, n_slots)
    counts = simulate("flashmoe", *arguments, weights=made.ravel(), bypass=bypass, victims=True)
    assert counts.victims is not None
    policy = Flashmoe(trace.n_expert.tolist(), n_slots.tolist(), made)
    resident: list[set[int]] = [set(), set()]
    n_victims = 0
    for token, layers in enumerate(trace.experts.tolist()):
        if token in trace.seq:
            policy.begin_sequence()
        for layer, used in enumerate(layers):
            here, victims = resident[layer], []
            missing = sorted(set(used) - here)
            for e in used:
                (policy.on_hit if e in here else policy.on_miss)(layer, e)
            policy.end_token(layer)

            def evict(pinned: set[int], layer: int = layer, here: set[int] = here) -> int:
                may_leave = np.zeros(16, np.bool_)
                may_leave[list(here - pinned)] = True
                victim = policy.victim(layer, may_leave)
                policy.on_remove(layer, victim)
                here.remove(victim)
                return victim

            for e in missing:
                if len(here) >= n_slots[layer] and not bypass:
                    victims.append(evict(set(used)))
                here.add(e)
                policy.on_insert(layer, e)
            while len(here) > n_slots[layer]:
                victims.append(evict(set()))
            found = counts.victims[token, layer]
            assert found[found != NO_EXPERT].tolist() == victims, (token, layer)
            n_victims += len(victims)
    assert n_victims > 200


def test_without_a_table_it_is_lru() -> None:
    n_slots = np.full(2, 6, np.int32)
    arguments = (TRACE.experts, TRACE.seq[:-1], TRACE.n_expert, n_slots)
    lru, plain = (simulate(name, *arguments) for name in ("lru", "flashmoe"))
    # of experts that were used last by one token, each takes another one
    assert abs(lru.hits.sum() - plain.hits.sum()) < 0.01 * lru.lookups.sum()


@pytest.mark.parametrize("wrong", [np.zeros(7), np.full(2 * MAX_AGE * N_SHARES, np.nan)])
def test_weights_that_it_cannot_take(wrong: Any) -> None:
    arguments = (TRACE.experts, TRACE.seq[:-1], TRACE.n_expert, np.full(2, 6, np.int32))
    with pytest.raises(OptionError, match="policy flashmoe cannot take"):
        simulate("flashmoe", *arguments, weights=wrong.astype(np.float32))
    with pytest.raises(OptionError, match="policy lru cannot take"):
        simulate("lru", *arguments, weights=wrong.astype(np.float32))


def test_training_learns_and_is_repeatable() -> None:
    parts = split(TRACE, 0)
    said: list[tuple[str, float]] = []
    options: dict[str, Any] = {"seed": 1, "max_epochs": 1, "dagger": 1}
    first = train_flashmoe(parts, SIZES, **options, progress=lambda *state: said.append(state))
    again = train_flashmoe(parts, SIZES, **options)
    assert np.array_equal(first.weights, again.weights)
    assert len(first.epochs) == len(first.loss) == 2
    shares = [share for _, share in said]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert any(what.startswith("round 2 of 2, epoch ") for what, _ in said)
    best = train_flashmoe(parts, SIZES, seed=2, max_epochs=4)
    assert not np.array_equal(best.weights, first.weights)
    fresh = make_trace(600, seed=5)
    results = {r.policy: r for r in compare(fresh, (0.25,), {"flashmoe": best.weights})}
    assert results["flashmoe"].hit_rate > results["lru"].hit_rate + 0.02
    assert results["belady"].gap == 1 and results["lru"].gap == 0
    assert results["flashmoe"].hit_rate < results["belady"].hit_rate


def test_states_of_prompts_are_not_learned_from() -> None:
    """Another routing of prompts' tokens changes nothing but the caches around the answers."""
    phase = np.ones(TRACE.n_tokens, np.uint8)
    phase[:600] = 0
    some = train_flashmoe(split(replace(TRACE, phase=phase), 0), SIZES, max_epochs=1)
    every = train_flashmoe(split(TRACE, 0), SIZES, max_epochs=1)
    assert not np.array_equal(some.weights, every.weights)
    prompts = replace(TRACE, phase=np.zeros(TRACE.n_tokens, np.uint8))
    assert np.array_equal(
        train_flashmoe(split(prompts, 0), SIZES, max_epochs=1).weights, every.weights
    )


def test_a_warm_start() -> None:
    learned = train_learned(TRACE, SIZES, passes=2)
    assert not learned.networks
    results = {r.policy: r for r in compare(TRACE, (0.25,), {"learned": learned.weights})}
    assert results["learned, trained"].hit_rate > results["learned"].hit_rate


def test_split_by_sequence() -> None:
    parts = split(TRACE, 0)
    assert len(parts.held_out.seq) - 1 == 2 and len(parts.training.seq) - 1 == 10
    assert parts.held_out.n_tokens + parts.training.n_tokens == TRACE.n_tokens
    assert isinstance(split(TRACE, 1), Split)
    whole = replace(TRACE, seq=np.array([0, 0, TRACE.n_tokens]))
    alone = split(whole, 0)
    assert np.array_equal(alone.held_out.experts, TRACE.experts[960:])
    with pytest.raises(TraceError, match="too few"):
        split(TRACE.select([]), 0)


def test_traces_are_joined() -> None:
    phase = np.ones(TRACE.n_tokens, np.uint8)
    narrow = replace(TRACE, experts=TRACE.experts[:, :, :2], phase=phase, fingerprint="")
    both = join([replace(TRACE, phase=phase), narrow])
    assert both.seq.tolist() == [*TRACE.seq, *(TRACE.seq[1:] + TRACE.n_tokens)]
    assert (both.experts[TRACE.n_tokens :, :, 2] == NO_EXPERT).all()
    assert both.phase is not None and both.phase.all() and both.fingerprint == "abc"
    assert join([TRACE, narrow]).phase is None
    with pytest.raises(TraceError, match="other layers"):
        join([TRACE, make_trace(n_expert=17)])
    with pytest.raises(TraceError, match="different models"):
        join([TRACE, replace(TRACE, fingerprint="def")])


FILE = PolicyFile(
    "flashmoe",
    np.arange(5, dtype=np.float32),
    (16, 16),
    "abc",
    "note",
    {"w1": np.ones((2, 2), np.float32)},
)


def metadata_of(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def test_the_file_is_one_that_runs_can_use(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    write_policy_file(path, FILE)
    assert np.array_equal(load_weights(path, policy="flashmoe", fingerprint="abc"), FILE.weights)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert np.array_equal(file.get_tensor("w1"), FILE.networks["w1"])
    assert metadata_of(path)["n_expert"] == "[16, 16]" and metadata_of(path)["note"] == "note"
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]
    with pytest.raises(TraceError, match="cannot write"):
        write_policy_file(tmp_path / "none" / "p", FILE)


def test_a_model_runs_with_it(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Trace, train, run: the same logits, and the policy is refused before it is trained."""
    model, trace, out = str(tiny_model("qwen3moe")), tmp_path / "t.npz", tmp_path / "p"
    options = {"n_slots": 4, **scenarios.context_options(1, n_ctx=512)}
    with pytest.raises(OptionError, match="flashmoe decides nothing before it is trained"):
        Llama(model, policy="flashmoe", **options)
    llm = Llama(model, trace=trace, **options)
    plain = scenarios.follow(llm, range(1, 20), 40)
    llm.close()
    assert flashmoe("train", trace, "-o", out, "--epochs", "1").exit_code == 0
    llm = Llama(model, policy="flashmoe", policy_file=out, **options)
    assert np.array_equal(scenarios.follow(llm, range(1, 20), 40), plain)
    stats = llm.stats()
    assert stats is not None and stats.policy == "flashmoe" and stats.evicted > 0
    llm.close()
    write_policy_file(out, replace(FILE, fingerprint=metadata_of(out)["fingerprint"]))
    with pytest.raises(OptionError, match="flashmoe"):
        Llama(model, policy="flashmoe", policy_file=out, **options)


def test_the_command(tmp_path: Path) -> None:
    trace, test, out = tmp_path / "t.npz", tmp_path / "x.npz", tmp_path / "p.safetensors"
    write_trace(trace, TRACE)
    write_trace(test, make_trace(300, seed=9))
    result = flashmoe(
        *("train", trace, "-o", out, "--epochs", "1", "--dagger", "1", "--test", test),
        *("--sizes", "25%, 50"),
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines_like(
        "\n".join(lines[:3]),
        [
            r"policy +flashmoe in .*p\.safetensors",
            r"trained on +1200 tokens of 12 sequences, a fifth held out; seed 0, 1 DAgger rounds, "
            r"1\+1 epochs, held-out loss \d+\.\d+",
            r"compared on +.*x\.npz: 300 tokens, cold caches",
        ],
    ), result.stdout
    assert lines[4].split("  ")[0] == "policy"
    names = [line.split()[0] for line in lines[5:]]
    assert names[0] == "lru" and names[-2:] == ["flashmoe", "belady"] and "dlfu" in names
    weights = load_weights(out, policy="flashmoe", fingerprint="abc")
    assert weights.size == 2 * MAX_AGE * N_SHARES
    assert metadata_of(out)["note"] == lines[1].partition("  ")[2].strip()

    result = flashmoe("train", trace, "-o", out, "--policy", "learned")
    assert result.exit_code == 0, result.output
    assert "compared on  held-out sequences: 200 tokens" in result.stdout
    assert "\nlearned, trained " in result.stdout
    assert load_weights(out, policy="learned", fingerprint="abc").size > 0


def test_learned_with_a_test_file_learns_from_all(tmp_path: Path) -> None:
    trace, test, out = tmp_path / "t.npz", tmp_path / "x.npz", tmp_path / "p.safetensors"
    write_trace(trace, TRACE)
    write_trace(test, make_trace(300, seed=9))
    result = flashmoe("train", trace, "-o", out, "--policy", "learned", "--test", test)
    assert result.exit_code == 0, result.output
    assert "trained on   1200 tokens of 12 sequences\n" in result.stdout
    weights = load_weights(out, policy="learned", fingerprint="abc")
    assert np.array_equal(weights, train_learned(TRACE, SIZES).weights)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "p"], "Missing argument 'TRACE...'"),
        (["t.npz"], "Missing option '-o'"),
        (["t.npz", "-o", "p", "--policy", "lru"], "'lru' is not one of"),
        (["t.npz", "-o", "p", "--policy", "learned", "--dagger", "1"], "--dagger means nothing"),
        (["t.npz", "-o", "p", "--sizes", "0%"], "is no list of shares"),
        (["t.npz", "-o", "p", "--sizes", "a"], "is no list of shares"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    result = flashmoe("train", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, out = tmp_path / "t.npz", tmp_path / "p"
    write_trace(trace, TRACE)
    assert_error(flashmoe("train", tmp_path / "none", "-o", out), "cannot read", "check the path")
    write_trace(tmp_path / "x.npz", make_trace(100, n_layers=3))
    other = flashmoe("train", trace, "-o", out, "--test", tmp_path / "x.npz")
    assert_error(other, "x.npz has 3 layers of 16 experts, the traces 2 of 16", "the same model")
    write_trace(tmp_path / "s.npz", replace(TRACE, experts=TRACE.experts[:5], seq=np.array([0, 5])))
    assert_error(flashmoe("train", tmp_path / "s.npz", "-o", out), "5 tokens are too", "record")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "flashmoe_gguf.train.network", raising=False)
    monkeypatch.delattr("flashmoe_gguf.train.network", raising=False)
    assert_error(flashmoe("train", trace, "-o", out), "training needs torch", "[train]")
    assert not out.exists()
