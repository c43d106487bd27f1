"""Plans of several modalities by the ways to run them, and random operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.ops.grouped_matmul import Plan, Tiles

# As in tests/ops/grouped_matmul/cases.py.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
HALF_RUNS = [*RUNS, pytest.param("triton", marks=pytest.mark.gpu)]

# (number, rows, columns) of each modality's matrices. One modality has the most rows, another the most columns; only
# the last one's widths are whole tiles.
SHAPES = ((2, 37, 20), (3, 21, 53), (1, 16, 32))
EIGHTS = ((2, 72, 40), (3, 40, 104), (1, 16, 32))
HOPPER = ((2, 328, 136), (3, 72, 712), (1, 64, 256))  # more columns than a tile has, and less
HOPPER_TILES = ((128, 256, False), (128, 128, True), (256, 128, False))


Plans = Plan | tuple[Plan, ...]


def plans(backend: str, fwd, dgrad, wgrad) -> tuple[Plan, ...]:
    """From each pass' tiles of each modality."""
    return tuple(Plan(backend, *tiles) for tiles in zip(fwd, dgrad, wgrad, strict=True))


def plan_of(run: str) -> Plans:
    """Tiles that differ by pass and by modality; in one pass they are all equal: one launch there, two elsewhere."""
    if run == "xla":
        return Plan("xla")
    if run == "interpret":
        a, b, c = Tiles(16, 32, 16, panel=2), Tiles(32, 16, 16, panel=3, tail=16), Tiles(16, 16, 16, panel=2, peel=True)
    elif run == "triton":
        a, b, c = (
            Tiles(bm, bn, 64, 8, 3, 2, kernel="triton", ping_pong=ping_pong) for bm, bn, ping_pong in HOPPER_TILES
        )
    else:
        a, b, c = Tiles(64, 64, 32, panel=2, tail=32), Tiles(128, 128, 32, panel=3, tail=64), Tiles(64, 32, 64, panel=2)
    return plans("triton" if run == "triton" else "pallas", (a, b, a), (b, b, b), (c, c, a))


def arguments_of(sizes, shapes=SHAPES, *, dtype="float32", before: int = 0, after: int = 0) -> dict:
    """The op's arguments in numpy. sizes: rows of each group, modality after modality."""
    rng = np.random.default_rng(0)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lhs, *rhs = (rng.normal(size=s) for s in ((int(offsets[-1]) + after, max(k for _, k, _ in shapes)), *shapes))
    return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), {"lhs": lhs, "rhs": tuple(rhs)}) | {
        "group_offsets": offsets
    }
