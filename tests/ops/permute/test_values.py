"""Rows, sums and gradients against the float32 reference: odd sizes, dropped choices, rows outside, NaN, bad
indices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import device_of
from jaxops.ops.permute import Problem, Tiles, make_plan, permute_quantized, permute_within_groups
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.permute.cases import RUNS, SHARD, Variant, check, compiled, has_row, make_case

# Programs of 4 tokens and 8 columns, with two choices at a time, or others where a variant says so.
PLAIN = Variant()
VARIANTS = {
    "plain": PLAIN,
    "shard": SHARD,
    "one-choice": Variant(T=5, D=8, k=1, dtype="float16"),
    "dropping": Variant(D=32, k=2, capacity=3, dtype="bfloat16", tile=Tiles(2, 16, 2, 1)),
    "eight": Variant(T=7, D=24, k=8, E=9, dtype="bfloat16", out_dtype="float32", tile=Tiles(1, 8, 8, 4)),
    "wide-blocks": Variant(T=9, D=5, k=5, E=5, capacity=7, out_dtype="bfloat16", tile=Tiles(16, 16, 8, 2)),
    "one-token": Variant(T=1, D=1, k=2, E=2, first=1),  # rows before the groups, and none behind them
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants(run, variant):
    for seed in range(3):
        check(make_case(variant, seed), variant, run)


@pytest.mark.parametrize("run", RUNS[:2])
def test_within_groups(run):
    """The rows of the groups are those of `permute`."""
    v, case = SHARD, make_case(SHARD)
    plan = make_plan(Problem(v.T, v.D, v.k, v.dtype), device_of(case["x"]), (), plan=v.plan_for(run))
    got, want = (
        jax.jit(functools.partial(copy, plan=plan))(case["x"], case["routing"])
        for copy in (permute_within_groups, jaxops.permute)
    )
    first, end = case["routing"].group_offsets[0], case["routing"].group_offsets[-1]
    assert 0 < first < end < len(want)
    np.testing.assert_array_equal(got[first:end], want[first:end])


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block_1x128"])
@pytest.mark.parametrize("D", [37, 150])
@pytest.mark.parametrize("run", RUNS)
def test_quantized_tokens(run, D, scaling):
    """The rows of the groups are those that a cast of `permute`'s rows gives, to the last bit, NaN in a token too. D is
    odd, so that values are copied one by one, or even with two blocks. Indices out of range stay in bounds."""
    v = dataclasses.replace(SHARD, D=D, tile=Tiles(4, 32, 2, 1))
    case = make_case(v)
    x, routing = case["x"].at[3, 1].set(jnp.nan), case["routing"]
    plan = make_plan(Problem(v.T, v.D, v.k, v.dtype), device_of(x), (), plan=v.plan_for(run))
    copy = jax.jit(lambda q, routing: permute_quantized(q, routing, plan=plan))
    q = jaxops.quantize(x, scaling=scaling)
    got = copy(q, routing)
    amax = jnp.nanmax(jnp.abs(x)) if scaling == "tensorwise" else None
    want = jaxops.quantize(jaxops.permute(x, routing), scaling=scaling, amax=amax)
    first, end = (int(n) for n in (routing.group_offsets[0], routing.group_offsets[-1]))
    assert 0 < first < end < len(want.values)
    np.testing.assert_array_equal(*(np.asarray(each.values)[first:end].view(np.uint8) for each in (got, want)))
    scales = [np.asarray(each.scales) for each in (got, want)]
    np.testing.assert_array_equal(*((each if scaling == "tensorwise" else each[..., first:end]) for each in scales))
    wild = dataclasses.replace(routing, row_indices=jnp.full_like(routing.row_indices, 2**31 - 1))
    assert np.isfinite(np.asarray(copy(q, wild).scales)).all()


@pytest.mark.parametrize("run", RUNS)
def test_bad_rows_stay_with_their_tokens(run):
    """NaN in a token, its row, weight or cotangent reaches that token, its rows and its weights, and nothing else."""
    case, good = make_case(PLAIN), compiled(run, PLAIN)(make_case(PLAIN))
    mine = np.asarray(case["routing"].row_positions)[4]
    bad = (
        case
        | {name: case[name].at[4].set(jnp.nan) for name in ("x", "dout")}
        | {name: case[name].at[mine[0]].set(jnp.nan) for name in ("rows", "drows")}
    )
    got = compiled(run, PLAIN)(
        bad | {"routing": dataclasses.replace(case["routing"], weights=case["routing"].weights.at[4, 1].set(jnp.nan))}
    )
    for name, values in got.items():
        touched = np.isin(np.arange(len(values)), mine if name in ("rows", "drows") else 4)
        assert np.isnan(np.asarray(values)[touched]).any(axis=1).all(), name
        np.testing.assert_array_equal(np.asarray(values)[~touched], np.asarray(good[name])[~touched], err_msg=name)


@pytest.mark.parametrize("run", RUNS)
def test_a_dropped_choice_of_a_bad_token(run):
    """Its weight's gradient is zero all the same: nothing comes of it, whatever its token's cotangent is."""
    case = make_case(SHARD)
    got = compiled(run, SHARD)(case | {"dout": jnp.full_like(case["dout"], jnp.nan)})["dweights"]
    kept = has_row(case["routing"])
    np.testing.assert_array_equal(np.isnan(np.asarray(got)), kept)
    assert not np.asarray(got)[~kept].any()


@pytest.mark.parametrize("run", RUNS)
def test_wild_positions_and_offsets(run):
    """Positions out of bounds count as dropped, for any offsets; a repeated position counts repeatedly."""
    case = make_case(PLAIN)
    R = PLAIN.T * PLAIN.k
    rows = jnp.nan_to_num(case["rows"])
    wild = np.random.default_rng(0).choice(
        np.array([-(2**31), -7, -1, 0, 3, R - 1, R, R + 5, 2**31 - 1], np.int32), size=(PLAIN.T, PLAIN.k)
    )
    for first, end in ((-9, 10**6), (0, R), (5, R + 1), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31)), (20, 10)):
        lo = np.clip(first, 0, R)
        hi = np.clip(end, lo, R)
        given, clipped = (
            {
                "routing": dataclasses.replace(
                    case["routing"], row_positions=put(wild), group_offsets=jnp.array(offsets, jnp.int32)
                )
            }
            for offsets in ([first, 7, 7, 11, 12, 12, end], [lo, 7, 7, 11, 12, 12, hi])
        )
        got = compiled(run, PLAIN)(case | given | {"rows": rows, "drows": rows})
        want = compiled("reference", PLAIN)(case | clipped | {"rows": rows})
        assert_close(got["out"], want["out"], "float32", "out")
        assert_close(got["dweights"], want["dweights"], "float32", "dweights")
        kept = (wild >= lo) & (wild < hi)
        summed = np.where(kept[:, :, None], np.asarray(rows)[np.clip(wild, 0, R - 1)], 0).sum(1)
        assert_close(got["dx"], summed, "float32", "dx")


@pytest.mark.parametrize("run", RUNS)
def test_wild_indices(run):
    """The rows may be wrong, but there are some: nothing raises, and what lies outside is zero."""
    case = make_case(SHARD)
    indices = put(
        np.random.default_rng(0).choice(np.array([-(2**31), -1, 0, 2**31 - 1], np.int32), size=SHARD.T * SHARD.k)
    )
    got = compiled(run, SHARD)(case | {"routing": dataclasses.replace(case["routing"], row_indices=indices)})
    assert np.isfinite(np.asarray(got["rows"])).all()
    assert np.isfinite(np.asarray(got["drows"])).all()


def test_the_portable_backend_adds_without_scatter():
    """Whose order is anyone's on a GPU."""
    assert "scatter-add" not in str(jax.make_jaxpr(compiled("xla", SHARD))(make_case(SHARD)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "D", "k"), [(600, 2048, 8), (301, 2880, 4), (101, 16384, 2), (77, 65, 11), (5000, 96, 1)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heuristic_plans(T, D, k, dtype):
    """On the GPU, with the plans that users get."""
    variant = Variant(T=T, D=D, k=k, E=16, dtype=dtype, capacity=T * k // 16, first=1)
    case = make_case(variant)
    routing = case["routing"]

    def run(backend):
        def both(x, rows, weights):
            routed = dataclasses.replace(routing, weights=weights)
            return jaxops.permute(x, routed, backend=backend), jaxops.combine(rows, routed, backend=backend)

        out, vjp = jax.vjp(both, case["x"], case["rows"], routing.weights)
        return *out, *vjp((case["drows"], case["dout"]))

    for got, want in zip(jax.jit(lambda: run("pallas"))(), jax.jit(lambda: run("xla"))(), strict=True):
        assert_close(got, want, got.dtype.name)
