"""Outputs and gradients by the float32 reference: every activation and dtype, odd sizes, empty groups, NaN outside."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.numerics.activations import unit_gradients
from jaxops._lib.planning.device import current_device
from jaxops.ops.grouped_glu.api import _unit_gradients, unit_forward
from jaxops.ops.grouped_glu.plan import Spec
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.compare import assert_close
from tests.ops.grouped_glu.cases import FUSED, KERNELS, RUNS, SPLIT, check, make_case, plan_of, run_all

ROUTINGS = [
    pytest.param([17, 40, 13], 0, 0, id="all-rows"),
    pytest.param([9, 0, 31], 11, 19, id="rows-outside-both-ends"),
    pytest.param([0, 70, 0], 0, 0, id="one-group"),
    pytest.param([0, 0, 0], 30, 40, id="no-rows"),
    pytest.param([1, 1, 1], 66, 1, id="single-rows-at-the-end"),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("joined", [False, True], ids=["two", "joined"])
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS)
def test_routings(run, joined, sizes, before, after):
    check(make_case(sizes, 19, 37, before=before, after=after), run, joined=joined)


@pytest.mark.parametrize("run", [*FUSED, *SPLIT])
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS)
def test_few_rows(run, sizes, before, after):
    check(make_case(sizes, 19, 37, before=before, after=after), run)


@pytest.mark.parametrize("run", ["own", pytest.param("own-gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_tiles_of_few_rows(run, dtype):
    """Sums in four parts and, in float32, whole; one program for both routings of the first."""
    for sizes, K in (((1, 0, 4), 1100), ((0, 2, 3), 1100), ((11, 0, 7), 40))[: 3 if dtype == "float32" else 2]:
        check(make_case(sizes, K, 37, before=1, after=2, dtype=dtype), "own", kind=dtype)


@pytest.mark.parametrize("run", [*RUNS, *FUSED])
@hypothesis.given(data=st.data())
def test_random_routings(run, data):
    """One compiled shape, that of test_routings: any sizes, anywhere."""
    ends = sorted(data.draw(st.lists(st.integers(0, 70), min_size=4, max_size=4)))
    check(make_case(np.diff(ends), 19, 37, before=ends[0], after=70 - ends[-1], seed=data.draw(st.integers(0, 9))), run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("joined", [False, True], ids=["two", "joined"])
def test_what_stands_outside_is_not_read(run, joined):
    """By the activation passes: products write zeros there, but gate and up of another kernel may hold anything."""
    case = make_case([9, 0, 31], 19, 37, before=11, after=19)
    plan = dataclasses.replace(plan_of(run), device=current_device())
    spec = Spec(plan, "silu", False, jax.lax.Precision.HIGHEST, *4 * (jnp.dtype("float32"),))
    pre = (jnp.concatenate([case.dh, case.dh], axis=1),) if joined else (case.dh, case.dh)
    both = jax.jit(lambda *given: (unit_forward(spec, *given[::2]), _unit_gradients(spec, *given)))
    h, dpre = both(pre, case.dh, case.offsets)
    clean = jnp.where(case.outside, 0, case.dh)
    assert_close(h, jax.nn.silu(clean) * clean, "float32")
    for half in dpre:
        assert not np.asarray(half)[case.outside[:, 0]].any()


# Every kernel calls one table of activations, which is tested below: interpreted, some with each kernel.
@pytest.mark.parametrize(
    ("run", "activation"),
    [
        *itertools.product(["interpret"], ["gelu_tanh", "sigmoid"]),
        ("fused", "relu"),
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in itertools.product(["gpu", "fused-gpu"], ["gelu", "gelu_tanh", "relu", "sigmoid"])
        ),
    ],
)
def test_activations(run, activation):
    check(make_case([5, 0, 9], 8, 12, before=1, after=2), run, activation=activation)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "joined"), [("bfloat16", False), ("float16", True)])
def test_half(run, dtype, joined):
    check(make_case([17, 0, 25], 32, 48, dtype=dtype, before=3, after=5), run, kind=dtype, joined=joined)


@pytest.mark.parametrize("run", [*KERNELS, *FUSED])
@pytest.mark.parametrize(("sizes", "K", "F"), [([31, 1], 5, 64)])
def test_sizes(run, sizes, K, F):
    check(make_case(sizes, K, F), run)


@pytest.mark.parametrize("run", SPLIT)
def test_split_sums_in_half(run):
    check(make_case([17, 0, 25], 40, 48, dtype="bfloat16", before=3, after=5), run, kind="bfloat16")


@pytest.mark.parametrize("run", RUNS)
def test_nothing_saved(run):
    """The same to the bit as with what the forward saved."""
    case = make_case([17, 40, 13], 19, 37)
    saved, again = (run_all(case.arrays, run, False, options) for options in ((), (("save", "nothing"),)))
    assert [np.asarray(x).tobytes() for x in saved] == [np.asarray(x).tobytes() for x in again]


@pytest.mark.parametrize("run", RUNS)
def test_compute_dtype(run):
    """Float32 weights under bfloat16 products: their gradients are float32 and never rounded to bfloat16. The gradient
    of x is rounded once, after both products."""
    case = make_case([20, 0, 25], 32, 48, after=3, dtype="bfloat16")
    wide = [w.astype(jnp.float32) for w in (case.w_gate, case.w_up)]

    @jax.jit
    def results(x, w_gate, w_up, dh):
        options = {"compute_dtype": jnp.bfloat16, "plan": plan_of(run)}
        h, vjp = jax.vjp(lambda x, *w: jaxops.grouped_glu(x, *w, case.offsets, **options), x, w_gate, w_up)
        return h, *vjp(dh.astype(h.dtype))

    h, dx, *dw = results(case.x, *wide, case.dh)
    h_wide, dx_wide, *dw_wide = results(case.x.astype(jnp.float32), *wide, case.dh)
    assert [a.dtype for a in (h, dx, *dw)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    assert h_wide.dtype == dx_wide.dtype == jnp.float32

    @functools.partial(
        jax.jit, compiler_options={"xla_allow_excess_precision": False}
    )  # on a GPU XLA leaves out casts to bfloat16 and back
    def gradient_of_x(x, wide, dh):
        pre = [grouped_matmul_reference(x, w.astype(jnp.bfloat16), case.offsets).astype(jnp.bfloat16) for w in wide]
        dpre = [d.astype(jnp.bfloat16) for d in unit_gradients("silu", *pre, dh)]
        narrow = [w.astype(jnp.bfloat16) for w in wide]
        parts = zip(dpre, narrow, strict=True)
        return sum(grouped_matmul_reference(d, w, case.offsets, transpose_rhs=True) for d, w in parts)

    want = gradient_of_x(case.x, wide, jnp.where(case.outside, 0, case.dh))
    # A few elements of gate, up and their gradients are rounded to the other neighbour than in the reference; results
    # rounded before they are added would be 10 times as far off.
    dx_wide, want = np.asarray(dx_wide), np.asarray(want)
    assert np.sqrt(np.mean((dx_wide - want) ** 2) / np.mean(want**2)) < 3e-4
    np.testing.assert_array_equal(np.asarray(dx), dx_wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(h), np.asarray(h_wide).astype(jnp.bfloat16))
    for ours, same in zip(dw, dw_wide, strict=True):
        assert_close(ours, same, "float32")
        assert np.any(np.asarray(ours) != np.asarray(ours).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("run", [*RUNS, *FUSED])
def test_offsets_that_break_the_contract(run):
    """Below 0, past M, decreasing: some result of the right shape."""
    case = make_case([17, 40, 13], 19, 37)  # compiled already, for test_routings
    for bad in ([-5, 10, 30, 40], [0, 10, 30, 10_000], [0, 30, 10, 40], [2**31 - 1, -(2**31), 0, 7]):
        got = jax.block_until_ready(run_all((*case.arrays[:-1], np.array(bad, np.int32)), run))
        assert [x.shape for x in got] == [(70, 37), (70, 19), (3, 19, 37), (3, 19, 37)]


@pytest.mark.parametrize(("save", "products"), [("preactivations", 6), ("nothing", 8)])
def test_what_is_not_kept_is_multiplied_again(save, products):
    """Two loops over tiles forward, two for dx, two for the weight gradients, and the forward's two again behind a
    barrier, as under jax.checkpoint: XLA would merge them with the first ones."""
    case = make_case([9, 0, 21], 12, 20)
    unit = functools.partial(jaxops.grouped_glu, save=save, plan=plan_of("xla"))
    step = lambda *given: jnp.sum(jnp.sin(unit(*given, case.offsets)))
    text = jax.jit(jax.grad(step, argnums=(0, 1, 2))).lower(*case.arrays[:3]).as_text()
    barriers = int(save == "nothing")
    assert (text.count("stablehlo.while"), text.count("stablehlo.optimization_barrier")) == (products, barriers)
