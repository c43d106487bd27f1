"""What tests/contracts/test_groups.py does not vary: activations, dtypes, one array of weights, the kernel for few
rows, what is kept for the backward."""

import dataclasses
import functools
import itertools

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
from tests.contracts.run import compare
from tests.ops.grouped_glu.cases import FUSED, RUNS, SPLIT, make_unit, plan_of

ROUTINGS = {
    "all-rows": ([17, 40, 13], 0, 0),
    "outside": ([9, 0, 31], 11, 19),
    "one-group": ([0, 70, 0], 0, 0),
    "no-rows": ([0, 0, 0], 30, 40),
    "at-the-end": ([1, 1, 1], 66, 1),
    **{
        f"random{seed}": (np.random.default_rng(seed).multinomial(50, [0.1, 0.6, 0.3]), seed, 20 - seed)
        for seed in (3, 7)
    },
}


def check(
    run: str, sizes, K: int, F: int, *, kind="float32", joined=False, biased=False, before=1, after=2, **options
) -> None:
    """Two products, a product of both and another one: each adds its roundings."""
    case = make_unit(sizes, K, F, dtype=kind, before=before, after=after)
    arguments = case.clean(joined=joined, biased=biased)
    compare("grouped_glu", "xla", arguments, kind, 2, plan=plan_of(run), precision="highest", **options)


@pytest.mark.parametrize("run", [*FUSED, *SPLIT])
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS.values(), ids=ROUTINGS)
def test_few_rows(run, sizes, before, after):
    check(run, sizes, 19, 37, before=before, after=after, biased=True)


@pytest.mark.parametrize("run", ["own", pytest.param("own-gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.gpu), "bfloat16"])
def test_own_tiles_of_few_rows(run, dtype):
    """Sums in four parts; one program for both routings."""
    for sizes in ((1, 0, 4), (0, 2, 3)):
        check(run, sizes, 1100, 37, kind=dtype)


@pytest.mark.parametrize("run", RUNS)
def test_one_array_of_weights(run):
    check(run, [9, 0, 31], 19, 37, joined=True, biased=True)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("joined", [False, True], ids=["two", "joined"])
def test_what_stands_outside_is_not_read(run, joined):
    """By the activation passes: products write zeros there, but gate and up of another kernel may hold anything."""
    case = make_unit([9, 0, 31], 19, 37, before=11, after=19)
    plan = dataclasses.replace(plan_of(run), device=current_device())
    spec = Spec(plan, "silu", False, jax.lax.Precision.HIGHEST, *4 * (jnp.dtype("float32"),))
    pre = (jnp.concatenate([case.dh, case.dh], axis=1),) if joined else (case.dh, case.dh)
    both = jax.jit(lambda *given: (unit_forward(spec, *given[::2]), _unit_gradients(spec, *given)))
    h, dpre = both(pre, case.dh, case.offsets)
    clean = jnp.nan_to_num(case.dh)
    assert_close(h, jax.nn.silu(clean) * clean, "float32")
    for half in dpre:
        assert not np.asarray(half)[np.isnan(case.dh).all(axis=1)].any()


HALVES = ("bfloat16", "float16")


# Every kernel calls one table of activations, which tests/_lib compares: interpreted, some with each kernel.
@pytest.mark.parametrize(
    ("run", "activation"),
    [
        *itertools.product(["interpret"], ["gelu_tanh", "sigmoid"]),
        ("interpret", "swiglu_oai"),
        ("fused", "relu"),
        *(
            pytest.param(*each, marks=pytest.mark.gpu)
            for each in itertools.product(
                ["gpu", "fused-gpu"], ["gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu_oai"]
            )
        ),
    ],
)
def test_activations(run, activation):
    check(run, [5, 0, 9], 8 if activation != "swiglu_oai" else 200, 12, activation=activation)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        *((run, "float16") for run in ("xla", "interpret")),  # in bfloat16: `test_compute_dtype`
        ("fused-split", "bfloat16"),
        *(pytest.param(run, dtype, marks=pytest.mark.gpu) for run in ("gpu", "fused-split-gpu") for dtype in HALVES),
    ],
)
def test_half(run, dtype):
    """The weights of gate and up in two arrays, and in one, which the kernel for few rows does not read."""
    joined = dtype == "float16" and not run.startswith("fused")
    check(run, [17, 0, 25], 40, 48, kind=dtype, joined=joined, before=3, after=5)


@pytest.mark.parametrize("run", RUNS)
def test_nothing_saved(run):
    """The same to the bit as with what the forward saved."""
    case = make_unit([17, 40, 13], 19, 37)

    @functools.partial(jax.jit, static_argnums=0)
    def results(save, x, w_gate, w_up, dh, offsets):
        unit = functools.partial(jaxops.grouped_glu, group_offsets=offsets, plan=plan_of(run), save=save)
        h, vjp = jax.vjp(unit, x, w_gate, w_up)
        return h, *vjp(dh)

    saved, again = (results(save, *case.arrays) for save in ("preactivations", "nothing"))
    assert [np.asarray(x).tobytes() for x in saved] == [np.asarray(x).tobytes() for x in again]


@pytest.mark.parametrize("run", RUNS)
def test_compute_dtype(run):
    """Float32 weights under bfloat16 products: their gradients are float32 and never rounded to bfloat16. The gradient
    of x is rounded once, after both products."""
    case = make_unit([20, 0, 25], 32, 48, after=3, dtype="bfloat16")
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

    want = gradient_of_x(case.x, wide, jnp.nan_to_num(case.dh))
    # A few elements of gate, up and their gradients are rounded to the other neighbour than in the reference; results
    # rounded before they are added would be 10 times as far off.
    dx_wide, want = np.asarray(dx_wide), np.asarray(want)
    assert np.sqrt(np.mean((dx_wide - want) ** 2) / np.mean(want**2)) < 3e-4
    np.testing.assert_array_equal(np.asarray(dx), dx_wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(h), np.asarray(h_wide).astype(jnp.bfloat16))
    for ours, same in zip(dw, dw_wide, strict=True):
        assert_close(ours, same, "float32")
        assert np.any(np.asarray(ours) != np.asarray(ours).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("save", "products"), [("preactivations", 6), ("nothing", 8)])
def test_what_is_not_kept_is_multiplied_again(save, products):
    """Two loops over tiles forward, two for dx, two for the weight gradients, and the forward's two again behind a
    barrier, as under jax.checkpoint: XLA would merge them with the first ones."""
    case = make_unit([9, 0, 21], 12, 20)
    unit = functools.partial(jaxops.grouped_glu, save=save, plan=plan_of("xla"))
    step = lambda *given: jnp.sum(jnp.sin(unit(*given, case.offsets)))
    text = jax.jit(jax.grad(step, argnums=(0, 1, 2))).lower(*case.arrays[:3]).as_text()
    barriers = int(save == "nothing")
    assert (text.count("stablehlo.while"), text.count("stablehlo.optimization_barrier")) == (products, barriers)
