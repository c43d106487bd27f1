import itertools

import numpy as np
import pytest

from jaxops.ops.quantize import Tiles
from jaxops.ops.quantize.tile_pallas import Grid


@pytest.mark.parametrize("cols", [64, 128])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_transposed_tile_has_the_same_elements(cols, itemsize):
    held = set()
    for patch, near, warps in itertools.product((1, 16, 64), (1, 2), (1, 4, 16)):
        grid = Grid.of(Tiles(128, cols, patch, near, warps), itemsize, by_blocks=True)
        held.add(grid.held)
        numbers = grid.rows * cols + grid.columns
        assert numbers.shape == grid.shape
        np.testing.assert_array_equal(np.sort(numbers.ravel()), np.arange(128 * cols))
        np.testing.assert_array_equal(grid.transposed(numbers), grid.t.rows * cols + grid.t.columns)
    assert len(held) > 2
