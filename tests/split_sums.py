"""The work list of wgrad's split sums in NumPy."""

from typing import NamedTuple

import numpy as np

from jaxops._lib.ragged.work_list import MOST_PARTS, STEP_ROWS, least_rows_of_part


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
