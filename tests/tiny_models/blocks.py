"""Random quantised blocks that are valid and have a chosen spread.

Every byte of a block is random except its float scales, which are set so that
the decoded weights have about zero mean and the standard deviation asked for.
Layouts: `block_*` in llama.cpp's ggml/src/ggml-common.h. A new type is one row.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Bytes = npt.NDArray[np.uint8]
T = GGMLQuantizationType


class NewerType(IntEnum):
    """Types of llama.cpp that the gguf package does not know yet."""

    Q2_0 = 42


QType = T | NewerType
# The package's writer takes a type's sizes from this table: weights and bytes per block.
BLOCK_SIZES: dict[int, tuple[int, int]] = GGML_QUANT_SIZES  # type: ignore[assignment]
BLOCK_SIZES.setdefault(NewerType.Q2_0, (64, 18))

# Type -> its float16 fields as (offset in bytes, value relative to the scale).
# A block with a minimum decodes to scale * q - minimum: half of the largest q centres it.
F16_FIELDS: dict[QType, tuple[tuple[int, float], ...]] = {
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
    T.IQ1_S: ((0, 1.0),),
    T.IQ2_XXS: ((0, 1.0),),
    T.IQ2_XS: ((0, 1.0),),
    T.IQ2_S: ((0, 1.0),),
    T.IQ3_XXS: ((0, 1.0),),
    T.IQ3_S: ((0, 1.0),),
    T.IQ4_NL: ((0, 1.0),),
    T.IQ4_XS: ((0, 1.0),),
    T.TQ1_0: ((52, 1.0),),
    T.TQ2_0: ((64, 1.0),),
    T.Q1_0: ((0, 1.0),),
    NewerType.Q2_0: ((0, 1.0),),
}
# Type -> offset of its one-byte power-of-two scale.
E8M0_FIELD: dict[QType, int] = {T.MXFP4: 0}
# Types without blocks.
FLOATS = (T.F16, T.BF16)
# All that `random_blocks` makes; NVFP4 and IQ1_M keep their scales in ways of their own.
QTYPES: tuple[QType, ...] = (*F16_FIELDS, *E8M0_FIELD, T.NVFP4, T.IQ1_M, *FLOATS)
# Standard deviation of the weights at scale 1, where the package cannot decode: Q1_0 is -1 or 1,
# Q2_0 one of -1, 0, 1, 2.
_KNOWN_STD: dict[QType, float] = {T.Q1_0: 1.0, NewerType.Q2_0: 1.25**0.5}
_E8M0_ONE = 128  # ggml's tables hold doubled values, so 2^0 is the exponent byte 128


def scale_byte(qtype: QType) -> int:
    """Offset in a block of the byte that holds the exponent of its (first) scale.

    Flipping bit 2 of that byte makes the block 2 to 16 times larger or smaller, never infinite.
    """
    return E8M0_FIELD[qtype] if qtype in E8M0_FIELD else F16_FIELDS[qtype][0][0] + 1


def _filled(qtype: QType, raw: Bytes, scale: npt.NDArray[np.float64]) -> Bytes:
    """Set the scales of random blocks `raw` [n, block bytes] to `scale` [n], in place."""
    for offset, ratio in F16_FIELDS.get(qtype, ()):
        raw[:, offset : offset + 2] = (scale * ratio).astype("<f2").view(np.uint8).reshape(-1, 2)
    if qtype in E8M0_FIELD:
        exponent = _E8M0_ONE + np.rint(np.log2(scale)).astype(np.int64)
        raw[:, E8M0_FIELD[qtype]] = exponent.astype(np.uint8)
    if qtype == T.NVFP4:
        _set_ue4m3(raw, scale)
    if qtype == T.IQ1_M:
        _set_nibbles(raw, scale)
    return raw


def _set_ue4m3(raw: Bytes, scale: npt.NDArray[np.float64]) -> None:
    """NVFP4: four scales a block, of 4 exponent bits and 3 of mantissa.

    The bias is 8, for values are doubled as in MXFP4. The exponent stays off both ends, where
    zero and not-a-number are.
    """
    exponent = np.clip(np.floor(np.log2(scale)) + 8, 1, 14).astype(np.uint8)
    raw[:, :4] = exponent[:, None] << 3 | raw[:, :4] & 7


def _set_nibbles(raw: Bytes, scale: npt.NDArray[np.float64]) -> None:
    """IQ1_M: the float16 scale lies in the high nibbles of four 16-bit words at byte 48."""
    bits = scale.astype("<f2").view("<u2")
    words = raw[:, 48:56].copy().view("<u2")
    for i in range(4):
        words[:, i] = words[:, i] & 0x0FFF | (bits >> 4 * i & 0xF) << 12
    raw[:, 48:56] = words.view(np.uint8)


@cache
def _unit_std(qtype: QType) -> float:
    """Standard deviation of the weights of random blocks whose scale is 1."""
    if qtype in _KNOWN_STD:
        return _KNOWN_STD[qtype]
    assert isinstance(qtype, T)
    raw = np.random.default_rng(0).integers(0, 256, (512, BLOCK_SIZES[qtype][1]), np.uint8)
    return float(dequantize(_filled(qtype, raw, np.ones(512)), qtype).std())


def random_blocks(qtype: QType, n_blocks: int, std: float, rng: np.random.Generator) -> Bytes:
    """Return [n_blocks, block bytes] of `qtype` whose weights spread about `std`.

    Raises KeyError for a type that has no row here.
    """
    if qtype not in QTYPES:
        raise KeyError(f"no random blocks for {qtype.name}")
    if qtype in FLOATS:
        return _floats(qtype, rng.normal(0, std, n_blocks))
    raw = rng.integers(0, 256, (n_blocks, BLOCK_SIZES[qtype][1]), np.uint8)
    scale = std / _unit_std(qtype) * rng.uniform(0.75, 1.25, n_blocks)
    return _filled(qtype, raw, scale)


def _floats(qtype: QType, values: npt.NDArray[np.float64]) -> Bytes:
    """16-bit floats as bytes [n, 2]; BF16 is the upper half of a float32."""
    if qtype == T.F16:
        return values.astype("<f2").view(np.uint8).reshape(-1, 2)
    upper: Bytes = values.astype("<f4").view(np.uint8).reshape(-1, 4)[:, 2:].copy()
    return upper
