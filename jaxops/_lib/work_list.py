"""The work list: what kernels over ragged rows read instead of the offsets. Its two builders are schedule_triton.py,
for Hopper's kernels, and schedule_pallas.py."""

# int32 columns, one after another in one array: see `schedule_rows` and `schedule_groups` in schedule_pallas.py.
COLUMNS = 6
Spans = tuple[tuple[int, int], ...]  # ranges of runs (`ragged.runs`): first and end of each, ascending
