"""Random Q4_K blocks with a chosen spread, made fast enough to fill gigabytes.

A block holds 256 weights in 144 bytes: float16 scale d and minimum scale dmin,
twelve bytes of 6-bit sub-block scales s and minima m, 128 bytes of 4-bit q; a
weight is d * s * q - dmin * m (`block_q4_K` in llama.cpp's ggml-common.h).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK_WEIGHTS = 256
BLOCK_BYTES = 144

# dmin = 7.5 d makes the mean zero when s, m are uniform on 0..63 and q on 0..15; the
# variance is then E[s^2] E[q^2] - (31.5 * 7.5)^2 + 7.5^2 var[m] = 66727 d^2.
_CENTRE = 7.5
_UNIT_STD = 66727.0**0.5


def random_q4_k(
    rows: int, width: int, std: float, bits: np.random.BitGenerator, *, zero_rows: int = 0
) -> npt.NDArray[np.uint8]:
    """Return a random matrix [rows, width / 256 * 144 bytes] of Q4_K.

    Its weights have zero mean and standard deviation `std`; the first `zero_rows` rows
    decode to exactly zero, though their bytes are as random as the others.
    """
    blocks = width // BLOCK_WEIGHTS
    n_bytes = rows * blocks * BLOCK_BYTES
    words = np.asarray(bits.random_raw(-(-n_bytes // 8)), np.uint64)
    matrix = words.view(np.uint8)[:n_bytes].reshape(rows, blocks, BLOCK_BYTES)
    scale = std / _UNIT_STD
    matrix[:, :, :4] = np.array([scale, scale * _CENTRE], "<f2").view(np.uint8)
    matrix[:zero_rows, :, :4] = 0
    return matrix.reshape(rows, blocks * BLOCK_BYTES)
