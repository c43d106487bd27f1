"""The fewest bytes that a quantisation moves: the count of the FP8 benchmarks, and their floor."""

import math

BLOCK = 128
BF16 = 2


def scale_bytes(scaling: str, rows: int, columns: int) -> int:
    """Of one layout: float32 scales of [rows, columns], columns being the axis that a row's blocks run along."""
    count = {
        "tensorwise": 1,
        "rowwise": rows,
        "block_1x128": rows * math.ceil(columns / BLOCK),
        "block_128x128": math.ceil(rows / BLOCK) * math.ceil(columns / BLOCK),
    }[scaling]
    return 4 * count


def written_bytes(scaling: str, rows: int, columns: int, layouts: str) -> int:
    """FP8 values, a byte each, and their scales, in each layout: "row", "col" or "both"."""
    row, col = scale_bytes(scaling, rows, columns), scale_bytes(scaling, columns, rows)
    return {"row": rows * columns + row, "col": rows * columns + col, "both": 2 * rows * columns + row + col}[layouts]


def moved_bytes(scaling: str, rows: int, columns: int, layouts: str, reads: int = 1) -> int:
    """`reads` times the bfloat16 tensor, and what is written once."""
    return reads * BF16 * rows * columns + written_bytes(scaling, rows, columns, layouts)


def reads_needed(scaling: str, layouts: str, given_amax: bool = False) -> int:
    """How often the cast reads its input.

    Twice if a scale needs more of it than fits on the chip, a whole tensor, or whole rows and whole columns at once;
    once if amax is given.
    """
    return 1 if given_amax else 2 if scaling == "tensorwise" or (scaling, layouts) == ("rowwise", "both") else 1
