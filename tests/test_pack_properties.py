"""Properties of packing: pack, then unpack, is the identity; no damage goes unnoticed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.gguf import read_header
from flashmoe_gguf.pack import open_packed, pack_model, unpack_model, verify_model
from flashmoe_gguf.pack.source import gap_regions
from gguf_files import (
    F16,
    F32,
    I8,
    Q4_0,
    Q4_K,
    Q8_0,
    Gguf,
    Tensor,
    array,
    i32,
    moe_keys,
    scalar,
    string,
    u16,
    u32,
)

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WIDTH = {F32: 1, F16: 1, I8: 1, Q4_0: 32, Q8_0: 32, Q4_K: 256}
EXTRA_KEYS = (
    ("general.name", string("")),
    ("general.tags", array("str", [])),
    ("general.alignment", u32(32)),
    ("tokenizer.ggml.tokens", array("str", ["", "a", "\u20ac"] * 2000)),
    ("some.numbers", array("f64", [0.5, -1.0])),
    ("some.flag", scalar("bool", 1)),
    ("not.utf8", string(b"\xff\xfe")),
    ("split.comment", string("dropped")),
)


@dataclass(frozen=True)
class Model:
    """What hypothesis draws; `write` makes the files."""

    parts: tuple[tuple[Tensor, ...], ...]
    keys: tuple[tuple[str, bytes], ...]
    alignment: int
    version: int
    trailing: int
    filled_gaps: int  # of ten
    seed: int

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        count = len(self.parts)
        for i, tensors in enumerate(self.parts):
            name = f"m-{i + 1:05}-of-{count:05}.gguf" if count > 1 else "m.gguf"
            keys = list(self.keys) if i == 0 else []
            if count > 1:
                keys.append(("split.no", u16(i)))
                keys.append(("split.count", u16(count)))
                keys.append(("split.tensors.count", i32(sum(map(len, self.parts)))))
            if self.alignment != 32:
                keys = [pair for pair in keys if pair[0] != "general.alignment"]
            Gguf(keys, tensors, version=self.version, alignment=self.alignment).write(folder / name)
        first = min(folder.iterdir())
        self._dirty(first)
        return first

    def _dirty(self, first: Path) -> None:
        """Bytes after the last tensors, and some in the gaps between tensors."""
        dice = random.Random(self.seed)
        for shard in read_header(first).shards:
            with shard.path.open("ab") as file:
                file.write(dice.choice([bytes, dice.randbytes])(self.trailing))
        header = read_header(first)
        for number, shard in enumerate(header.shards):
            with shard.path.open("r+b") as file:
                for region in gap_regions(shard, number, header.tensors):
                    if dice.randrange(10) < self.filled_gaps:
                        file.seek(region.offset + dice.randrange(region.nbytes))
                        left = region.offset + region.nbytes - file.tell()
                        file.write(dice.randbytes(dice.randint(1, left)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    n_expert = draw(st.integers(2, 5))
    n_layer = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 1 << 16))
    dice = random.Random(seed)
    tensors = [Tensor("token_embd.weight", (draw(st.integers(1, 70)), 3), F16, fill=b"abc")]
    for layer in range(n_layer):
        roles = draw(st.sampled_from([("gate", "up", "down"), ("gate_up", "down"), ("up",)]))
        for family, experts in (("exps", n_expert), ("chexps", 2)):
            if family == "chexps" and draw(st.booleans()):
                continue
            for role in roles:
                kind = draw(st.sampled_from(sorted(WIDTH)))
                shape = (WIDTH[kind] * draw(st.integers(1, 3)), draw(st.integers(1, 40)), experts)
                name = f"blk.{layer}.ffn_{role}_{family}.weight"
                # Not periodic in experts: one in another's place must show.
                tensors.append(Tensor(name, shape, kind, fill=dice.randbytes(997)))
        bias = (draw(st.integers(1, 9)), n_expert)
        tensors.append(Tensor(f"blk.{layer}.ffn_up_exps.bias", bias, F32, fill=dice.randbytes(5)))
    if draw(st.booleans()):
        dice.shuffle(tensors)
    n_shard = draw(st.integers(1, 3))
    parts: list[list[Tensor]] = [[] for _ in range(n_shard)]
    for tensor in tensors:
        parts[draw(st.integers(0, n_shard - 1))].append(tensor)
    extra = draw(st.lists(st.sampled_from(EXTRA_KEYS), unique=True))
    return Model(
        parts=tuple(map(tuple, parts)),
        keys=(*moe_keys(layers=n_layer, experts=n_expert).items(), *extra),
        alignment=draw(st.sampled_from([1, 8, 32, 64, 4096, 8192])),
        version=draw(st.sampled_from([2, 3])),
        trailing=draw(st.sampled_from([0, 1, 31, 5000])),
        filled_gaps=draw(st.sampled_from([0, 3, 10])),
        seed=seed,
    )


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A folder that is there and empty, for one example."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_stripes(first: Path, work: Path, count: int, original: dict[str, bytes]) -> None:
    """There and back over several files."""
    drives = [work / f"drive{i}" for i in range(count)]
    for drive in [*drives, work / "from_stripes"]:
        drive.mkdir()
    pack_model(first, work / "striped.gguf", stripes=drives)
    assert verify_model(work / "striped.gguf", n_threads=1).ok
    unpack_model(work / "striped.gguf", work / "from_stripes")
    assert contents(work / "from_stripes") == original


@PROPERTY
@given(model=models())
def test_unpacked_is_what_was_packed(tmp_path: Path, model: Model) -> None:
    with emptied(tmp_path / "work") as work:
        first = model.write(work / "source")
        original = contents(work / "source")
        pack_model(first, work / "packed.gguf")
        data = (work / "packed.gguf").read_bytes()
        assert verify_model(work / "packed.gguf", n_threads=1).ok
        (work / "back").mkdir()
        unpack_model(work / "packed.gguf", work / "back")
        assert contents(work / "back") == original
        pack_model(work / "back" / first.name, work / "again.gguf")
        assert (work / "again.gguf").read_bytes() == data, "not deterministic"
        check_stripes(first, work, 1 + model.seed % 2, original)
        pack_model(first, work / "source" / "placed.gguf", in_place=True)
        assert contents(work / "source") == {"placed.gguf": data}
        for group in open_packed(work / "packed.gguf").layout.groups:
            assert group.offset % 4096 == group.block_bytes % 4096 == 0
            assert all(part.block_offset % 4096 == 0 for part in group.parts)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Path:
    """A packed file that tests may damage, and must mend."""
    out = tmp_path_factory.mktemp("packed") / "packed.gguf"
    pack_model(tiny_model("grovemoe"), out)
    return out


@contextmanager
def flipped(path: Path, offset: int, mask: int) -> Iterator[None]:
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ mask]))
        file.flush()
        yield
        file.seek(offset)
        file.write(before)


@PROPERTY
@given(data=st.data())
def test_any_flipped_byte_of_a_block_is_named(packed: Path, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(open_packed(packed).layout.groups))
    at = data.draw(st.integers(0, group.n_expert * group.block_bytes - 1))
    with flipped(packed, group.offset + at, data.draw(st.integers(1, 255))):
        report = verify_model(packed, n_threads=2)
    assert report.damaged_blocks == len(report.damages) == 1
    damage = report.damages[0]
    expert, place = divmod(at, group.block_bytes)
    inside = [
        p.tensor.name
        for p in group.parts
        if p.block_offset <= place < p.block_offset + p.expert_bytes
    ]
    found = (damage.layer, damage.family, damage.expert, damage.tensor)
    assert found == (group.layer, group.family, expert, inside[0] if inside else "")


@PROPERTY
@given(data=st.data())
def test_any_flipped_byte_of_a_dense_tensor_is_named(packed: Path, data: st.DataObject) -> None:
    dense = data.draw(st.sampled_from(open_packed(packed).layout.dense))
    at = data.draw(st.integers(0, dense.tensor.nbytes - 1))
    with flipped(packed, dense.offset + at, data.draw(st.integers(1, 255))):
        report = verify_model(packed, n_threads=2)
    assert (report.damaged_tensors, report.damaged_blocks) == (1, 0)
    assert [damage.tensor for damage in report.damages] == [dense.tensor.name]


@PROPERTY
@given(data=st.data())
def test_any_flipped_byte_of_a_header_is_an_error(packed: Path, data: st.DataObject) -> None:
    layout = open_packed(packed).layout
    stored = layout.header_offsets[0]
    length = open_packed(packed).source.shards[0].data_offset
    places = st.integers(0, len(layout.header) - 1) | st.integers(stored, stored + length - 1)
    with (
        flipped(packed, data.draw(places), data.draw(st.integers(1, 255))),
        pytest.raises(FlashMoEError) as caught,
    ):
        verify_model(packed, n_threads=1)
    assert "\n" not in caught.value.message


@PROPERTY
@given(data=st.data())
def test_any_truncation_is_an_error(packed: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = packed.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(FlashMoEError):
        verify_model(cut, n_threads=1)
