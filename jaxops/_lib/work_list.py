"""The work list: what kernels over ragged rows read instead of the offsets. Its two builders are schedule_triton.py,
for Hopper's kernels, and schedule_pallas.py."""

import numpy as np

# int32 columns, one after another in one array: see `schedule_rows` and `schedule_groups` in schedule_pallas.py.
COLUMNS = 6
Spans = tuple[tuple[int, int], ...]  # ranges of runs (`ragged.runs`): first and end of each, ascending


def schedule_one(M: int, bm: int) -> np.ndarray:
    """The list of `schedule_rows` if all rows are one group's, without a launch."""
    start = np.arange(0, M, bm, dtype=np.int32)
    end = np.minimum(start + bm, M)
    return np.concatenate([0 * start, start, end, start // bm, np.full_like(start, len(start)), 0 * start])
