"""FP8 matrices of several blocks, of which the last are cut: element by element, and back to the same bytes."""

import ml_dtypes
import numpy as np

from models.hf.quantized import fp8_scales, from_fp8, to_fp8

M, N = 300, 200


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Values up to the largest number of each block, whose scales are powers of two, so that no product is rounded."""
    rng = np.random.default_rng(0)
    values = rng.integers(-448, 449, (M, N)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return values, (2.0 ** rng.permutation(np.arange(-3, 3)).reshape(3, 2)).astype(np.float32)


def test_each_element_has_the_scale_of_its_block():
    values, scales = operands()
    assert fp8_scales((M, N)) == scales.shape
    read = from_fp8(values, scales)
    for i in range(M):
        for j in range(N):
            assert read[i, j] == np.float32(values[i, j]) * scales[i // 128, j // 128], (i, j)


def test_only_what_does_not_fit_gets_another_scale():
    values, scales = operands()
    matrix = from_fp8(values, scales)
    again, kept = to_fp8(matrix, scales)
    np.testing.assert_array_equal(again.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(kept, scales)
    matrix[255, 128] = 10 * 448 * scales[1, 1]  # a corner of the second block down and across
    again, changed = to_fp8(matrix, scales)
    assert np.argwhere(changed != scales).tolist() == [[1, 1]]
    outside = np.ones((M, N), bool)
    outside[128:256, 128:] = False
    np.testing.assert_array_equal(again.view(np.uint8)[outside], values.view(np.uint8)[outside])
    np.testing.assert_allclose(from_fp8(again, changed)[255, 128], matrix[255, 128], rtol=1e-6)
