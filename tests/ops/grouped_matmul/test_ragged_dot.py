"""ragged_dot against jax.lax.ragged_dot: the same call by another module's name."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops._lib.arrays.checks import FLOATS
from jaxops._lib.arrays.precision import kernels_have, resolve_precision
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_matmul.cases import RUNS, plan_of

M, K, N, G = 56, 24, 40, 6
SIZES = [9, 0, 17, 5, 1, 16]  # 8 rows past their sum
PRESETS = lax.DotAlgorithmPreset


def operands(lhs_dtype="float32", rhs_dtype="float32", seed: int = 0):
    """lhs[M, K], rhs[G, K, N], dout[M, N]."""
    rng = np.random.default_rng(seed)
    return tuple(
        put(rng.normal(size=s), d) for s, d in (((M, K), lhs_dtype), ((G, K, N), rhs_dtype), ((M, N), "float32"))
    )


@functools.partial(jax.jit, static_argnames=("run", "backward"))
def ours(lhs, rhs, sizes, dout, *, run: str, backward: bool = True):
    out, vjp = jax.vjp(lambda lhs, rhs: jaxops.ragged_dot(lhs, rhs, sizes, "highest", plan=plan_of(run)), lhs, rhs)
    return (out, *vjp(dout)) if backward else (out,)


@jax.jit
def theirs(lhs, rhs, sizes, dout):
    out, vjp = jax.vjp(lambda lhs, rhs: lax.ragged_dot(lhs, rhs, sizes, "highest"), lhs, rhs)
    return out, *vjp(dout)


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS)), ids="-".join)
def test_dtype_of_the_result_is_jaxs(dtypes):
    lhs, rhs, _ = operands(*dtypes)
    got, want = (jax.eval_shape(f, lhs, rhs, jnp.array(SIZES)).dtype for f in (jaxops.ragged_dot, lax.ragged_dot))
    assert got == want


@pytest.mark.parametrize(
    ("sizes", "dtypes"),
    [([0, 0, M, 0, 0, 0], ("float32", "float32")), (SIZES, ("bfloat16", "float32")), (SIZES, ("float32", "float16"))],
    ids=str,
)
def test_values_and_gradients(sizes, dtypes):
    """Gradients come in the dtypes of the primals, as JAX's do."""
    lhs, rhs, dout = operands(*dtypes)
    got, want = ours(lhs, rhs, jnp.array(sizes), dout, run="xla"), theirs(lhs, rhs, jnp.array(sizes), dout)
    for name, g, w, kind in zip(("out", "dlhs", "drhs"), got, want, ("float32", *dtypes), strict=True):
        assert g.dtype == w.dtype == jnp.dtype(kind)
        assert_close(g, w, kind, name)


def test_mixed_dtypes_in_the_kernels():
    lhs, rhs, dout = operands("bfloat16", "float32")
    (got,) = ours(lhs, rhs, jnp.array(SIZES), dout, run="interpret", backward=False)
    assert_close(got, theirs(lhs, rhs, jnp.array(SIZES), dout)[0], "float32")


@pytest.mark.parametrize(("dtype", "preferred"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_preferred_element_type(dtype, preferred):
    lhs, rhs, _ = operands(dtype, dtype)
    jitted = (
        jax.jit(functools.partial(f, preferred_element_type=preferred)) for f in (jaxops.ragged_dot, lax.ragged_dot)
    )
    got, want = (f(lhs, rhs, jnp.array(SIZES)) for f in jitted)
    assert got.dtype == want.dtype == jnp.dtype(preferred)
    assert_close(got, want, got.dtype.name)


HIGH, HIGHEST, DEFAULT = lax.Precision.HIGH, lax.Precision.HIGHEST, lax.Precision.DEFAULT
SPELLINGS = {
    "DEFAULT": (None, "default", "bfloat16", PRESETS.DEFAULT),
    "HIGH": ("high", "tensorfloat32", HIGH, (HIGH, DEFAULT), PRESETS.TF32_TF32_F32),
    "HIGHEST": ("highest", "float32", HIGHEST, ("default", "highest"), PRESETS.F32_F32_F32, "F32_F32_F32"),
}


@pytest.mark.parametrize("means", SPELLINGS)
def test_precision_in_every_spelling_of_lax_dot(means):
    """None follows the flag (tests/contracts); without it, it is the default."""
    lhs, rhs, _ = operands()
    for precision in SPELLINGS[means]:
        for op, b in ((lax.dot, rhs[0]), (functools.partial(jaxops.ragged_dot, group_sizes=jnp.array(SIZES)), rhs)):
            jax.eval_shape(functools.partial(op, precision=precision), lhs, b)
        assert resolve_precision(precision, "float32") == (lax.Precision[means], jnp.dtype("float32"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("preset", [p.name for p in PRESETS if "F8" not in p.name and p.name != "DEFAULT"])
def test_every_algorithm(preset, dtype):
    """What JAX computes, to the rounding of operands, or the error that JAX raises on this machine. Both gradients'
    products have the same algorithm. As an argument and as the flag: the same program."""
    lhs, rhs, dout = operands(dtype, dtype)

    def forward(op, lhs, rhs, precision=None):
        return op(lhs, rhs, jnp.array(SIZES), precision, jnp.float32)

    def gradients(precision=None):
        def both(lhs, rhs, dout):
            out, vjp = jax.vjp(functools.partial(forward, jaxops.ragged_dot, precision=precision), lhs, rhs)
            return out, *vjp(dout)

        return str(jax.make_jaxpr(both)(lhs, rhs, dout))

    ours, theirs = (
        jax.jit(functools.partial(forward, op, precision=preset)) for op in (jaxops.ragged_dot, lax.ragged_dot)
    )
    try:
        want = theirs(lhs, rhs)
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        want = None  # on a CPU
    if want is None and not kernels_have(preset, dtype):
        with pytest.raises(ValueError, match="not supported"):
            ours(lhs, rhs)
        return
    text = gradients(preset)
    assert len(re.findall(r" precision=", text)) >= 3
    assert len(set(re.findall(r" precision=(.*)", text))) == 1
    with jax.default_matmul_precision(preset):
        assert gradients() == text
    got = ours(lhs, rhs)
    if want is not None:
        assert got.dtype == want.dtype
        assert_close(got, want, "bfloat16")


def test_operands_are_rounded_as_the_algorithm_says():
    """BF16_BF16_F32 of float32 operands, as its gradients: products of operands in bfloat16, summed in float32."""
    lhs, rhs, dout = operands()
    out, vjp = jax.vjp(lambda lhs, rhs: jaxops.ragged_dot(lhs, rhs, jnp.array(SIZES), "BF16_BF16_F32"), lhs, rhs)
    round_ = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    want = theirs(round_(lhs), round_(rhs), jnp.array(SIZES), round_(dout))
    for a, b in zip((out, *vjp(dout)), want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(a, b, "float32")


@pytest.mark.parametrize("backend", ["pallas", "triton"])
def test_kernels_refuse_what_they_do_not_multiply(backend):
    lhs, rhs, _ = operands()
    for change in (
        {"precision": "BF16_BF16_F32_X3"},
        {"preferred_element_type": "float64"},
        {"lhs": lhs.astype(jnp.int8), "rhs": rhs.astype(jnp.int8)},
    ):
        with pytest.raises(NotImplementedError, match=r"backend='auto' or 'xla'|[Uu]se backend='(auto|pallas)'"):
            jaxops.ragged_dot(**{"lhs": lhs, "rhs": rhs, "group_sizes": jnp.array(SIZES), "backend": backend, **change})


@pytest.mark.parametrize(("dtype", "preferred"), [("int8", None), ("int16", "int32"), ("uint8", "uint32")])
def test_integers(dtype, preferred):
    """As JAX's, which wraps around where the result's dtype is too narrow."""
    rng = np.random.default_rng(3)
    lhs, rhs = (put(rng.integers(0 if dtype[0] == "u" else -100, 100, size), dtype) for size in ((M, K), (G, K, N)))
    got, want = (
        f(lhs, rhs, jnp.array(SIZES), preferred_element_type=preferred) for f in (jaxops.ragged_dot, lax.ragged_dot)
    )
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_float64():
    with jax.enable_x64(True):
        lhs, rhs, dout = operands("float64", "float64")

        def gradients(op):
            out, vjp = jax.vjp(lambda lhs, rhs: op(lhs, rhs, jnp.array(SIZES)), lhs, rhs)
            return out, *vjp(dout.astype(jnp.float64))

        for a, b in zip(gradients(jaxops.ragged_dot), gradients(lax.ragged_dot), strict=True):
            assert a.dtype == b.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@functools.partial(jax.jit, static_argnames="run")
def shard(lhs, rhs, sizes, offset, dout, run: str):
    """A shard's result and its weights' gradient; which shard it is stays on the device."""
    out, vjp = jax.vjp(
        lambda rhs: jaxops.ragged_dot(lhs, rhs, sizes, "highest", group_offset=offset, plan=plan_of(run)), rhs
    )
    return out, *vjp(dout)


@pytest.mark.parametrize("run", RUNS)
def test_group_offset(run):
    """A shard's rows and weight gradients are those of the whole. Groups past the last one are empty; they are not the
    groups before it."""
    lhs, rhs, dout = map(np.asarray, operands())
    sizes = jnp.array(SIZES, jnp.int32)
    whole, _, weights = map(np.asarray, ours(lhs, rhs, sizes, dout, run=run))
    ends = np.cumsum([0, *SIZES])
    for at in (0, 2, 4, 5, 6, 1000):
        there = [g for g in (at, at + 1) if g < G]
        mine = np.stack([rhs[g] if g in there else rhs[0] for g in (at, at + 1)])
        out, drhs = map(np.asarray, shard(lhs, mine, sizes, jnp.array([at]), dout, run))
        row = np.arange(M)[:, None]
        own = (row >= ends[there[0]]) & (row < ends[there[-1] + 1]) if there else row < 0
        assert_close(out, np.where(own, whole, 0), "float32")
        assert_close(drhs, np.stack([weights[g] if g in there else 0 * rhs[0] for g in (at, at + 1)]), "float32")


def test_group_offset_as_a_number():
    """Python's, numpy's, a scalar on the device: as an array of one."""
    lhs, rhs, _ = operands()
    for at in (2, 1000):
        mine = rhs[2:4]
        dot = functools.partial(jaxops.ragged_dot, lhs, mine, jnp.array(SIZES))
        want = dot(group_offset=jnp.array([at]))
        for offset in (at, np.int64(at), jnp.int32(at)):
            np.testing.assert_array_equal(dot(group_offset=offset), want)
    assert not dot(group_offset=np.int64(2**32)).any()
    with jax.enable_x64(True):
        assert not dot(group_offset=jnp.int64(2**32)).any()


def test_an_out_sharding_that_splits_nothing():
    lhs, rhs, _ = operands()
    jax.eval_shape(
        functools.partial(jaxops.ragged_dot, out_sharding=jax.sharding.PartitionSpec()), lhs, rhs, jnp.array(SIZES)
    )


def test_group_sizes_sum_past_their_dtype():
    got = jax.jit(jaxops.ragged_dot)(jnp.ones((250, 1)), jnp.array([[[1.0]], [[2.0]]]), jnp.array([100, 120], jnp.int8))
    np.testing.assert_array_equal(jnp.squeeze(got, 1), np.repeat([1, 2, 0], [100, 120, 30]))


@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_positional_arguments_are_those_of_jax(name):
    mine, jaxs = (inspect.signature(getattr(module, name)).parameters for module in (jaxops, lax))
    assert list(mine)[: len(jaxs)] == list(jaxs)
    for name, parameter in jaxs.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)
    assert {p.kind for name, p in mine.items() if name not in jaxs} == {inspect.Parameter.KEYWORD_ONLY}
