"""The work list of wgrad's split sums in NumPy, and how Triton's one is found on a CPU.

python -m tests.split_sums    # TRITON_INTERPRET=1: the Triton kernel's lists are these, for random offsets
"""

import os
import sys
from typing import NamedTuple

import numpy as np

from jaxops._lib.ragged.work_list import COLUMNS, MOST_PARTS, STEP_ROWS, least_rows_of_part


class Entry(NamedTuple):
    group: int
    start: int
    end: int
    part: int


def bounds(offsets: np.ndarray, M: int) -> list[tuple[int, int]]:
    """Each group's rows, clipped as `ragged.runs` does."""
    lows = np.clip(offsets[:-1], 0, M)
    return [(int(lo), int(max(lo, min(max(hi, 0), M)))) for lo, hi in zip(lows, offsets[1:], strict=True)]


def work_list(offsets: np.ndarray, M: int, split: int) -> list[Entry]:
    rows, least = bounds(offsets, M), least_rows_of_part(M, split)
    parts = {g: (hi - lo) // least if hi - lo >= 2 * least else 1 for g, (lo, hi) in enumerate(rows)}
    if sum(n for n in parts.values() if n > 1) > M // least:
        parts = dict.fromkeys(parts, 1)
    found: list[Entry] = []
    for g in sorted(parts, key=lambda g: rows[g][0] - rows[g][1]):
        lo, hi = rows[g]
        steps, count = -(-(hi - lo) // STEP_ROWS), parts[g]
        ends = np.cumsum([steps // count + (i < steps % count) for i in range(count)]) * STEP_ROWS + lo
        for i, (start, end) in enumerate(zip([lo, *ends[:-1]], ends, strict=True)):
            part = ((count * MOST_PARTS + i) * MOST_PARTS + len(found)) if count > 1 else 0
            found.append(Entry(g, int(start), int(min(end, hi)), part))
    return found


def random_offsets(rng: np.random.Generator, M: int, G: int) -> np.ndarray:
    """With empty groups, rows before and after all groups, and every third time one group of most rows."""
    first, last = sorted(rng.integers(0, M + 1, 2))
    cuts = np.sort(rng.integers(first, last + 1, G - 1))
    if rng.integers(3) == 0:
        cuts = np.where(cuts < (first + last) // 2, first + cuts % 7, last - cuts % 7).clip(first, last)
        cuts.sort()
    return np.array([first, *cuts, last], np.int32)


WILD = {
    "broken": [0, 100, 20] * 5,
    "beyond": [-5, 300_000, 2, 5_000],
    "every": [0, 4_000] * 15,
    "negative": [-9, -7, -1],
}


def cases() -> list[tuple[np.ndarray, int, int]]:
    """Offsets, rows and split."""
    rng = np.random.default_rng(0)
    found = [(np.array(x, np.int32), 4_000, 7) for x in WILD.values()]
    for _ in range(60):
        M, G = int(2 ** rng.uniform(6, 14)), int(2 ** rng.uniform(0, 6))
        found.append((random_offsets(rng, M, G), M, int(rng.integers(2, 24))))
    return [case for case in found if case[1] // least_rows_of_part(case[1], case[2]) > 1]


def interpreted(offsets: np.ndarray, M: int, split: int, counters: int) -> tuple[np.ndarray, int]:
    """`schedule_parts` by Triton's interpreter."""
    import pytest

    from jaxops._lib.gluon import schedule_triton
    from tests.interpret_triton import interpret

    def call(given, *, kernel, out_type, grid, name, flops, **named):
        work = np.full(out_type.shape, -77, np.int32)
        interpret(kernel, grid, np.ascontiguousarray(given), work=work, **named)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_triton, "triton_call", call)
        work, entries = schedule_triton.schedule_parts(offsets, M, split, zeros=counters)
    return np.asarray(work), entries


def check(work: np.ndarray, entries: int, offsets: np.ndarray, M: int, split: int, counters: int) -> None:
    """That a list is as `work_list`'s."""
    want = work_list(offsets, M, split)
    columns = work[: COLUMNS * entries].reshape(COLUMNS, entries)
    assert len(want) <= entries
    np.testing.assert_array_equal(columns[:4, : len(want)].T, np.array(want))
    assert columns[4, 0] == len(want)
    assert columns[5, 0] == 0
    zeros = work[COLUMNS * entries :]
    assert len(zeros) >= counters
    assert not zeros.any()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it where it is imported"
    for number, (offsets, M, split) in enumerate(cases()):
        check(*interpreted(offsets, M, split, 31 * number), offsets, M, split, 31 * number)
    print(f"{number + 1} lists", file=sys.stderr)
