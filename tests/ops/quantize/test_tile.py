import itertools

import jax
import numpy as np
import pytest

from jaxops.ops.quantize import Tiles
from jaxops.ops.quantize.tile_pallas import Grid


@pytest.mark.parametrize("cols", [64, 128])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_transposed_tile_has_the_same_elements(cols, itemsize):
    tiles = (Tiles(128, cols, *each) for each in itertools.product((1, 16, 64), (1, 2), (1, 4, 16)))
    grids = [Grid.of(each, itemsize, by_blocks=True) for each in tiles]
    distinct = {(grid.tiles.patch, grid.tiles.near, grid.held): grid for grid in grids}

    @jax.jit  # one program for all of them
    def all_numbers():
        numbers = [(grid, grid.rows * cols + grid.columns) for grid in distinct.values()]
        return [(n, grid.transposed(n), grid.t.rows * cols + grid.t.columns) for grid, n in numbers]

    for grid, (numbers, found, wanted) in zip(distinct.values(), all_numbers(), strict=True):
        assert numbers.shape == grid.shape
        np.testing.assert_array_equal(np.sort(numbers.ravel()), np.arange(128 * cols))
        np.testing.assert_array_equal(found, wanted)
    assert len({grid.held for grid in grids}) > 2
