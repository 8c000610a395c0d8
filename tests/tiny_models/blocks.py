"""Random quantised blocks that are valid and have a chosen spread.

Every byte of a block is random except its float scales, which are set so that
the decoded weights have about zero mean and the standard deviation asked for.
Layouts: `block_*` in llama.cpp's ggml/src/ggml-common.h. A new type is one row.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Bytes = npt.NDArray[np.uint8]
T = GGMLQuantizationType

# Type -> its float16 fields as (offset in bytes, value relative to the scale).
# A block with a minimum decodes to scale * q - minimum: half of the largest q centres it.
F16_FIELDS: dict[T, tuple[tuple[int, float], ...]] = {
    T.Q4_0: ((0, 1.0),),
    T.Q4_1: ((0, 1.0), (2, -7.5)),
    T.Q5_0: ((0, 1.0),),
    T.Q5_1: ((0, 1.0), (2, -15.5)),
    T.Q8_0: ((0, 1.0),),
    T.Q2_K: ((80, 1.0), (82, 1.5)),
    T.Q3_K: ((108, 1.0),),
    T.Q4_K: ((0, 1.0), (2, 7.5)),
    T.Q5_K: ((0, 1.0), (2, 15.5)),
    T.Q6_K: ((208, 1.0),),
    T.IQ3_S: ((0, 1.0),),
    T.IQ4_NL: ((0, 1.0),),
    T.IQ4_XS: ((0, 1.0),),
}
# Type -> offset of its one-byte power-of-two scale.
E8M0_FIELD: dict[T, int] = {T.MXFP4: 0}
_E8M0_ONE = 128  # ggml's tables hold doubled values, so 2^0 is the exponent byte 128


def scale_byte(qtype: T) -> int:
    """Offset in a block of the byte that holds the exponent of its (first) scale.

    Flipping bit 2 of that byte makes the block 2 to 16 times larger or smaller, never infinite.
    """
    return E8M0_FIELD[qtype] if qtype in E8M0_FIELD else F16_FIELDS[qtype][0][0] + 1


def _filled(qtype: T, raw: Bytes, scale: npt.NDArray[np.float64]) -> Bytes:
    """Set the scales of random blocks `raw` [n, block bytes] to `scale` [n], in place."""
    for offset, ratio in F16_FIELDS.get(qtype, ()):
        raw[:, offset : offset + 2] = (scale * ratio).astype("<f2").view(np.uint8).reshape(-1, 2)
    if qtype in E8M0_FIELD:
        exponent = _E8M0_ONE + np.rint(np.log2(scale)).astype(np.int64)
        raw[:, E8M0_FIELD[qtype]] = exponent.astype(np.uint8)
    return raw


@cache
def _unit_std(qtype: T) -> float:
    """Standard deviation of the weights of random blocks whose scale is 1."""
    raw = np.random.default_rng(0).integers(0, 256, (512, GGML_QUANT_SIZES[qtype][1]), np.uint8)
    return float(dequantize(_filled(qtype, raw, np.ones(512)), qtype).std())


def random_blocks(qtype: T, n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Return [n_blocks, block bytes] of `qtype` whose weights spread about `std`.

    Raises KeyError for a type that has no row here.
    """
    if qtype not in F16_FIELDS and qtype not in E8M0_FIELD:
        raise KeyError(f"no random blocks for {qtype.name}")
    raw = rng.integers(0, 256, (n_blocks, GGML_QUANT_SIZES[qtype][1]), np.uint8)
    scale = std / _unit_std(qtype) * rng.uniform(0.75, 1.25, n_blocks)
    return _filled(qtype, raw, scale)
