"""The work lists that products read."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.schedule_pallas import COLUMNS, schedule_groups, schedule_one, schedule_rows


def columns(schedule) -> np.ndarray:
    return np.asarray(schedule).reshape(COLUMNS, -1)


@pytest.mark.parametrize("M", [1, 63, 64, 65, 200])
def test_one_group_is_known_without_a_launch(M):
    one, found = columns(schedule_one(M, 64)), columns(schedule_rows(jnp.array([0, M], jnp.int32), M, 64, True))
    np.testing.assert_array_equal(one, found[:, : one.shape[1]])


def test_rows():
    """Before the groups, two groups and an empty one between them, behind them; then tiles that nobody needs, which have no rows."""
    group, start, end, number, total, zeros = columns(schedule_rows(jnp.array([5, 75, 75, 90], jnp.int32), 100, 64, True))
    assert total.tolist() == [5] * len(total)
    assert not zeros.any()
    assert [x[:5].tolist() for x in (group, start, end, number)] == [[3, 0, 0, 2, 3], [0, 5, 69, 75, 90], [5, 69, 75, 90, 100], [-1, 0, 1, 2, -1]]
    np.testing.assert_array_equal(start[5:], end[5:])


def test_groups():
    """Largest first; where each starts in a copy whose groups fill whole tiles."""
    group, start, end, first, total, zeros = (x[:3].tolist() for x in columns(schedule_groups(jnp.array([5, 15, 15, 90], jnp.int32), 100, True, 64)))
    assert (group, start, end, first) == ([2, 0, 1], [15, 5, 15], [90, 15, 15], [1, 0, 1])
    assert (total, zeros) == ([3] * 3, [0] * 3)
