"""The work list: what kernels over ragged rows read instead of the offsets. Its two builders are schedule_triton.py,
for Hopper's kernels, and schedule_pallas.py."""

# int32 columns, one after another in one array: see `schedule_rows` and `schedule_groups` in schedule_pallas.py.
COLUMNS = 6
Spans = tuple[tuple[int, int], ...]  # ranges of runs (`ragged.runs`): first and end of each, ascending
STEP_ROWS = 64  # of a step of Hopper's half-precision kernels along a sum over rows
PANEL_BASE = 1024  # of two digits, a row tile's place in its panel and the height: `schedule_triton.schedule_rows`
MOST_PANEL = PANEL_BASE // 2 - 1  # tile rows that may be asked for: a panel has up to half as many more
MOST_PARTS = 64  # a sum has fewer parts: see `schedule_triton.schedule_parts`


def least_rows_of_part(M: int, split: int) -> int:
    """Rows of a part of a sum, at least, if one over all M rows has `split` parts: whole steps."""
    return -(-M // (split * STEP_ROWS)) * STEP_ROWS
