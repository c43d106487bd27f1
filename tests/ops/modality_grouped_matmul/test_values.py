"""What tests/contracts/test_groups.py does not vary: three modalities and more, sizes of 0, transposes, dtypes; and the
launches."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference
from tests.compare import assert_close
from tests.contracts.run import compare
from tests.hopper import lower_for_h200
from tests.ops.modality_grouped_matmul.cases import EIGHTS, HALF_RUNS, HOPPER, RUNS, SHAPES, arguments_of, plan_of

pytestmark = pytest.mark.versions


def check(run: str, sizes, shapes=SHAPES, kind="float32", plan=None, **where) -> None:
    arguments = arguments_of(sizes, shapes, dtype=kind, **where)
    how = {"plan": plan or plan_of(run), "precision": "highest" if kind == "float32" else None}
    compare("modality_grouped_matmul", "xla", arguments, kind, **how)


# Groups of SHAPES: two, three, one. Every routing has 80 rows: one compilation.
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        pytest.param([9, 0, 31, 0, 3, 7], 11, 19, id="rows-outside-both-ends"),
        pytest.param([0, 0, 50, 0, 30, 0], 0, 0, id="one-modality"),
        pytest.param([40, 8, 0, 0, 0, 32], 0, 0, id="none-in-the-middle"),
    ],
)
def test_three_modalities(run, sizes, before, after):
    check(run, sizes, before=before, after=after)


@pytest.mark.parametrize("run", ["xla", *HALF_RUNS[2:]])
def test_transposed(run):
    """The results of matrices that lie the other way. The kernels are the same: each gradient reads them so."""
    shapes, kind = (HOPPER, "bfloat16") if run == "triton" else (SHAPES, "float32")
    given = jax.tree.map(jnp.asarray, arguments_of([9, 0, 31, 0, 3, 7], shapes, dtype=kind, before=11, after=19))

    @functools.partial(jax.jit, static_argnums=0)
    def results(transpose_rhs, lhs, rhs):
        def call(lhs, rhs):
            rhs = tuple(jnp.swapaxes(w, 1, 2) for w in rhs) if transpose_rhs else rhs
            how = {"plan": plan_of(run), "precision": "highest" if kind == "float32" else None}
            return jaxops.modality_grouped_matmul(lhs, rhs, given["group_offsets"], transpose_rhs=transpose_rhs, **how)

        out, vjp = jax.vjp(call, lhs, rhs)
        return out, *vjp(jnp.cos(out))

    found = (jax.tree.leaves(results(transpose, given["lhs"], given["rhs"])) for transpose in (True, False))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, kind)


@pytest.mark.parametrize("run", ["xla", *HALF_RUNS[2:]])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.gpu)])
def test_half(run, dtype):
    check(run, [9, 0, 31, 0, 3, 7], EIGHTS, dtype, before=11, after=19)


@pytest.mark.parametrize("run", RUNS)
def test_modalities_of_size_zero(run):
    """Their rows are zeros, wherever they stand among the others, and nothing is missing from their neighbours'."""
    shapes = ((0, 20, 24), (2, 0, 24), (2, 16, 32), (1, 20, 0), (0, 8, 8), (1, 24, 16), (2, 8, 0))
    one, other, _ = plan_of("interpret")
    plan = None if run == "xla" else (one,) * 3 + (other,) * 4
    check(run, [7, 1, 9, 20, 5, 11, 3, 6], shapes, plan=plan, before=3, after=2)


@pytest.mark.parametrize("run", HALF_RUNS)
def test_compute_dtype(run):
    """float32 matrices under bfloat16 products: their gradients are float32 and were never rounded to bfloat16."""
    given = jax.tree.map(jnp.asarray, arguments_of([17, 10, 13, 20, 5, 15], EIGHTS))
    offsets, lhs = given["group_offsets"], given["lhs"].astype(jnp.bfloat16)
    dout = np.random.default_rng(1).normal(size=(80, 104)).astype(jnp.bfloat16).astype(np.float32)

    @jax.jit
    def results(lhs, rhs):
        plan = plan_of(run)[0] if run == "interpret" else plan_of(run)  # for all modalities: one launch each
        options = {"compute_dtype": jnp.bfloat16, "out_dtype": jnp.float32, "plan": plan}
        out, vjp = jax.vjp(lambda x, rhs: jaxops.modality_grouped_matmul(x, rhs, offsets, **options), lhs, rhs)
        exact = lambda rhs: modality_grouped_matmul_reference(lhs.astype(jnp.float32), rhs, offsets)
        return out, *vjp(dout), *jax.vjp(exact, rhs)[1](dout)

    out, dx, drhs, want = results(lhs, given["rhs"])
    assert (out.dtype, dx.dtype, [d.dtype for d in drhs]) == (jnp.float32, jnp.bfloat16, [jnp.float32] * 3)
    for got, wanted in zip(drhs, want, strict=True):
        assert_close(got, wanted, "float32", "drhs")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heuristic_plans(dtype):
    """On the GPU, with the plans that users get; float32 by TF32, as x @ w."""
    sizes, shapes = [300, 0, 1, 723, 0, 512, 65, 40], ((3, 384, 640), (4, 640, 128), (1, 256, 256))
    given = arguments_of(sizes, shapes, dtype=dtype, before=7, after=5)
    kind = "bfloat16" if dtype == "bfloat16" else "tf32"
    compare("modality_grouped_matmul", "xla", given, kind, plan=None, precision=None)


def test_the_result_is_written_in_place():
    """Launches after the first write to its result: nothing is put together afterwards."""
    s, wide, high = jax.ShapeDtypeStruct, Tiles(64, 64, 32), Tiles(128, 64, 32)
    plan = tuple(Plan("pallas", tiles) for tiles in (wide, high, wide))
    shapes = ((2, 64, 128), (1, 32, 64), (3, 64, 64))
    text = lower_for_h200(
        lambda lhs, rhs, offsets: jaxops.modality_grouped_matmul(lhs, rhs, offsets, plan=plan),
        s((256, 64), jnp.bfloat16), tuple(s(shape, jnp.bfloat16) for shape in shapes), s((7,), jnp.int32),
    )  # fmt: skip
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 4  # of each launch the work list, and the product
    assert [bool(re.search("operand_index = [34]", call)) for call in calls] == [False, False, False, True]
    others = [line for line in text.splitlines() if " stablehlo." in line and "custom_call" not in line]
    assert not others, others


def test_dgrad_has_tiles_of_its_own():
    """Whichever way the matrices lie: the forward of one is the other's dgrad."""
    s, (fwd, dgrad, wgrad) = jax.ShapeDtypeStruct, (Tiles(64, 64, 32, warps) for warps in (2, 4, 8))
    plan = Plan("pallas", fwd, dgrad, wgrad)
    for transpose_rhs in (False, True):
        shapes = tuple((G, n, k) if transpose_rhs else (G, k, n) for G, k, n in ((2, 16, 24), (1, 24, 8)))

        def gradients(lhs, rhs, offsets, transpose_rhs=transpose_rhs):
            f = lambda lhs, rhs: jnp.sum(
                jnp.sin(jaxops.modality_grouped_matmul(lhs, rhs, offsets, transpose_rhs=transpose_rhs, plan=plan))
            )
            return jax.grad(f, argnums=(0, 1))(lhs, rhs)

        text = lower_for_h200(
            gradients, s((64, 24), jnp.float32), tuple(s(shape, jnp.float32) for shape in shapes), s((4,), jnp.int32)
        )
        found = dict(re.findall(r'name = "modality_grouped_matmul_(\w+)".*?num_warps = (\d)', text))
        fwd, dgrad = ("dgrad", "fwd") if transpose_rhs else ("fwd", "dgrad")
        assert found == {fwd: "2", dgrad: "4", "wgrad": "8"}
