"""Scores of any size: the output is right, and gradients are right or NaN, never wrong numbers."""

import numpy as np
import pytest

from tests.compare import assert_close
from tests.ops.packed_attention.cases import T, arrays
from tests.ops.packed_attention.test_values import every_way, one_at_a_time, seen

ENDS = np.array([2, 6, 12, 20, 20, 30], np.int32)
LARGE = slice(6, 12)  # the sequence with large scores; the others have ordinary ones


@pytest.mark.parametrize("on", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [6e5, 4e6, 1e15, 3e30, 1e38])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mask", ["whole", "causal"])
def test_large_scores(mask, sign, size, on):
    q, k, v, dout = arrays(0)
    q[LARGE], k[LARGE] = 0, 0
    q[LARGE, :, 0], k[LARGE, :, 0] = 2, sign * size * np.array([1, 1.25, 1, 1.5, 1.125, 1])[:, None]  # scores are k's
    until = np.zeros(T, np.int32)
    wanted = one_at_a_time(q, k, v, seen(ENDS, ENDS, until, mask, None, T))
    found = every_way(q, k, v, dout, ENDS, ENDS, until, mask=mask, cross=False)
    reference = found.pop("reference")
    assert len(found) == 4
    for way, (out, *gradients) in found.items():
        assert_close(out, wanted, "float32", name=way)
        for name, got, want in zip("qkv", map(np.array, gradients), map(np.array, reference[1:]), strict=True):
            if size > 2**20:
                assert np.isnan(got[LARGE]).all(), (way, name)
            elif name == "v":  # scores are an eighth apart, exponentials off by 6 % at most
                np.testing.assert_allclose(got[LARGE], want[LARGE], atol=0.07 * np.abs(dout[LARGE]).sum())
            got[LARGE] = want[LARGE] = 0
            assert_close(got, want, "float32", scale=2, name=f"{way} d{name}")
