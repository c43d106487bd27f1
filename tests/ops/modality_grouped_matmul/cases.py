"""Random problems for modality_grouped_matmul, with NaN wherever nothing may be read, and the ways to run them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.programs import jit_once

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
            Tiles(bm, bn, 64, 8, 3, 2, kernel="triton", ping_pong=ping_pong, dynamic=bm == bn)
            for bm, bn, ping_pong in HOPPER_TILES
        )
    else:
        a, b, c = Tiles(64, 64, 32, panel=2, tail=32), Tiles(128, 128, 32, panel=3, tail=64), Tiles(64, 32, 64, panel=2)
    return plans("triton" if run == "triton" else "pallas", (a, b, a), (b, b, b), (c, c, a))


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs[M, K], a rhs[G, K, N] for each modality, dout[M, N]; NaN outside the groups and past a modality's columns."""

    lhs: jax.Array
    rhs: tuple[jax.Array, ...]
    dout: jax.Array
    offsets: jax.Array

    def arrays(self) -> tuple:
        return self.lhs, self.rhs, self.dout, self.offsets

    def there(self, axis: int) -> np.ndarray:
        """bool [M, K] or [M, N], axis 1 or 2: what is a modality's own."""
        offsets, found = np.asarray(self.offsets), np.zeros((self.lhs if axis == 1 else self.dout).shape, bool)
        first = 0
        for w in self.rhs:
            found[offsets[first] : offsets[first + w.shape[0]], : w.shape[axis]] = True
            first += w.shape[0]
        return found


def make_case(sizes, shapes=SHAPES, *, dtype="float32", before: int = 0, after: int = 0, seed: int = 0) -> Case:
    """sizes: rows of each group, modality after modality."""
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    M = int(offsets[-1]) + after
    lhs, dout, *rhs = (
        rng.normal(size=shape)
        for shape in ((M, max(k for _, k, _ in shapes)), (M, max(n for _, _, n in shapes)), *shapes)
    )
    case = Case(lhs, tuple(rhs), dout, offsets)
    lhs, dout = np.where(case.there(1), lhs, np.nan), np.where(case.there(2), dout, np.nan)
    return Case(
        put(lhs, dtype),
        tuple(put(w, dtype) for w in rhs),
        put(dout, dtype),
        put(offsets, jnp.int32),
    )


@jit_once("run", "transpose_rhs", "precision", "plan")
def run_all(
    arrays, run: str, transpose_rhs: bool = False, precision: str | None = "highest", plan: Plans | None = None
):
    """(out, dlhs, drhs); one compilation a shape, whatever the offsets. plan: instead of the run's."""
    lhs, rhs, dout, offsets = arrays

    def f(lhs, rhs):
        weights = tuple(jnp.swapaxes(w, 1, 2) for w in rhs) if transpose_rhs else rhs
        return jaxops.modality_grouped_matmul(
            lhs, weights, offsets, transpose_rhs=transpose_rhs, precision=precision, plan=plan or plan_of(run)
        )

    out, vjp = jax.vjp(f, lhs, rhs)
    return out, *vjp(dout)


@jax.jit
def reference_all(lhs, rhs, dout, offsets):
    """lhs and dout without NaN."""
    out, vjp = jax.vjp(
        lambda lhs, rhs: modality_grouped_matmul_reference(lhs, rhs, offsets),
        *jax.tree.map(lambda x: x.astype(jnp.float32), (lhs, rhs)),
    )
    return out, *vjp(dout.astype(jnp.float32))


def check(
    case: Case,
    run: str,
    *,
    kind: str = "float32",
    precision: str | None = "highest",
    transpose_rhs: bool = False,
    plan: Plans | None = None,
) -> None:
    """The result and all gradients equal the reference's; empty groups' gradients and values outside are zero."""
    out, dlhs, drhs = run_all(case.arrays(), run, transpose_rhs=transpose_rhs, precision=precision, plan=plan)
    clean = (jnp.where(case.there(1), case.lhs, 0), case.rhs, jnp.where(case.there(2), case.dout, 0), case.offsets)
    want_out, want_dlhs, want_drhs = reference_all(*clean)
    assert len(drhs) == len(case.rhs)
    named = [
        ("out", out, want_out),
        ("dlhs", dlhs, want_dlhs),
        *((f"drhs[{i}]", g, w) for i, (g, w) in enumerate(zip(drhs, want_drhs, strict=True))),
    ]
    for name, got, want in named:
        assert got.dtype == case.lhs.dtype, f"{name} is {got.dtype}"
        assert_close(got, want, kind, name)
    assert not np.asarray(out)[~case.there(2)].any()
    assert not np.asarray(dlhs)[~case.there(1)].any()
    empty, first = np.diff(np.asarray(case.offsets)) == 0, 0
    for g in drhs:
        assert not np.asarray(g)[empty[first : first + g.shape[0]]].any()
        first += g.shape[0]
