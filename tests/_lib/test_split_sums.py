"""Sums over long groups that several programs share: the work list, and what programs do with it."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.ragged.work_list import COLUMNS, MOST_PARTS, STEP_ROWS, least_rows_of_part
from tests.split_sums import bounds, cases, work_list

pytestmark = pytest.mark.versions


@pytest.mark.hopper
def test_the_kernels_list():
    """As in NumPy, for random offsets and such that break the contract; with zeros behind it."""
    from jaxops._lib.gluon.schedule_triton import schedule_parts

    for number, (offsets, M, split) in enumerate(cases()[:24]):
        want = work_list(offsets, M, split)
        work, entries = schedule_parts(jnp.asarray(offsets), M, split, zeros=31 * number)
        columns, zeros = np.split(np.asarray(work), [COLUMNS * entries])
        columns = columns.reshape(COLUMNS, entries)
        assert len(want) <= entries
        np.testing.assert_array_equal(columns[:4, : len(want)].T, np.array(want))
        assert columns[4:, 0].tolist() == [len(want), 0]
        assert len(zeros) >= 31 * number
        assert not zeros.any()


def test_every_row_is_in_one_part():
    """Whatever the offsets; and no part lies outside the arrays, has another one's memory or another sum's counter."""
    split_groups = 0
    for offsets, M, split in cases():
        least, rows, found = least_rows_of_part(M, split), bounds(offsets, M), work_list(offsets, M, split)
        slots = M // least
        assert 1 < slots <= split
        covered = {g: lo for g, (lo, _) in enumerate(rows)}
        counters: dict[int, int] = {}
        for i, (group, start, end, part) in enumerate(found):
            assert start == covered[group], "the parts of a group are in order"
            covered[group] = end
            if part == 0:
                assert (start, end) == rows[group]
                continue
            count, number, entry = part // MOST_PARTS**2, part // MOST_PARTS % MOST_PARTS, part % MOST_PARTS
            assert entry == i < slots
            assert 0 <= number < count
            assert counters.setdefault((entry - number) // 2, group) == group
            assert (start - rows[group][0]) % STEP_ROWS == 0
            assert least - STEP_ROWS < end - start < 1.5 * least + 2 * STEP_ROWS
            split_groups += number == 0
        assert covered == {g: hi for g, (_, hi) in enumerate(rows)}
        assert all(2 * counter < slots for counter in counters)
    assert split_groups > 20
