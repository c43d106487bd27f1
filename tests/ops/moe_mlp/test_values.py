"""Results and gradients against the float32 reference: odd sizes, dropped choices, rows outside, NaN, bad indices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.numerics.activations import ACTIVATIONS
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.moe_mlp.cases import (
    BIASES,
    FEW,
    NAMES,
    QUICK,
    RUNS,
    SHARD,
    Variant,
    check,
    check_values,
    check_zeros,
    clean,
    compiled,
    make_case,
    mlp,
    want_of,
)
from tests.ops.permute.cases import has_row

VARIANTS = {
    "shard": SHARD,
    "one-choice": Variant(T=5, D=32, F=48, N=24, k=1, E=4, dtype="float16"),
    "eight": Variant(T=7, D=24, F=40, N=24, k=8, E=9, dtype="bfloat16", out_dtype="float32", capacity=6, last=7),
    "empty-experts": Variant(T=4, D=9, F=5, N=6, k=2, E=16, dtype="bfloat16"),
}
OAI = {"activation": "swiglu_oai", "biased": BIASES}
# Weights in other forms, biases, gpt-oss' unit.
FORMS = {
    "gpt-oss": dataclasses.replace(SHARD, **OAI),
    "joined": dataclasses.replace(SHARD, **OAI, form="joined", F=24),
    "joined-bfloat16": dataclasses.replace(VARIANTS["eight"], form="joined"),
    "some-biases": dataclasses.replace(VARIANTS["one-choice"], biased=("b_up", "b_down")),
    "alone": dataclasses.replace(SHARD, activation="relu2", form="alone", biased=BIASES),
    "alone-again": dataclasses.replace(VARIANTS["eight"], activation="sigmoid", form="alone", save="nothing"),
}
VARIANTS |= FORMS


@pytest.mark.parametrize(
    ("variant", "run"),
    [
        *((variant, "xla") for variant in VARIANTS),
        # Interpreted, every form of weights; other sizes and dtypes in the ops that it consists of.
        *((variant, "interpret") for variant in ("shard", "eight", "gpt-oss", "joined", "alone")),
        *(pytest.param(variant, "gpu", marks=pytest.mark.gpu) for variant in VARIANTS),
        # The forward's kernel for few rows; the backward is that of the other runs. More sizes: tests/ops/grouped_glu.
        *((variant, "few") for variant in ("shard", "eight", "gpt-oss")),
        *(pytest.param(variant, "few-gpu", marks=pytest.mark.gpu) for variant in ("shard", "eight", "gpt-oss")),
    ],
)
def test_variants(variant, run):
    for seed in range(2):
        check(make_case(VARIANTS[variant], seed), VARIANTS[variant], run)


@pytest.mark.parametrize(
    ("run", "activation"),
    [
        ("xla", "gelu"),
        *(pytest.param("gpu", name, marks=pytest.mark.gpu) for name in sorted(set(ACTIVATIONS) - {"silu"})),
    ],
)
def test_activations(run, activation):
    """And, on the way, what is multiplied again in the backward."""
    variant = Variant(T=6, D=8, F=12, N=8, k=2, E=3, activation=activation, save="nothing")
    check(make_case(variant), variant, run)


@pytest.mark.parametrize("run", [*QUICK, *FEW])
def test_nothing_saved(run):
    """The same to the bit as with what the forward saved."""
    case = make_case(SHARD)
    saved, again = (
        compiled(run, dataclasses.replace(SHARD, save=save))(case) for save in ("preactivations", "nothing")
    )
    assert {name: np.asarray(x).tobytes() for name, x in saved.items()} == {
        name: np.asarray(x).tobytes() for name, x in again.items()
    }


@pytest.mark.parametrize("run", QUICK)
def test_without_a_gradient(run):
    """The same to the bit as with one: gate and up are not kept then, on no backend."""
    case = make_case(SHARD)
    operands = [case[name] for name in ("x", "w_gate", "w_up", "w_down", "routing")]
    out = jax.jit(functools.partial(mlp, SHARD, run))(*operands)
    assert np.asarray(out).tobytes() == np.asarray(compiled(run, SHARD)(case)["out"]).tobytes()


@pytest.mark.parametrize("run", QUICK)
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
def test_compute_dtype(x_dtype, run):
    """Float32 weights under bfloat16 products: their gradients are float32 and were never rounded."""
    variant = Variant(T=9, D=32, F=48, N=40, k=2, E=4, dtype="bfloat16", first=1)
    case = make_case(variant)
    wide = case | {
        name: case[name].astype(jnp.float32)
        for name in case
        if name[0] == "w" or (x_dtype == "float32" and name in ("x", "dout"))
    }
    got = compiled(
        run,
        variant if x_dtype == "bfloat16" else dataclasses.replace(variant, dtype="float32"),
        compute_dtype=jnp.bfloat16,
    )(wide)
    dtypes = {"out": x_dtype, "dx": x_dtype} | dict.fromkeys(NAMES[2:], "float32")
    assert {name: x.dtype for name, x in got.items()} == dtypes
    for name, want in want_of(case, variant).items():
        assert_close(got[name], want, "bfloat16", name, scale=2, roundings=4)
    narrow = compiled(run, variant)(case)
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert np.any(np.asarray(got[name]) != np.asarray(got[name]).astype(jnp.bfloat16).astype(np.float32)), name
        np.testing.assert_array_equal(
            np.asarray(got[name]).astype(jnp.bfloat16), np.asarray(narrow[name]), err_msg=name
        )


@pytest.mark.parametrize("run", [*RUNS, *FEW])
def test_bad_tokens_stay_with_themselves(run):
    """NaN in a token, its weight or its cotangent reaches only that token's results and its experts' gradients."""
    case = make_case(SHARD)
    routing = case["routing"]
    good, token = compiled(run, SHARD)(case), int(has_row(routing).all(axis=1).argmax())
    experts = np.isin(np.arange(SHARD.first, SHARD.last), np.asarray(routing.experts)[token])
    assert experts.sum() == SHARD.k
    bad = case | {name: case[name].at[token].set(jnp.nan) for name in ("x", "dout")}
    got = compiled(run, SHARD)(
        bad | {"routing": dataclasses.replace(routing, weights=routing.weights.at[token, 1].set(jnp.nan))}
    )
    for name, values in got.items():
        touched = experts if name in ("dw_gate", "dw_up", "dw_down") else np.arange(SHARD.T) == token
        values = np.asarray(values)
        assert np.isnan(values[touched]).reshape(touched.sum(), -1).any(axis=1).all(), name
        np.testing.assert_array_equal(values[~touched], np.asarray(good[name])[~touched], err_msg=name)


@pytest.mark.parametrize("run", QUICK)
def test_bad_experts_stay_with_their_tokens(run):
    """NaN in an expert's weights reaches its tokens and no other: an expert without rows reaches nothing but itself."""
    variant = VARIANTS["empty-experts"]
    case = make_case(variant)
    good = compiled(run, variant)(case)
    sizes = np.diff(np.asarray(case["routing"].group_offsets))
    bad = np.stack([sizes == 0, np.arange(variant.E) == sizes.argmax()]).any(axis=0)
    got = compiled(run, variant)(
        case | {name: jnp.where(bad[:, None, None], jnp.nan, case[name]) for name in ("w_gate", "w_up", "w_down")}
    )
    chosen = (np.asarray(case["routing"].experts) == sizes.argmax()).any(axis=1)
    assert 0 < chosen.sum() < variant.T
    for name in ("out", "dx"):
        assert np.isnan(np.asarray(got[name], np.float32)[chosen]).any(axis=1).all()
        np.testing.assert_array_equal(np.asarray(got[name])[~chosen], np.asarray(good[name])[~chosen])
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert not np.asarray(got[name], np.float32)[sizes == 0].any()


@pytest.mark.parametrize("run", [*RUNS, *FEW])
def test_wild_positions_indices_and_offsets(run):
    """Some answer, of the right shape, from inside the arrays; a position that is none has no gradient."""
    case, shapes = make_case(SHARD), {name: x.shape for name, x in want_of(make_case(SHARD), SHARD).items()}
    rng, R = np.random.default_rng(0), SHARD.T * SHARD.k
    wild = rng.choice(np.array([-(2**31), -7, -1, 0, 3, R - 1, R, R + 5, 2**31 - 1], np.int32), size=(SHARD.T, SHARD.k))
    indices = rng.choice(np.array([-(2**31), -1, 0, SHARD.T - 1, SHARD.T, 2**31 - 1], np.int32), size=R)
    for first, end in ((-9, 10**6), (5, R + 1), (2**31 - 1, -(2**31)), (20, 10)):
        offsets = jnp.array([first, 7, 7, 11, end], jnp.int32)
        for change in ({}, {"row_positions": put(wild)}, {"row_indices": put(indices)}):
            routing = dataclasses.replace(case["routing"], group_offsets=offsets, **change)
            got = jax.block_until_ready(compiled(run, SHARD)(case | {"routing": routing}))
            assert {name: x.shape for name, x in got.items()} == shapes
            position, lo = np.asarray(routing.row_positions), np.clip(first, 0, R)
            assert not np.asarray(got["dweights"])[(position < lo) | (position >= np.clip(end, lo, R))].any()


@pytest.mark.parametrize("run", RUNS)
def test_shards_add_up(run):
    """Each device has a part of the offsets; the devices' results and gradients add up to the whole's."""
    case, found = make_case(SHARD), []
    offsets = case["routing"].group_offsets
    for first, end in ((0, 1), (1, 3), (3, 4), (4, 4)):  # the last one has no expert
        mine = jnp.clip(offsets, offsets[first], offsets[end])
        found.append(compiled(run, SHARD)(case | {"routing": dataclasses.replace(case["routing"], group_offsets=mine)}))
    whole = compiled(run, SHARD)(case)
    check_values({name: sum(part[name] for part in found) for name in NAMES}, whole, SHARD)
    assert not any(np.asarray(values).any() for values in found[-1].values())


@pytest.mark.parametrize("run", QUICK)
def test_gradient_of_downs_bias_is_summed_in_float32(run):
    """The router's weights are not rounded to bfloat16."""
    variant = dataclasses.replace(VARIANTS["eight"], biased=("b_down",))
    case = clean(make_case(variant))
    position, offsets = (np.asarray(x) for x in (case["routing"].row_positions, case["routing"].group_offsets))
    expert = np.searchsorted(offsets, position, side="right") - 1
    shares = np.where(has_row(case["routing"]), np.asarray(case["routing"].weights, np.float64), 0)
    # The cotangent is rounded to the products' dtype, as dout is here.
    dout = np.asarray(case["dout"].astype(jnp.bfloat16), np.float64)
    want = np.stack([np.sum(shares * (expert == e), axis=1) @ dout for e in range(variant.experts)])
    got = np.asarray(compiled(run, variant)(case)["db_down"])
    np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("T", "D", "F", "N", "k", "E"),
    [(4096, 1024, 512, 1024, 8, 64), (1000, 712, 1032, 136, 4, 16), (77, 65, 131, 33, 3, 5), (300, 64, 72, 64, 2, 128)],
)
def test_plans_that_users_get(T, D, F, N, k, E, dtype):
    """On the GPU, with "auto": Hopper's kernels where they can, the last one with tiny groups."""
    variant = Variant(T=T, D=D, F=F, N=N, k=k, E=E, dtype=dtype, capacity=2 * T * k // E, first=1)
    case = make_case(variant)
    got, want = (
        compiled("auto", variant, plan=None, backend=backend, precision=None)(case) for backend in ("auto", "xla")
    )
    for name in NAMES:
        assert_close(got[name], want[name], "bfloat16" if dtype == "bfloat16" else "tf32", name, scale=3, roundings=4)
    check_zeros(got, case["routing"])
