"""Headers that llama.cpp would not survive: typed errors, from our rules or its assertions."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import scenarios
import tiny_models
from flashmoe_gguf import Llama, ModelFileError, UnsupportedModelError, models
from flashmoe_gguf.assertions import failed_assertion
from flashmoe_gguf.gguf import Header, Value
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.shapes import (
    ALL_ROTATED,
    LATENT,
    NO_KERNEL,
    SAME_WIDTHS,
    check_heads,
    check_loadable,
    check_numbers,
    check_top_k,
)
from flashmoe_gguf.store import read_geometry
from fuzz.gguf_head import Head, Key, padded, parse
from fuzz.headers import reserve
from tiny_models.child import stock_libraries
from tiny_models.every_arch import metadata_of

GGML = {"F32": 0, "F16": 1, "Q8_0": 8, "Q8_1": 9, "I8": 24, "I32": 26, "I64": 27, "F64": 28}


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of an architecture, made once."""
    if stock_libraries() is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    folder = tmp_path_factory.mktemp("archs")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else tiny_models.make_arch(path, name)

    return get


def changed(source: Path, out: Path, change: Callable[[Head], None]) -> Path:
    """`source` with another header; its tensors' data is zeros, of the right size."""
    head = copy.deepcopy(parse(source.read_bytes())[0])
    change(head)
    head.n_rows, head.n_keys = len(head.rows), len(head.keys)
    nbytes = head.repair()
    assert nbytes is not None
    raw = head.to_bytes()
    raw = raw.ljust(padded(len(raw), head.alignment), b"\0")
    out.write_bytes(raw + bytes(nbytes))
    return out


def set_u32(name: str, value: int) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        head.keys = [key for key in head.keys if key.name != name.encode()]
        head.keys.append(Key(name.encode(), 4, value.to_bytes(4, "little")))

    return change


def drop(name: str) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        before = len(head.rows)
        head.rows = [row for row in head.rows if row.name != name.encode()]
        assert len(head.rows) < before

    return change


def retype(name: str, kind: str) -> Callable[[Head], None]:
    def change(head: Head) -> None:
        (row,) = (row for row in head.rows if row.name == name.encode())
        row.ggml_type = GGML[kind]

    return change


NUMBERS = [
    ("qwen3moe", "rope.dimension_count", 16, "rope.dimension_count is 16, not 32"),
    ("qwen3moe", "attention.key_length", 64, "key_length is 64, not 32 as attention.value_length"),
    ("qwen3moe", "attention.head_count_kv", 0, "attention.head_count_kv is 0"),
    ("qwen3moe", "attention.head_count_kv", 3, "is 3, which does not divide 2 heads"),
    ("qwen3moe", "attention.head_count", 0, "attention.head_count is missing or 0"),
    ("deepseek2", "attention.key_length_mla", 32, "is 32, of which 32 are rotated"),
    ("deepseek2", "attention.key_length", 128, r"rows of 128 in the KV cache, not 64 \+ 32"),
    ("deepseek2", "attention.head_count_kv", 2, r"rows of 192 in the KV cache, not 64 \+ 32"),
    ("afmoe", "attention.sliding_window", 0, "sliding_window is 0"),
    ("qwen3next", "ssm.group_count", 0, "ssm.group_count is 0"),
    ("qwen3next", "full_attention_interval", 0, "full_attention_interval is 0"),
    ("granitehybrid", "ssm.group_count", 0, "ssm.group_count is 0"),
    ("deepseek4", "attention.output_group_count", 0, "output_group_count is 0"),
]


@pytest.mark.parametrize(("name", "key", "value", "words"), NUMBERS)
def test_a_number_that_llama_cpp_asserts_or_divides_by(
    arch: Callable[[str], Path], tmp_path: Path, name: str, key: str, value: int, words: str
) -> None:
    check_loadable(read_geometry(arch(name)))
    path = changed(arch(name), tmp_path / "m.gguf", set_u32(f"{name}.{key}", value))
    with pytest.raises(ModelFileError, match=words) as caught:
        check_loadable(read_geometry(path))
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("hy_v3", "blk.2.ffn_gate_up_exps.weight"),
        ("qwen3moe", "blk.0.ffn_down_exps.weight"),
        ("granitehybrid", "blk.0.ssm_conv1d.bias"),
        ("nemotron_h_moe", "blk.0.ssm_conv1d.bias"),
        ("qwen3next", "blk.0.attn_gate.weight"),
        ("qwen35moe", "blk.0.attn_qkv.weight"),
        ("kimi-k3", "blk.1.ffn_up_shexp.weight"),
        ("glm-dsa", "blk.1.indexer.attn_q_b.weight"),
    ],
)
def test_a_tensor_without_which_llama_cpp_crashes(
    arch: Callable[[str], Path], tmp_path: Path, name: str, tensor: str
) -> None:
    path = changed(arch(name), tmp_path / "m.gguf", drop(tensor))
    with pytest.raises(ModelFileError, match=r"tensor blk\.\d\..* is missing"):
        Llama(str(path), n_slots=2, **scenarios.context_options(1, n_ctx=64))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("blk.0.attn_q.weight", "I8"),
        ("blk.0.attn_q.weight", "F64"),
        ("blk.1.ffn_gate_exps.weight", "I32"),
        ("blk.1.ffn_gate_exps.weight", "Q8_1"),
        ("token_embd.weight", "I64"),
        ("output_norm.weight", "F16"),
        ("blk.0.attn_q_norm.weight", "Q8_0"),
        ("blk.2.attn_q.bias", "F16"),
    ],
)
def test_a_type_that_no_kernel_takes(
    arch: Callable[[str], Path], tmp_path: Path, tensor: str, kind: str
) -> None:
    path = changed(arch("qwen3moe"), tmp_path / "m.gguf", retype(tensor, kind))
    with pytest.raises(UnsupportedModelError, match=f"{tensor} is {kind}, which") as caught:
        Llama(str(path), n_slots=2, **scenarios.context_options(1, n_ctx=64))
    assert caught.value.hint
    packed = tmp_path / "packed.gguf"
    pack_model(path, packed)
    with pytest.raises(UnsupportedModelError, match=f"{tensor} is {kind}"):
        check_loadable(read_geometry(packed))


@pytest.mark.parametrize(
    ("ratios", "key_length", "ratio"),
    [((0, 0, 128), 512, 4), ((0, 0, 0), 512, 4), ((0, 4, 4), 64, 128), ((0, 128, 0, 4), 64, 4)],
)
def test_compression_without_which_a_cache_of_deepseek4_is_empty(
    ratios: tuple[int, ...], key_length: int, ratio: int
) -> None:
    def check(ratios: tuple[int, ...]) -> None:
        numbers: dict[str, Value] = {
            "attention.compress_ratios": ratios,
            "attention.key_length": key_length,
            "attention.indexer.key_length": 64,
        }
        metadata: dict[str, Value] = {"general.architecture": "deepseek4"}
        metadata |= {f"deepseek4.{key}": value for key, value in numbers.items()}
        check_numbers(Header(Path("m.gguf"), (), metadata, ()), 3)

    check((0, 4, 128))
    with pytest.raises(ModelFileError, match=f"compress_ratios has no layer with {ratio} "):
        check(ratios)


@pytest.mark.parametrize("counts", [(2, 0, 2), (2, 3, 2), (0, 2, 2)])
def test_top_k_by_layer_needs_an_architecture_that_has_it(
    arch: Callable[[str], Path], counts: tuple[int, ...]
) -> None:
    geometry = dataclasses.replace(read_geometry(arch("qwen3moe")), layer_top_k=counts)
    with pytest.raises(ModelFileError, match="expert_used_count is"):
        check_loadable(geometry)


def test_the_types_are_those_without_a_kernel() -> None:
    """By ggml's own table: ggml_type_traits_cpu.vec_dot is null."""
    import llama_cpp.llama_cpp as lc

    from flashmoe_gguf.gguf import GGML_TYPES

    class Traits(ctypes.Structure):
        _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p))

    get = lc._lib.ggml_get_type_traits_cpu
    get.restype, get.argtypes = ctypes.POINTER(Traits), (ctypes.c_int,)
    without = {name for i, (name, _, _) in GGML_TYPES.items() if not get(i).contents.vec_dot}
    assert without == NO_KERNEL


def test_every_architecture_is_taken(arch: Callable[[str], Path]) -> None:
    for name in tiny_models.ARCHS:
        check_loadable(read_geometry(arch(name)))


@pytest.mark.parametrize("name", sorted(ALL_ROTATED | SAME_WIDTHS | LATENT))
def test_the_lists_are_what_llama_cpp_asserts(name: str, tmp_path: Path) -> None:
    """A rule that llama.cpp gave up would refuse good files: each is seen to fail there."""

    def says(**keys: int) -> str:
        builder = metadata_of(name)
        builder.metadata |= {f"{name}.{k.replace('__', '.')}": v for k, v in keys.items()}
        lines = reserve(builder.write(tmp_path / "m.gguf"))
        return next(filter(None, map(failed_assertion, lines)), "")

    if name in LATENT:
        assert "a->ne[0] == b->ne[0]" in says(attention__key_length=128)
        return
    if name in SAME_WIDTHS:
        assert "n_embd_head == " in says(attention__value_length=16)
    if name in ALL_ROTATED:
        assert "n_embd_head == n_rot" in says(rope__dimension_count=16)


def test_an_assertion_while_loading_is_an_error(
    arch: Callable[[str], Path], tmp_path: Path
) -> None:
    """One that no rule of ours covers; the process goes on, and loads the next model."""
    path = changed(
        arch("minimax-m3"),
        tmp_path / "m.gguf",
        set_u32("minimax-m3.attention.indexer.block_size", 0),
    )
    options = scenarios.context_options(1, n_ctx=64)
    with pytest.raises(
        ModelFileError, match=r"cannot run this model: hparams\.indexer_b"
    ) as caught:
        Llama(str(path), n_slots=2, **options)
    assert "minimax-m3.cpp:" in caught.value.message and "\n" not in caught.value.message
    Llama(str(arch("minimax-m3")), n_slots=2, **options).close()


def test_an_assertion_outside_of_loading_still_ends_the_process(tmp_path: Path) -> None:
    code = (
        "from flashmoe_gguf.llama import llama_cpp\n"
        "from flashmoe_gguf.assertions import assertions_raised\n"
        "lib = llama_cpp.llama_cpp._lib\n"
        "with assertions_raised(lib), assertions_raised(lib):\n    pass\n"
        "lib.ggml_abort(b'here.c', 7, b'%s', b'the end')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == -6
    assert b"here.c:7: the end" in done.stderr and b"runtime_error" not in done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "llama_model_load: error loading model: /a b/src/x.cpp:77: GGML_ASSERT(n >= 1) failed",
            "n >= 1 does not hold (x.cpp:77)",
        ),
        ("x/ggml.c:12: fatal error", "fatal error (ggml.c:12)"),
        ("llama_model_load: error loading model: missing tensor 'a'", None),
        ("", None),
    ],
)
def test_a_line_of_the_log(line: str, words: str | None) -> None:
    assert failed_assertion(line) == words


# Heads of the known models, as llama.cpp's converter writes them (conversion/ in the pinned source:
# deepseek.py for latent attention, llama.py and glm.py for what is rotated); width, heads and
# further blocks are those of models.toml. Its `source` of each model also gives the numbers here;
# of OLMoE, DeepSeek-V2-Lite and gpt-oss the config.json of the model says the same.
KNOWN = {
    "olmoe-1b-7b": {"attention.head_count_kv": 16},
    "qwen3-30b-a3b": {
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
    },
    "gpt-oss-20b": {
        "attention.head_count_kv": 8,
        "attention.key_length": 64,
        "attention.value_length": 64,
    },
    "mixtral-8x7b": {"attention.head_count_kv": 8, "rope.dimension_count": 128},
    "deepseek-v2-lite": {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 512 + 64,
        "attention.value_length": 512,
        "attention.key_length_mla": 128 + 64,
        "attention.value_length_mla": 128,
        "rope.dimension_count": 64,
    },
    "glm-4.5-air": {
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "rope.dimension_count": 64,
    },
}
KNOWN["qwen3-235b-a22b"] = KNOWN["qwen3-30b-a3b"]
KNOWN["gpt-oss-120b"] = KNOWN["gpt-oss-20b"]
# Files made before llama.cpp kept the latent vector in its cache: models.toml counts those.
BEFORE_MLA = {
    "attention.head_count_kv": 16,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 128 + 64,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
}


@pytest.mark.parametrize("name", [*models.known_models(), "before MLA"])
def test_known_models_are_taken(name: str) -> None:
    known = models.find_model("deepseek-v2-lite" if name == "before MLA" else name).shape
    numbers = BEFORE_MLA if name == "before MLA" else KNOWN[name]
    head = known.width // known.heads
    row = numbers.get("attention.key_length", head) + numbers.get("attention.value_length", head)
    if "attention.key_length_mla" not in numbers:
        assert numbers["attention.head_count_kv"] * row == known.kv_width
    layers = known.layers + (known.prediction_layers or 0)
    numbers = numbers | {"embedding_length": known.width, "attention.head_count": known.heads}
    metadata: dict[str, Value] = {"general.architecture": known.architecture}
    metadata |= {f"{known.architecture}.{key}": value for key, value in numbers.items()}
    header = Header(Path(name), (), metadata, ())
    check_numbers(header, known.layers)
    check_heads(header, layers)
    check_top_k(header, (known.top_k,) * layers, range(layers))
