"""cast="inside": where it has a kernel, and that it equals a cast before the product. test_inside_triton.py
compiles the kernel, test_cast_units.py runs the list of its casts in Python.
"""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops.ops.fp8_matmul import Plan, Problem, Tiles, make_plan
from jaxops.ops.fp8_matmul.operand import cols_of
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.fp8_matmul.cases import Case, kind_of, make_case, options_of, reference

H200 = Device("NVIDIA H200", "gpu")
INSIDE, BEFORE = Plan("triton", cast="inside"), Plan("triton")
BY_LINE = ("blockwise", "blockwise_with_gw_hp", "rowwise", "rowwise_with_gw_hp")
PROBLEM = Problem(300, 520, 400, "blockwise", "bfloat16")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": "tensorwise"}, "'tensorwise'"),
        ({"recipe": "delayed"}, "'delayed'"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"G": 3}, "grouped"),
    ],
    ids=str,
)
def test_no_kernel(change, says):
    with pytest.raises(ValueError, match=f"cast='inside' has a kernel for.*{says}.*cast='before'"):
        make_plan(dataclasses.replace(PROBLEM, **change), H200, plan=INSIDE)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_no_kernel_of_another_backend(backend):
    with pytest.raises(ValueError, match=f"cast='inside' has a kernel for backend 'triton'.*{backend}.*cast='before'"):
        make_plan(PROBLEM, H200, plan=Plan(backend, cast="inside"))


@pytest.mark.parametrize("kind", ["NVIDIA L4", "NVIDIA B200"])
def test_no_kernel_for_another_card(kind):
    with pytest.raises(NotImplementedError, match=f"Hopper.*{kind}"):
        make_plan(PROBLEM, Device(kind, "gpu"), plan=INSIDE)


def test_a_call_raises_it():
    """Before anything is cast, from the public functions."""
    x, w, offsets = (jax.ShapeDtypeStruct(*a) for a in (((8, 4), "float32"), ((4, 6), "float32"), ((4,), "int32")))
    with pytest.raises(ValueError, match=r"cast='inside'.*float32"):
        jax.eval_shape(functools.partial(jaxops.fp8_matmul, plan=INSIDE), x, w)
    with pytest.raises(ValueError, match=r"cast='inside'.*grouped"):
        jax.eval_shape(
            functools.partial(jaxops.fp8_grouped_matmul, plan=INSIDE),
            x,
            jax.ShapeDtypeStruct((3, 4, 6), "float32"),
            offsets,
        )


def test_nobody_takes_it_unasked(monkeypatch):
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")
    assert make_plan(PROBLEM, H200).cast == "before"
    for recipe in BY_LINE:
        assert make_plan(dataclasses.replace(PROBLEM, recipe=recipe), H200).cast == "before"
        plan = make_plan(dataclasses.replace(PROBLEM, recipe=recipe), H200, plan=INSIDE)
        assert (plan.backend, plan.cast) == ("triton", "inside")
        assert None not in (plan.fwd, plan.dgrad, plan.wgrad)


@functools.partial(jax.jit, static_argnames=("plan", "recipe", "pow2", "out"))
def _results(x, w, dy, plan: Plan, recipe: str, pow2: bool, out: str):
    matmul = functools.partial(jaxops.fp8_matmul, plan=plan, recipe=recipe, pow2_scales=pow2, out_dtype=out)
    y, vjp = jax.vjp(matmul, x, w)
    return matmul(x, w), y, *vjp(dy.astype(y.dtype))


def both(case: Case, recipe: str = "blockwise", *, tiles: Tiles | None = None, pow2=False, out="float32"):
    """(y without and with the residuals of a backward, dx, dw) with the cast inside and before; skips where there is no
    such kernel."""
    options_of("triton")
    plans = [dataclasses.replace(plan, fwd=tiles) for plan in (INSIDE, BEFORE)]
    return [_results(case.x, case.w, case.dy, plan, recipe, pow2, out) for plan in plans]


def check(*args, **how) -> None:
    """All results to the bit: the casts have the same bits, the products the same order."""
    for inside, before in zip(*both(*args, **how), strict=True):
        assert inside.dtype == before.dtype
        np.testing.assert_array_equal(inside, before)


@pytest.mark.gpu
@pytest.mark.parametrize("pow2", [False, True], ids=["any-scale", "pow2"])
@pytest.mark.parametrize("recipe", BY_LINE)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (7, 131, 257), (65, 128, 127), (129, 389, 261), (304, 16, 1024), (2050, 1041, 1537)], ids=str
)
def test_equals_a_cast_before(sizes, recipe, pow2):
    """Rows, columns and K that fill no tile, one tile and several; weights in float32."""
    check(make_case(*sizes, dtype="bfloat16", w_dtype="float32"), recipe, pow2=pow2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "tiles"),
    [
        ("blockwise", Tiles("triton", 128, 128, stages=4, panel=1)),
        ("blockwise", Tiles("triton", 192, 128, stages=4)),
        ("rowwise", Tiles("triton", 128, 128, stages=5)),
        ("rowwise", Tiles("triton", 128, 256, stages=3, panel=2)),
        ("blockwise", Tiles("triton", 128, 64, stages=7, panel=1)),
        ("rowwise", Tiles("triton", 128, 64, stages=8, panel=2)),
    ],
    ids=str,
)
def test_many_tiles(recipe, tiles):
    """Several for each of the persistent programs, of each shape; several panels of casts."""
    check(make_case(4099, 257, 4003, dtype="bfloat16"), recipe, tiles=tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", BY_LINE)
def test_again_and_again(recipe):
    """What one program reads before another has written it would be the last call's values, or uninitialised: each
    call has other values."""
    options_of("triton")
    matmul = jax.jit(
        lambda x, w, plan: jaxops.fp8_matmul(x, w, plan=plan, recipe=recipe), static_argnames="plan"
    )  # fmt: skip
    for seed in range(20):
        case = make_case(1500, 1300, 700, dtype="bfloat16", seed=seed)
        np.testing.assert_array_equal(matmul(case.x, case.w, INSIDE), matmul(case.x, case.w, BEFORE))


@pytest.mark.gpu
def test_beside_other_kernels():
    """Programs that find no free multiprocessor have no casts: two products that run at once end, and are right."""
    options_of("triton")
    case, other = (make_case(4000, 2000, 3000, dtype="bfloat16", seed=seed) for seed in range(2))
    one = jax.jit(functools.partial(jaxops.fp8_matmul, plan=INSIDE))
    two = jax.jit(lambda x, w: one(x, w) + 0)  # another program, for a stream of its own
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda f, c: [f(c.x, c.w) for _ in range(50)], (one, two), (case, other)))
    for results, each in zip(found, (case, other), strict=True):
        want = jaxops.fp8_matmul(each.x, each.w, plan=BEFORE)
        for y in results:
            np.testing.assert_array_equal(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
@pytest.mark.parametrize("pow2", [False, True], ids=["any-scale", "pow2"])
def test_against_the_reference(recipe, pow2):
    case = make_case(150, 139, 161, dtype="bfloat16")
    _, y, dx, dw = both(case, recipe, pow2=pow2)[0]
    for name, got, want in zip(("y", "dx", "dw"), (y, dx, dw), reference(case, recipe, pow2), strict=True):
        kind = {"kind": "fp8_fast" if recipe == "rowwise" else "fp8_sum"}
        assert_close(got, want, **(kind if name == "y" else kind_of("triton", "bfloat16")), name=name)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
@pytest.mark.parametrize("out", ["bfloat16", "float16"])
def test_out_dtype(recipe, out):
    check(make_case(150, 300, 161, dtype="bfloat16"), recipe, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
@pytest.mark.parametrize("pow2", [False, True], ids=["any-scale", "pow2"])
def test_what_is_not_finite(recipe, pow2):
    """NaN and infinities make their own row NaN only, and affect no scale; zeros stay; tiny numbers become zero."""
    case = make_case(150, 300, 161, dtype="bfloat16")
    x = np.array(case.x.astype(jnp.float32))
    x[3, 5], x[4, 299], x[70] = np.nan, -np.nan, np.nan
    x[5, 7], x[6, 200], x[131, 0] = np.inf, -np.inf, np.inf
    x[8], x[9, 128:256], x[10], x[11], x[12] = 0, 0, 1e-38, 1e-20, 1e33
    case = dataclasses.replace(case, x=put(x, jnp.bfloat16), w=case.w / 256)  # so that no sum becomes infinite
    inside, before = both(case, recipe, pow2=pow2)
    y = np.asarray(inside[0])
    assert set(np.flatnonzero(np.isnan(y).all(axis=1))) == {3, 4, 5, 6, 70, 131}
    assert np.isfinite(np.delete(y, [3, 4, 5, 6, 70, 131], axis=0)).all()
    assert not y[[8, 10]].any()
    for a, b in zip(inside, before, strict=True):  # in float32: numpy does not know bfloat16's NaN
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
@pytest.mark.parametrize("pow2", [False, True], ids=["any-scale", "pow2"])
def test_every_bfloat16_number(recipe, pow2):
    """Scales and casts to the bit, by a product with the identity: each number with its own binade, and with any
    others.
    """
    rng = np.random.default_rng(0)
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16).reshape(512, 128)  # each row a binade
    others = (
        rng.permutation(np.where(bits & 0x7FFF > 0x7F80, 0, bits).ravel()).reshape(512, 128).view(jnp.bfloat16)
    )  # without NaN
    smaller = (others.astype(np.float32) * np.exp2(rng.integers(-80, 1, (512, 1)))).astype(jnp.bfloat16)
    x = np.concatenate([rng.permuted(bits, axis=1).view(jnp.bfloat16), smaller])
    case = Case(put(x), jnp.eye(128, dtype=jnp.bfloat16), jnp.zeros((1024, 128), jnp.bfloat16))
    inside, before = (np.asarray(y[0]) for y in both(case, recipe, pow2=pow2))
    bad = ~np.isfinite(x.astype(np.float32)).all(axis=1)
    assert {255, 511} < set(np.flatnonzero(bad))  # where the NaNs are, beside infinities; others have an infinity alone
    np.testing.assert_array_equal(np.isnan(before).any(axis=1), bad)
    np.testing.assert_array_equal(inside, before)
    assert len(np.unique(np.nan_to_num(before[:512]).max(axis=1))) > 200


@pytest.mark.gpu
@pytest.mark.parametrize("pow2", [False, True], ids=["any-scale", "pow2"])
def test_the_column_layout(pow2):
    """What the backward reads of lhs: values and scales to the bit, of every bfloat16 number."""
    options_of("triton")
    from jaxops.ops.fp8_matmul.inside_triton import multiply_inside

    rng = np.random.default_rng(0)
    bits = rng.permutation(np.arange(2**16, dtype=np.uint32).astype(np.uint16)).reshape(512, 128)[:500]
    tame = rng.standard_normal((500, 200)).astype(jnp.bfloat16)
    x = put(np.concatenate([np.where(bits & 0x7FFF > 0x7F80, 0, bits).view(jnp.bfloat16), tame], axis=1))
    w = jaxops.quantize(jnp.ones((328, 136), jnp.bfloat16), scaling="block_128x128", layouts="col")
    want = jaxops.quantize(x, layouts="col", pow2_scales=pow2)
    for tiles in (Tiles("triton", 128, 128, stages=4), Tiles("triton", 192, 128, stages=4)):
        how: dict = {"out_dtype": jnp.dtype("bfloat16"), "fast": False, "both": True, "pow2": pow2, "tiles": tiles}
        _, values, scales = jax.jit(functools.partial(multiply_inside, **how, cores=132))(x, cols_of(w))
        np.testing.assert_array_equal(values.astype(jnp.float32), want.values_t.astype(jnp.float32))
        np.testing.assert_array_equal(scales, want.scales_t)


@pytest.mark.gpu
def test_vmap():
    """Each example is cast by itself; the batch's x and weights are stacked."""
    options_of("triton")
    cases = [make_case(21, 139, 37, dtype="bfloat16", seed=seed) for seed in range(3)]
    x, w = (jnp.stack([getattr(case, name) for case in cases]) for name in ("x", "w"))
    got = jax.jit(jax.vmap(lambda x, w: jaxops.fp8_matmul(x, w, plan=INSIDE, out_dtype="float32")))(x, w)
    for one, case in zip(got, cases, strict=True):
        assert_close(one, reference(case, "blockwise")[0], "fp8_sum")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_two_runs_give_the_same_bits(recipe):
    options_of("triton")
    case = make_case(300, 389, 261, dtype="bfloat16")
    first, second = (_results(case.x, case.w, case.dy, INSIDE, recipe, False, "bfloat16") for _ in range(2))
    assert [np.asarray(v).tobytes() for v in first] == [np.asarray(v).tobytes() for v in second]
