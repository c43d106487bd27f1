"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._lib.fp8 import FP8
from jaxops.ops.adaln import Plan
from tests.compare import assert_close
from tests.hopper import H200, lower_for_h200, on_h200
from tests.jaxprs import equations
from tests.ops.adaln.cases import KERNELS, MODULATION, RUNS, Variant, apply, apply_reference, check, make_case, outside_of

VARIANT = Variant("gated_residual_adaln", eps=0.1, plan="whole")
GIVEN = VARIANT.names


def clean_case(sizes, before: int, after: int, seed: int = 0) -> dict:
    case = make_case(sizes, 8, before=before, after=after, seed=seed)
    return {name: value if name == "offsets" else jnp.asarray(np.nan_to_num(value)) for name, value in case.items()}


CASE = clean_case([9, 0, 21, 2], 3, 5)
OPERANDS = {name: CASE[name] for name in GIVEN}
jit = functools.partial(jax.jit)


def loss_of(results: dict) -> jax.Array:
    return sum(jnp.sum(jnp.sin(value)) for value in results.values())


def loss(run, given, offsets, variant=VARIANT):
    return loss_of(apply(variant, variant.plan_for(run), given, offsets))


def reference_loss(given, offsets, variant=VARIANT):
    return loss_of(apply_reference(variant, given, offsets, "float32"))


def assert_trees_close(got, want, scale: float = 1.0) -> None:
    """The loss is a sum over all elements, of either sign, and may be far smaller than what was added up: it is held against their number instead."""
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if g.ndim == 0:
            np.testing.assert_allclose(g, w, atol=1e-6 * CASE["x"].size, rtol=1e-6)
        else:
            assert_close(g, w, "float32", jax.tree_util.keystr(path), scale)


@functools.cache
def gradient(run):
    return jit(jax.value_and_grad(functools.partial(loss, run)))


@functools.cache
def reference_gradient():
    return jit(jax.value_and_grad(reference_loss))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("mapped", [(*GIVEN, "offsets"), ("x", "scale")], ids=["all", "x-and-scale"])
def test_vmap(run, mapped):
    layouts = [([9, 0, 21, 2], 3, 5), ([0, 30, 0, 2], 8, 0), ([0, 0, 0, 0], 40, 0)]
    cases = [clean_case(*layout, seed=seed) for seed, layout in enumerate(layouts)]
    stacked = {name: np.stack([case[name] for case in cases]) if name in mapped else np.asarray(cases[0][name]) for name in (*GIVEN, "offsets")}
    axes = {name: 0 if name in mapped else None for name in stacked}
    (given, given_axes), (offsets, offsets_axis) = (tuple({n: x[n] for n in GIVEN} for x in (stacked, axes)), (stacked["offsets"], axes["offsets"]))
    got = jit(jax.vmap(jax.value_and_grad(functools.partial(loss, run)), in_axes=(given_axes, offsets_axis)))(given, offsets)
    for i in range(3):
        one = {name: value[i] if name in mapped else value for name, value in stacked.items()}
        want = reference_gradient()({name: one[name] for name in GIVEN}, one["offsets"])
        assert_trees_close(jax.tree.map(lambda x, i=i: np.asarray(x)[i], got), want)


@pytest.mark.parametrize("run", RUNS)
def test_remat_and_scan(run):
    """A scan over layers with rematerialised bodies: forward and backward as without."""
    layers = {name: jnp.stack([CASE[name], 0.3 * CASE[name]]) for name in ("gate", "scale", "shift")}

    def stack(apply, x, layers):
        def body(carry, layer):
            residual, h = carry
            found = apply({"x": residual, "h": h} | layer)
            return (found["residual"], jnp.tanh(found["y"])), None

        (residual, h), _ = jax.lax.scan(jax.checkpoint(body), (x, x), layers)
        return jnp.sum(residual * h)

    plan = VARIANT.plan_for(run)
    got = jit(jax.value_and_grad(functools.partial(stack, lambda given: apply(VARIANT, plan, given, CASE["offsets"])), argnums=(0, 1)))(CASE["x"], layers)
    reference = functools.partial(stack, lambda given: apply_reference(VARIANT, given, CASE["offsets"], "float32"))
    # Two layers, each with the rounding of one.
    assert_trees_close(got, jit(jax.value_and_grad(reference, argnums=(0, 1)))(CASE["x"], layers), scale=2)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_second_order(run, activation):
    variant = dataclasses.replace(VARIANT, activation=activation)

    def directional(loss, given):
        return sum(jnp.sum(value**2) for value in jax.tree.leaves(jax.grad(loss)(given, CASE["offsets"])))

    got, want = (
        jit(jax.grad(functools.partial(directional, functools.partial(f, variant=variant))))(OPERANDS) for f in (functools.partial(loss, run), reference_loss)
    )
    # Twice through the norm, each time with its own differences of nearly equal numbers.
    assert_trees_close(got, want, scale=5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("op", ["adaln", "gated_residual"])
def test_forward_mode_is_refused(run, op):
    variant = Variant(op)
    given = {name: CASE[name] for name in variant.names}
    with pytest.raises(TypeError, match="forward-mode"):
        jit(lambda given: jax.jvp(lambda given: loss(run, given, CASE["offsets"], variant), (given,), (given,)))(given)


@pytest.mark.parametrize("run", ["xla", "interpret"])
def test_shard_map_over_rows(run):
    """Each device holds a part of the rows and that part's own offsets; replicated modulation's gradient is the sum over devices."""
    if jax.device_count() < 4:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    variant = Variant("gated_residual_adaln", affine=True, eps=0.1, plan="whole")
    given = OPERANDS | {name: CASE[name] for name in ("weight", "bias")}
    local = jnp.array([[1, 4, 4, 7, 10], [0, 0, 10, 10, 10], [2, 5, 6, 7, 8], [10, 10, 10, 10, 10]], jnp.int32)  # of 10 rows each

    def shard(given, offsets):
        return apply(variant, variant.plan_for(run), given, offsets[0])

    specs = {name: P("d") if name in ("x", "h") else P() for name in given}
    # Pallas' interpreter cannot follow varying axes; the kernels' own types are checked by lowering, below.
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(specs, P("d")), out_specs=P("d"), check_vma=run == "xla")
    got = jit(jax.value_and_grad(lambda given: loss_of(sharded(given, local))))(given)

    def whole(given):
        """The same modulation for each device's own sequences."""
        found = []
        for i in range(4):
            mine = {name: value[10 * i : 10 * i + 10] if name in ("x", "h") else value for name, value in given.items()}
            found.append(apply_reference(variant, mine, local[i], "float32"))
        return sum(map(loss_of, found))

    assert_trees_close(got, jit(jax.value_and_grad(whole))(given))


def test_shard_map_checks_the_kernels_varying_axes():
    """check_vma=True traces all kernels with replicated modulation: the gradient's psum is JAX's own."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(x, h, modulation, vector, offsets):
        def f(x, h, modulation, vector):
            found = jaxops.gated_residual_adaln(x, h, modulation, modulation, modulation, offsets[0], weight=vector, bias=vector)
            return loss_of(dict(enumerate(found)))

        return jax.grad(f, argnums=(0, 1, 2, 3))(x, h, modulation, vector)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P("d"), P(), P(), P("d")), out_specs=(P("d"), P("d"), P(), P()))
    s = jax.ShapeDtypeStruct
    shapes = [s(shape, "float32") for shape in ((64, 32), (64, 32), (300, 32), (32,))]
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(*shapes, s((2, 301), jnp.int32)))
    assert "psum" in text
    assert all(name in text for name in ("adaln_fwd", "adaln_bwd", "adaln_sums"))


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


@pytest.mark.parametrize("run", RUNS)
def test_two_runs_give_the_same_bits(run):
    first, second = (jax.tree.leaves(gradient(run)(OPERANDS, CASE["offsets"])) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@functools.cache
def training_step(run):
    def step(learned, rows, offsets):
        value, grad = jax.value_and_grad(lambda learned: loss(run, learned | rows, offsets))(learned)
        return jax.tree.map(lambda p, g: p - 0.01 * g, learned, grad), value

    return jit(step, donate_argnums=0)


def split() -> tuple[dict, dict]:
    """What a step learns (and donates), and the rows."""
    learned = {name: jnp.array(CASE[name]) for name in ("gate", "scale", "shift")}
    return learned, {name: CASE[name] for name in ("x", "h")}


@pytest.mark.parametrize("run", RUNS)
def test_no_host_work(run):
    """The compiled step calls nothing on the host and copies nothing to it, and runs where transfers are refused."""
    step, (learned, rows) = training_step(run), split()
    text = step.lower(learned, rows, CASE["offsets"]).compile().as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            learned, value = step(learned, rows, CASE["offsets"])
    assert np.isfinite(float(value))


@pytest.mark.parametrize("run", RUNS)
def test_a_hundred_layouts_compile_once(run):
    step, (learned, rows) = training_step(run), split()
    learned, _ = step(learned, rows, CASE["offsets"])
    compiled = step._cache_size()
    rng = np.random.default_rng(0)
    for _ in range(100):
        offsets = jnp.asarray(np.sort(rng.integers(0, 41, size=5)), jnp.int32)
        learned, _ = step(learned, rows, offsets)
    assert step._cache_size() == compiled


@pytest.mark.parametrize("run", KERNELS)
def test_only_one_result_is_wanted(run):
    """The other one's cotangent is zero: what comes back is the one's gradient."""
    plan = VARIANT.plan_for(run)
    for name in ("residual", "y"):
        f = jit(jax.grad(lambda given, name=name: jnp.sum(jnp.sin(apply(VARIANT, plan, given, CASE["offsets"])[name]))))
        want = jit(jax.grad(lambda given, name=name: jnp.sum(jnp.sin(apply_reference(VARIANT, given, CASE["offsets"], "float32")[name]))))
        assert_trees_close(f(OPERANDS), want(OPERANDS))


X64 = [
    Variant("gated_residual_adaln", "layer", "gelu", affine=True, plan="ahead"),
    Variant("gated_residual_adaln", "rms", "gelu_tanh", affine=True, per_row=True, plan="steps"),
    Variant("gated_residual", plan="single"),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", X64, ids=["layer", "rms", "gate"])
def test_under_x64(run, variant):
    """With jax_enable_x64 values and gradients are the same, in the same dtypes."""
    case = make_case([9, 0, 31, 2, 1], 37, per_row=variant.per_row, before=5, after=13)
    with jax.enable_x64(True):
        check(case, variant, run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", FP8)
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
    """Traced and lowered as on an H200. Scalars may be: a Python number comes as one, and is cast where it meets an array."""
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
