"""Random problems for the FP8 products, a float64 reference with its own numpy quantization, and the backends."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import current_device, runs_gluon
from jaxops.ops.fp8_matmul import RECIPES, Plan, Tiles
from jaxops.ops.fp8_matmul.operand import Operand
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.quantize.cases import Variant, np_rows

# "interpret": the Pallas kernels in the interpreter on the CPU; "gpu": the same, compiled; "triton": the Hopper
# kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("triton", marks=pytest.mark.gpu)]
# For what does not depend on the kernels: the fastest ones there are.
FEW = ["xla", RUNS[-1]]
DENSE = list(RECIPES)
GROUPED = [name for name, recipe in RECIPES.items() if not recipe.delayed]
BLOCK = 128


def options_of(run: str) -> dict:
    """backend or plan; tiles that differ from pass to pass and are smaller than the tests' sizes."""
    if run == "triton" and not runs_gluon(current_device()):
        pytest.skip("needs a Hopper GPU and jax-triton")
    if run in ("xla", "triton"):
        return {"backend": run}
    if run == "own":  # tiles of the plan's choice
        return {"backend": "pallas"}
    if run == "interpret":
        return {
            "plan": Plan(
                "pallas",
                fwd=Tiles("pallas", 16, 32, panel=2),
                dgrad=Tiles("pallas", 32, 16, panel=3),
                wgrad=Tiles("pallas", 64, 32, panel=1),
            )
        }
    small, wide = Tiles("pallas", 64, 64, 4, 2, panel=2), Tiles("pallas", 128, 64, 4, 3, panel=3)
    return {"plan": Plan("pallas", fwd=wide, dgrad=small, wgrad=small)}


def kind_of(run: str, dtype: str) -> dict:
    """Limits for `assert_close`. A GPU's tensor cores truncate while they add, and sum in 14 bits where they may."""
    if run == "triton":
        return {"kind": "fp8_fast"} if dtype == "float32" else {"kind": dtype, "scale": 2.5}
    if dtype != "float32" or run in ("xla", "interpret"):
        return {"kind": dtype}
    return {"kind": dtype, "scale": 10}


def operand_shapes(scaling: str, *shape: int, dtype: str = "float8_e4m3fn") -> Operand:
    """An operand's shapes and dtypes."""
    *stack, rows, K = shape
    blocks = [-(-size // BLOCK) for size in (rows, K)]
    of = {"tensorwise": (), "rowwise": (rows,), "block_1x128": (blocks[1], rows), "block_128x128": blocks}[scaling]
    scales = jax.ShapeDtypeStruct((*stack, *of), "float32")
    return Operand(jax.ShapeDtypeStruct(shape, dtype), scales, scaling)  # pyright: ignore[reportArgumentType]


def spread(scales: np.ndarray, scaling: str, shape: tuple[int, int]) -> np.ndarray:
    """float64: the scale of each number of a row layout [R, C]."""
    row, column = np.indices(shape)
    place = {
        "tensorwise": (),
        "rowwise": (row,),
        "block_1x128": (column // BLOCK, row),
        "block_128x128": (row // BLOCK, column // BLOCK),
    }[scaling]
    return np.asarray(scales, np.float64)[place]


def quantised(x: np.ndarray, scaling: str, dtype: str, *, amax=None, pow2: bool = False) -> np.ndarray:
    """float64: the matrix as its row layout gives it back."""
    values, scales = np_rows(np.asarray(x, np.float32), Variant(scaling, "row", dtype, pow2), None, amax)
    return values.astype(np.float64) * spread(scales, scaling, values.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """x [M, K], w [K, N] or [G, K, N], dy [M, N]; with offsets, rows outside the groups are NaN or huge."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array
    offsets: jax.Array | None = None

    @property
    def outside(self) -> np.ndarray:
        row = np.arange(self.x.shape[0])
        if self.offsets is None:
            return np.zeros(len(row), bool)
        offsets = np.asarray(self.offsets)
        return (row < offsets[0]) | (row >= offsets[-1])


def make_case(
    M: int, K: int, N: int, *, sizes=None, before: int = 0, dtype="float32", w_dtype=None, seed: int = 0
) -> Case:
    """Rows and columns of unlike magnitudes, so that a wrong scale shows. M is used only without sizes."""
    rng = np.random.default_rng(seed)
    offsets = None if sizes is None else before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

    def normal(*shape):
        return (
            rng.normal(size=shape)
            * np.exp(rng.normal(size=(*shape[:-1], 1)) / 2)
            * np.exp(rng.normal(size=shape[-1:]) / 2)
        )

    x, w, dy = normal(M, K), normal(*([] if sizes is None else [len(sizes)]), K, N), normal(M, N)
    if offsets is not None:
        outside = (np.arange(M) < offsets[0]) | (np.arange(M) >= offsets[-1])
        bad = np.nan, 1e4 if dtype == "float16" else 1e30
        x[outside], dy[outside] = (np.resize(bad, (sum(outside), 1)) for _ in range(2))
    rows = None if offsets is None else put(offsets, jnp.int32)
    return Case(put(x, dtype), put(w, w_dtype or dtype), put(dy, dtype), rows)


@functools.partial(jax.jit, static_argnames=("recipe", "layouts"))
def quantized_w(w, recipe: str, layouts: str) -> jaxops.Quantized:
    """w as the recipe casts it."""
    form = RECIPES[recipe].rhs
    return jaxops.quantize(w, scaling=form.scaling, dtype=form.dtype, layouts=layouts)


def delayed_amax(case: Case) -> tuple[float, float]:
    """Of x too small, so that it saturates; of w too large."""
    x, w = (float(np.max(np.abs(np.asarray(v).astype(np.float32)), initial=0.0)) for v in (case.x, case.w))
    return 0.75 * x, 1.5 * w


def apply(case: Case, x, w, recipe: str, run: str, **options):
    """The op's y."""
    options |= options_of(run)
    if case.offsets is not None:
        return jaxops.fp8_grouped_matmul(x, w, case.offsets, recipe=recipe, **options)
    if RECIPES[recipe].delayed:
        return jaxops.fp8_matmul(x, w, recipe=recipe, **options)[0]
    return jaxops.fp8_matmul(x, w, recipe=recipe, **options)


def y_and_dx(case: Case, w8: jaxops.Quantized, recipe: str, run: str, **options) -> tuple[jax.Array, jax.Array]:
    """The op's y by a quantized weight, and the gradient of x, in one program."""

    @jax.jit
    def f(x, dy, w8):
        y, vjp = jax.vjp(lambda x: apply(case, x, w8, recipe, run, **options), x)
        return y, *vjp(dy)

    return f(case.x, case.dy, w8)


@functools.partial(jax.jit, static_argnames=("recipe", "run", "pow2"))
def _run_all(arrays, amax, recipe: str, run: str, pow2: bool):
    case = Case(*arrays)
    delayed = {"amax": amax} if RECIPES[recipe].delayed else {}
    y, vjp = jax.vjp(lambda x, w: apply(case, x, w, recipe, run, pow2_scales=pow2, **delayed), case.x, case.w)
    return y, *vjp(case.dy.astype(y.dtype))


def run_all(case: Case, recipe: str, run: str, pow2: bool = False):
    """(y, dx, dw), from one compilation a shape, whatever the offsets."""
    amax = tuple(jnp.float32(value) for value in delayed_amax(case)) if RECIPES[recipe].delayed else None
    return _run_all((case.x, case.w, case.dy, case.offsets), amax, recipe, run, pow2)


def reference(case: Case, recipe: str, pow2: bool = False) -> tuple[np.ndarray, ...]:
    """(y, dx, dw) in float64."""
    chosen, ragged = RECIPES[recipe], case.offsets is not None
    x, w, dy = (np.asarray(v).astype(np.float32) for v in (case.x, case.w, case.dy))
    amax_x, amax_w = delayed_amax(case) if chosen.delayed else (None, None)
    groups = list(itertools.pairwise(np.asarray(case.offsets).tolist())) if ragged else [(0, len(x))]
    inside = np.concatenate([np.arange(*group) for group in groups]).astype(int) if groups else np.arange(0)

    def rows(v, form, amax=None):
        if chosen.lhs.scaling == "tensorwise" and amax is None:  # what stands outside reaches no scale
            amax = np.max(np.abs(np.nan_to_num(v[inside])), initial=0.0)
        return quantised(v, form.scaling, form.dtype, amax=amax, pow2=pow2)

    def cols(v, form, lo, hi, amax=None):
        if form.scaling == "tensorwise":
            return rows(v, form, amax)[lo:hi]
        if form.scaling == "rowwise":  # one scale a column for all groups
            return (
                quantised(v[inside].T, form.scaling, form.dtype, pow2=pow2).T[lo - inside[0] : hi - inside[0]]
                if len(inside)
                else v[:0].astype(np.float64)
            )
        return quantised(v[lo:hi].T, form.scaling, form.dtype, pow2=pow2).T

    xq, dyq = rows(x, chosen.lhs, amax_x), rows(dy, chosen.dout)
    stack = w if ragged else w[None]
    turned = np.swapaxes(stack, 1, 2)
    w_cols = [quantised(one, chosen.rhs.scaling, chosen.rhs.dtype, amax=amax_w, pow2=pow2).T for one in turned]
    w_rows = [quantised(one, chosen.rhs.scaling, chosen.rhs.dtype, amax=amax_w, pow2=pow2) for one in stack]
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(stack.shape)
    for g, (lo, hi) in enumerate(groups):
        y[lo:hi] = xq[lo:hi] @ w_cols[g]
        half_dtype = ml_dtypes.bfloat16 if case.x.dtype == jnp.float32 else case.x.dtype
        half = [v.astype(half_dtype).astype(np.float64) for v in (x[lo:hi], dy[lo:hi], stack[g])]
        dx[lo:hi] = half[1] @ half[2].T if "dgrad" in chosen.half else dyq[lo:hi] @ w_rows[g].T
        if "wgrad" in chosen.half:
            dw[g] = half[0].T @ half[1]
        else:
            dw[g] = cols(x, chosen.lhs, lo, hi, amax_x).T @ cols(dy, chosen.dout, lo, hi)
    return y, dx, dw if ragged else dw[0]


def check(case: Case, recipe: str, run: str, *, pow2: bool = False) -> None:
    """y, dx and dw equal the reference's; empty groups' gradients and outside rows are exactly zero."""
    got, want = run_all(case, recipe, run, pow2), reference(case, recipe, pow2)
    for name, g, w, primal in zip(("y", "dx", "dw"), got, want, (case.x, case.x, case.w), strict=True):
        assert g.dtype == primal.dtype, f"{name} is {g.dtype}"
        assert_close(g, w, **kind_of(run, g.dtype.name), name=name)
    if case.offsets is not None:
        assert not np.asarray(got[2])[np.diff(np.asarray(case.offsets)) == 0].any()
        for g in got[:2]:
            assert not np.asarray(g)[case.outside].any()
