"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.fp8 import FP8
from jaxops.ops.adaln import Plan
from tests.arrays import put
from tests.compare import assert_close
from tests.hopper import lower_for_h200, on_h200
from tests.jaxprs import equations
from tests.ops.adaln.cases import KERNELS, MODULATION, RUNS, Variant, apply, apply_reference, make_case, outside_of

VARIANT = Variant("gated_residual_adaln", epsilon=0.1, plan="whole")
GIVEN = VARIANT.names


def clean_case(sizes, before: int, after: int, seed: int = 0) -> dict:
    case = make_case(sizes, 8, before=before, after=after, seed=seed)
    return {name: value if name == "offsets" else put(np.nan_to_num(value)) for name, value in case.items()}


CASE = clean_case([9, 0, 21, 2], 3, 5)
OPERANDS = {name: CASE[name] for name in GIVEN}
jit = functools.partial(jax.jit)


@pytest.mark.parametrize("run", RUNS)
def test_donation(run):
    """The old residual's memory is the new one's."""
    plan = VARIANT.plan_for(run)
    step = jit(lambda x, h, gate, offsets: jaxops.gated_residual(x, h, gate, offsets, plan=plan), donate_argnums=0)
    x = jnp.array(CASE["x"])
    rest = [CASE[name] for name in ("h", "gate", "offsets")]
    compiled = step.lower(x, *rest).compile()
    assert "input_output_alias" in compiled.as_text()
    out = compiled(x, *rest)
    assert x.is_deleted()
    want = apply_reference(Variant("gated_residual"), CASE, CASE["offsets"], "float32")
    assert_close(out, want["residual"], "float32")


@pytest.mark.parametrize("run", KERNELS)
def test_only_one_result_is_wanted(run):
    """The other one's cotangent is zero: what comes back is the one's gradient."""
    plan = VARIANT.plan_for(run)
    for name in ("residual", "y"):
        f = jit(jax.grad(lambda given, name=name: jnp.sum(jnp.sin(apply(VARIANT, plan, given, CASE["offsets"])[name]))))
        want = jit(
            jax.grad(
                lambda given, name=name: jnp.sum(
                    jnp.sin(apply_reference(VARIANT, given, CASE["offsets"], "float32")[name])
                )
            )
        )
        for (path, g), w in zip(jax.tree.leaves_with_path(f(OPERANDS)), jax.tree.leaves(want(OPERANDS)), strict=True):
            assert_close(g, w, "float32", jax.tree_util.keystr(path))


X64 = [
    Variant("gated_residual_adaln", "layer", "gelu", affine=True, plan="ahead"),
    Variant("gated_residual_adaln", "rms", "gelu_tanh", affine=True, per_row=True, plan="steps"),
    Variant("gated_residual", plan="single"),
]


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        ("xla", FP8[1]),
        ("interpret", FP8[0]),
        *(pytest.param("gpu", dtype, marks=pytest.mark.gpu) for dtype in FP8),
    ],
)
def test_fp8_results_under_x64(run, dtype):
    variant, case = Variant(), make_case([9, 0, 31, 2, 1], 300, before=5, after=13)
    operands = (case[name] for name in ("x", "scale", "shift", "offsets"))
    call = functools.partial(jaxops.adaln, *operands, out_dtype=dtype, plan=variant.plan_for(run))
    want = jit(call)()
    with jax.enable_x64(True):
        got = jit(call)()
    assert (got.values.dtype, got.scales.dtype) == (jnp.dtype(dtype), jnp.float32)
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.values.view(jnp.uint8), want.values.view(jnp.uint8))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("variant", X64, ids=["layer", "rms", "gate"])
def test_no_array_is_64_bits_wide_under_x64(backend, variant):
    """Traced and lowered as on an H200. Scalars may be float64: Python numbers, cast where they meet an array."""
    T, D, B = 300, 37, 200  # the search for a row's sequence takes two steps, the sums go by multiples of a tile's rows
    shapes = dict.fromkeys(MODULATION, (T if variant.per_row else B, D)) | dict.fromkeys(("weight", "bias"), (D,))
    shapes |= dict.fromkeys(("x", "h"), (T, D))
    given = {name: jax.ShapeDtypeStruct(shapes[name], "bfloat16") for name in variant.names}

    def gradients(given, offsets):
        def summed(given):
            return sum(jnp.sum(y.astype(jnp.float32)) for y in apply(variant, Plan(backend), given, offsets).values())

        return jax.grad(summed)(given)

    operands = given, jax.ShapeDtypeStruct((B + 1,), "int32")
    with jax.enable_x64(True):
        with on_h200():
            jaxpr = jax.make_jaxpr(gradients)(*operands).jaxpr
        lower_for_h200(gradients, *operands)
    avals = [atom.aval for equation in equations(jaxpr) for atom in (*equation.invars, *equation.outvars)]
    assert len(avals) > 200
    wide = ("int64", "uint64", "float64")
    assert [str(aval) for aval in avals if getattr(aval, "shape", ()) and aval.dtype in wide] == []


def test_the_case_has_rows_outside():
    assert 0 < int(outside_of(CASE).sum()) < CASE["x"].shape[0]
