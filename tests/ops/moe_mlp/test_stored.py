"""The experts with weights stored in FP8 and rows that are not quantized."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import fp8_matmul, moe_mlp, permute
from jaxops.ops.moe_mlp import Plan, Problem
from tests.arrays import put
from tests.compare import assert_close
from tests.hopper import lower_for_h200
from tests.ops.moe_mlp.cases import SHARD, Variant, check_zeros, make_case, want_of
from tests.ops.permute.cases import TILE

WEIGHTS = ("w_gate", "w_up", "w_down")
TILES = fp8_matmul.Tiles("pallas", 16, 16)
# The gradient is that of fp8_grouped_matmul.
PRODUCTS = fp8_matmul.Plan("pallas", TILES, *(2 * [fp8_matmul.Tiles("xla")]))
SWAPPED = fp8_matmul.Tiles("pallas", 8, 64, 4, 2, split=2, swap=True)
ROWS = permute.Plan("pallas", *(3 * [TILE]))
AROUND = fp8_matmul.Plan("xla")
PLANS = {
    "xla": Plan("xla"),
    "gathered": Plan("pallas", PRODUCTS, AROUND, ROWS, gather=True),
    "copied": Plan("pallas", PRODUCTS, AROUND, ROWS, gather=False),
    "swapped": Plan("pallas", dataclasses.replace(PRODUCTS, fwd=SWAPPED), AROUND, permute.Plan("xla"), gather=True),
    "own": Plan("pallas"),
    "gpu": Plan("pallas"),
    "gpu-gathered": Plan("pallas", gather=True),
    "gpu-copied": Plan("pallas", gather=False),
}
SPLIT = ["swapped", "own", pytest.param("gpu", marks=pytest.mark.gpu)]  # sums
RUNS = ["xla", "gathered", *SPLIT]
# Other tiles of the forward's kernel; no gradient is theirs.
FORWARD_ALONE = ("swapped", "copied", "gpu-gathered", "gpu-copied")
# Sums and columns of several blocks; neither is a multiple of a tile.
WIDE = Variant(T=9, D=150, F=140, N=24, k=2, E=4, dtype="bfloat16", activation="gelu_tanh")
VARIANTS = {
    "shard": dataclasses.replace(SHARD, dtype="bfloat16", out_dtype="float32"),
    "wide": WIDE,
    "one-token": Variant(T=1, D=9, F=5, N=6, k=2, E=16, dtype="float16"),
}
LONG = Variant(T=3, D=1100, F=70, N=24, k=2, E=4, dtype="bfloat16")


@jax.jit
def as_stored(weights: dict) -> tuple[dict, dict]:
    kept = {name: jaxops.quantize(w, scaling="block_128x128", layouts="both") for name, w in weights.items()}
    return kept, {name: jaxops.dequantize(q).astype(jnp.float32) for name, q in kept.items()}


def stored_case(variant: Variant, seed: int = 0) -> tuple[dict, dict]:
    """The case, and the same with weights as they are in FP8."""
    case = make_case(variant, seed)
    kept, whole = as_stored({name: case[name] for name in WEIGHTS})
    columns = {name: dataclasses.replace(q, values=None, scales=None) for name, q in kept.items()}
    return case | columns, case | whole


def everything(variant: Variant, run: str, case: dict) -> dict:
    """The result and the gradients that there are, by name."""

    def mlp(x, weights):
        how = {"activation": variant.activation, "out_dtype": variant.out_dtype, "plan": PLANS[run]}
        routing = dataclasses.replace(case["routing"], weights=weights)
        return jaxops.moe_mlp(x, *(case[name] for name in WEIGHTS), routing, **how)

    # Of these tiles one gradient each: they are those of fp8_grouped_matmul.
    if run in FORWARD_ALONE or (run in ("own", "gathered") and variant != VARIANTS["shard"]):
        return {"out": mlp(case["x"], case["routing"].weights)}
    out, vjp = jax.vjp(mlp, case["x"], case["routing"].weights)
    return dict(zip(("out", "dx", "dweights"), (out, *vjp(case["dout"].astype(out.dtype))), strict=True))


@functools.cache
def compiled(variant: Variant, run: str):
    return jax.jit(functools.partial(everything, variant, run))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_values(variant, run):
    """Against float32, with the numbers that the weights have in FP8."""
    case, whole = stored_case(variant)
    got, want = compiled(variant, run)(case), want_of(whole, variant)
    dtypes = {"out": variant.out_dtype or variant.dtype, "dx": variant.dtype, "dweights": "float32"}
    for name in got:
        assert got[name].dtype == dtypes[name]
        assert_close(got[name], want[name], variant.dtype, name, scale=2, roundings=4)
    check_zeros(got, case["routing"])


@pytest.mark.parametrize("run", SPLIT)
def test_long_sums(run):
    test_values(LONG, run)


@pytest.mark.parametrize("run", ["", pytest.param("gpu-", marks=pytest.mark.gpu)])
def test_gathered_and_copied_rows_give_the_same_bits(run):
    case, _ = stored_case(WIDE)
    one, other = (compiled(WIDE, f"{run}{rows}")(case)["out"] for rows in ("gathered", "copied"))
    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("run", RUNS[1:])
def test_wild_indices_and_offsets(run):
    case, _ = stored_case(VARIANTS["shard"])
    R = SHARD.T * SHARD.k
    indices = np.random.default_rng(0).choice(np.array([-(2**31), -1, 0, SHARD.T, 2**31 - 1], np.int32), size=R)
    for first, end in ((-9, 10**6), (2**31 - 1, -(2**31)), (20, 10)):
        routing = dataclasses.replace(
            case["routing"], group_offsets=jnp.array([first, 7, 7, 11, end], jnp.int32), row_indices=put(indices)
        )
        got = jax.block_until_ready(compiled(VARIANTS["shard"], run)(case | {"routing": routing}))
        assert got["out"].shape == (SHARD.T, SHARD.N)


H200, A100, CPU = Device("NVIDIA H200", "gpu"), Device("NVIDIA A100-SXM4-80GB", "gpu"), Device("cpu", "cpu")
DECODE = Problem(4, 8, 128, 2048, 768, 2048, "bfloat16", "blockwise", stored=True)


def test_plan():
    """One kernel for few rows, with tiles of 16; split sums for one token."""
    for device in (H200, Device("NVIDIA L4", "gpu")):
        for problem in (DECODE, dataclasses.replace(DECODE, T=256), dataclasses.replace(DECODE, T=1, F=13)):
            plan = moe_mlp.make_plan(problem, device)
            tiles = plan.unit.fwd
            assert (plan.backend, plan.gather, tiles.bm, tiles.swap) == ("pallas", True, 16, False)
            step = 128 * (2 * tiles.bm + 2 * tiles.bn)  # bytes: rows in a half precision, two weights
            assert 2 * tiles.stages * step <= device.shared_bytes or tiles.stages == 2
    parts = {T: moe_mlp.make_plan(dataclasses.replace(DECODE, T=T), H200).unit.fwd.split for T in (1, 2, 4, 256)}
    assert parts == {1: 4, 2: 2, 4: 1, 256: 1}
    for T, bm in ((64, 16), (2048, 64)):
        gathered = moe_mlp.make_plan(dataclasses.replace(DECODE, T=T), H200, plan=Plan("pallas", gather=True))
        assert gathered.unit.fwd.bm == bm
    many = moe_mlp.make_plan(dataclasses.replace(DECODE, T=257), H200)
    assert (many.gather, many.unit.fwd.bn) == (False, many.down.fwd.bn)
    assert moe_mlp.make_plan(DECODE, H200, plan=PLANS["gathered"]).unit.fwd == TILES
    assert (moe_mlp.make_plan(DECODE, CPU).backend, moe_mlp.make_plan(DECODE, A100).backend) == ("xla", "xla")


def test_a_call_is_these_kernels():
    def call(x, logits, *arrays):
        experts = [jaxops.Quantized.from_deepseek(*arrays[i : i + 2]) for i in (0, 2, 4)]
        return jaxops.moe_mlp(x, *experts, jaxops.route(logits, 2, backend="xla"))

    s, unit, down = jax.ShapeDtypeStruct, (4, 96, 64), (4, 32, 96)
    weights = [x for shape in (unit, unit, down) for x in (s(shape, "float8_e4m3fn"), s((4, 1, 1), "float32"))]
    for T, kernels in ((32, ["moe_mlp_stored_unit"]), (33, ["permute", "fp8_matmul_rows", "fp8_matmul_rows"])):
        text = lower_for_h200(call, s((T, 64), "bfloat16"), s((T, 4), "float32"), *weights)
        names = re.findall(r'name = "((?:permute|moe_mlp|fp8|combine)\w*)"', text)
        assert sorted(names) == sorted([*kernels, "fp8_matmul_rows", "combine"])
