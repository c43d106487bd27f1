"""Quantized tensors of Hugging Face's checkpoints: FP8 with a scale for each 128 x 128, and MXFP4.

Both are read into float32 and written back. A block keeps its scale while its values fit, so weights that did not
change are written as the bytes they were.
"""

import ml_dtypes
import numpy as np

BLOCK = 128
FP8 = ml_dtypes.float8_e4m3fn
FP8_MAX = 448.0
# The magnitudes of FP4 (e2m1), by their 3 bits; the fourth is the sign (OCP Microscaling Formats 1.0).
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4_BLOCK = 32
E8M0_BIAS = 127


def _spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A number for each element from those of the blocks of a matrix."""
    return np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[: shape[0], : shape[1]]


def fp8_scales(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a matrix's scales."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def from_fp8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """values [M, N] float8, scales [cdiv(M, 128), cdiv(N, 128)] float32 -> float32 [M, N]."""
    return values.astype(np.float32) * _spread(scales.astype(np.float32), values.shape)


def to_fp8(matrix: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) of a float32 matrix; `scales` are those it was read with."""
    rows, columns = fp8_scales(matrix.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = np.abs(matrix)
    most = padded.reshape(rows, BLOCK, columns, BLOCK).max(axis=(1, 3))
    # A value of the largest magnitude is rounded when it is read and divided again.
    fits = most <= scales * np.float32(FP8_MAX * (1 + 1e-6))
    scales = np.where(fits, scales, most / np.float32(FP8_MAX)).astype(np.float32)
    scaled = matrix / _spread(np.where(scales == 0, np.float32(1), scales), matrix.shape)
    return np.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8), scales


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [out, in / 32, 16] uint8, two values a byte, the first in the low bits; scales [out, in / 32], exponents
    -> float32 [in, out]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = np.where(codes & 8, -FP4[codes & 7], FP4[codes & 7]).reshape(*scales.shape, FP4_BLOCK)
    exponents = scales.astype(np.int32) - E8M0_BIAS
    return np.ldexp(values, exponents[..., None]).reshape(scales.shape[0], -1).T


def to_mxfp4(matrix: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, scales) of a float32 matrix [in, out]; `scales` are those it was read with. Ties go to even codes."""
    grouped = matrix.T.reshape(*scales.shape, FP4_BLOCK)
    most = np.abs(grouped).max(axis=-1)
    needed = np.ceil(np.log2(np.maximum(most, np.float32(1e-37)) / FP4[-1])).astype(np.int32)
    exponents = np.maximum(scales.astype(np.int32) - E8M0_BIAS, np.clip(needed, -E8M0_BIAS, E8M0_BIAS))
    scaled = np.ldexp(np.abs(grouped), -exponents[..., None])
    # Between two neighbours the middle goes to the one with an even code.
    middles = (FP4[1:] + FP4[:-1]) / 2
    codes = np.zeros(scaled.shape, np.uint8)
    for code, middle in enumerate(middles):
        codes += (scaled > middle) | ((scaled == middle) & (code % 2 == 1))
    codes |= np.signbit(grouped).astype(np.uint8) << 3
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, (exponents + E8M0_BIAS).astype(np.uint8)
