"""Random values for a tensor that is known by name and shape alone.

The rules follow what a name means in every architecture: norms are near 1, biases near 0, decays
negative, routers spread enough that tokens differ in the experts they choose, and the experts'
matrices quantised.
"""

from __future__ import annotations

import re

import numpy as np
from gguf import GGMLQuantizationType as T

from .archs import ROUTER_GAIN
from .builder import Builder, Tensor

_EXPERT = re.compile(r"ffn_(?:up|gate|down|gate_up)_(?:ch)?exps\.weight$")
_ROUTER = re.compile(r"ffn_gate_inp\.weight$")
_NEAR_ONE = re.compile(
    r"norm[^.]*(?:\.weight)?$|\.scale$|scale\.weight$|ssm_d$|rope_freqs|norm_\d\."
)
_DECAY = re.compile(r"ssm_a$")
_TOKEN_TABLE = re.compile(r"tid2eid\.weight$")


def fill(m: Builder, name: str, shape: tuple[int, ...], experts: T) -> None:
    """Add tensor `name` of `shape`, fastest dimension first; `experts` is the experts' type."""
    stem = name.removesuffix(".weight")
    if _EXPERT.search(name):
        m.matrix(stem, shape, experts)
    elif _TOKEN_TABLE.search(name):
        _token_table(m, name, shape)
    elif _ROUTER.search(name):
        m.matrix(stem, shape, T.F32, ROUTER_GAIN)
    elif _NEAR_ONE.search(name):
        m.floats(name, shape, mean=1.0)
    elif _DECAY.search(name):
        m.floats(name, shape, mean=-1.0)
    elif name == "token_embd.weight":
        m.matrix(stem, shape, T.F32, gain=shape[0] ** 0.5)
    elif name.endswith(".weight") and len(shape) > 1:
        m.matrix(stem, shape, T.F32)
    else:
        m.floats(name, shape)


def _token_table(m: Builder, name: str, shape: tuple[int, ...]) -> None:
    """For each token the experts it uses, all different."""
    top_k, n_vocab = shape
    rng = m.rng(name)
    n_expert = m.spec.n_expert
    rows = np.stack([rng.permutation(n_expert)[:top_k] for _ in range(n_vocab)])
    m.tensors.append(Tensor(name, T.I32, rows.astype(np.int32)))
