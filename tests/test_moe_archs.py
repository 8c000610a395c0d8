"""The build's list of MoE architectures, on a small source tree of the same form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moe_archs
from moe_archs import SourceTableError, moe_architectures

NAMES = """\
static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {
    { LLM_ARCH_DENSE,    "dense"    }, // { LLM_ARCH_GONE, "gone" },
    { LLM_ARCH_SPARSE,   "sparse"   },
    { LLM_ARCH_FUSED,    "fused"    },
    { LLM_ARCH_SPARSE_2, "sparse-2" },
    { LLM_ARCH_UNKNOWN,  "(unknown)"},
};
"""
MAPPING = """\
static llama_model * llama_model_mapping(llm_arch arch, const llama_model_params & params) {
    switch (arch) {
        case LLM_ARCH_DENSE:
            return new llama_model_dense(params);
        case LLM_ARCH_SPARSE:
            return new llama_model_sparse(params);
        case LLM_ARCH_FUSED:
            return new llama_model_fused(params);
        case LLM_ARCH_SPARSE_2:
            return new llama_model_sparse2(params);
        default:
            return nullptr;
    }
}
"""
CLASSES = """\
struct llama_model_dense : public llama_model_base {};
struct llama_model_sparse : public llama_model_base {};
struct llama_model_fused : public llama_model_base {};
struct llama_model_sparse2 : public llama_model_sparse {};
"""
LOADER = """\
void llama_model_{name}::load_arch_tensors(llama_model_loader &) {{
    for (int i = 0; i < n_layer; ++i) {{
        {line}
    }}
}}

llama_model_{name}::graph::graph() {{ use(LLM_TENSOR_FFN_UP_EXPS); }}
"""
LINES = {
    "dense": "up = create_tensor(tn(LLM_TENSOR_FFN_UP_SHEXP, i)); // not LLM_TENSOR_FFN_UP_EXPS",
    "sparse": "up = create_tensor(tn(LLM_TENSOR_FFN_UP_EXPS, i), {n});",
    "fused": "create_tensor_gate_up_exps(layer, i, n, n, n, 0);",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    models = tmp_path / "src" / "models"
    models.mkdir(parents=True)
    (tmp_path / "src" / "llama-arch.cpp").write_text(NAMES)
    (tmp_path / "src" / "llama-model.cpp").write_text(MAPPING)
    (models / "models.h").write_text(CLASSES)
    for name, line in LINES.items():
        (models / f"{name}.cpp").write_text(LOADER.format(name=name, line=line))
    return tmp_path


def test_those_whose_loader_creates_experts(source: Path) -> None:
    """Inherited loaders count; comments, shared experts and graphs do not."""
    assert moe_architectures(source) == ["fused", "sparse", "sparse-2"]


def test_written_as_json(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "list.json"
    moe_archs.main([str(source), str(out)])
    assert json.loads(out.read_text()) == ["fused", "sparse", "sparse-2"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("llama-arch.cpp", "LLM_ARCH_NAMES", "ARCHITECTURES", "no LLM_ARCH_NAMES"),
        ("llama-model.cpp", "llama_model_mapping(", "create(", "no llama_model_mapping"),
        ("llama-model.cpp", "return new", "return make", "empty"),
        ("llama-arch.cpp", "LLM_ARCH_FUSED", "LLM_ARCH_FUSE", "LLM_ARCH_FUSED has a loader"),
        ("models/fused.cpp", "::load_arch_tensors", "::load", "no load_arch_tensors"),
    ],
)
def test_a_table_that_moved_is_an_error(
    source: Path, file: str, old: str, new: str, message: str
) -> None:
    path = source / "src" / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SourceTableError, match=message):
        moe_architectures(source)


def test_a_missing_file_is_an_error(source: Path) -> None:
    (source / "src" / "models" / "models.h").unlink()
    with pytest.raises(SourceTableError, match=r"models\.h"):
        moe_architectures(source)
