"""Plans of the ops over rows: their tiles and backends, what a tuned row is found by, and the kernels that calls are,
lowered for an H200. tests/_lib/test_plans.py has what all plans have in common."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops import Routing
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.described import descriptions
from jaxops.ops import adaln, cached_attention, packed_attention, permute, route
from jaxops.ops.cached_attention import plan as cached_plan
from jaxops.ops.packed_attention import plan as packed_plan
from tests.arrays import f32, i32, shape
from tests.hopper import costs_of, lower_for_h200, on_h200
from tests.plans import choices

pytestmark = pytest.mark.versions

H100, H200 = Device("NVIDIA H100 80GB HBM3", "gpu"), Device("NVIDIA H200", "gpu")
SHARED = {"NVIDIA H200": 232_448, "NVIDIA A100-SXM4-80GB": 166_912, "NVIDIA L4": 101_376}  # bytes of a block
ADALN = adaln.Problem(1000, 1152, 8, "bfloat16")
PACKED = packed_attention.Problem(16384, 16384, 24, 8, 128, "bfloat16", "causal")
CACHED = cached_attention.Problem(16, 32, 4, 1152, 128, "bfloat16")
PLANNERS = {name: described.tuning.planner for name, described in descriptions().items() if described.tuning}


# Tiles


def columns(tiles: Any, D: int) -> int:
    return -(-D // tiles.block) * tiles.block


# (pass, problem, device, tiles) -> whether a kernel can have them. adaln holds a row in registers: less than twice its
# columns. route has at most 64 scores a thread; permute 1 to 16 loads of 16 bytes, of columns most of which are there.
LEGAL: dict[str, Callable[[str, Any, Device, Any], bool]] = {
    "adaln": lambda name, p, device, tiles: tiles.block <= max(32, 2 * p.D)
    and columns(tiles, p.D) < max(64, p.D + tiles.block),
    "route": lambda name, p, device, tiles: tiles.step * power_of_2(p.E) <= 64 * 32 * tiles.warps,
    "permute": lambda name, p, device, tiles: (loads := tiles.rows * tiles.block / (32 * tiles.warps * p.lane)) >= 1
    and loads * tiles.choices <= 16 and (columns(tiles, p.D) < 2 * p.D or p.D < 256),
    "packed_attention": lambda name, p, device, tiles: packed_plan.shared_bytes(name, tiles, p) <= SHARED[device.kind],
    "cached_attention": lambda name, p, device, tiles: cached_plan.shared_bytes(tiles, p) <= SHARED[device.kind],
}  # fmt: skip


def problems() -> Iterator[tuple[str, Any, Device]]:
    for T, D, B in itertools.product((0, 700, 1 << 20), (1, 37, 64, 1000, 1024, 2432, 16384, 40_000), (0, 5000)):
        for dtype, gated in (("bfloat16", True), ("float32", False)):
            yield "adaln", adaln.Problem(T, D, B, dtype, gated), H200
    for T, E in itertools.product((0, 1, 4096, 32768, 1 << 20), (1, 3, 8, 60, 128, 160, 256, 1000, 5000)):
        yield "route", route.Problem(T, E), H200
    for D, k in itertools.product((1, 7, 64, 768, 2048, 2880, 7168, 16384), (1, 2, 6, 8, 70)):
        yield "permute", permute.Problem(4096, D, k, "bfloat16"), H200
        yield "permute", permute.Problem(4096, D, k, "float32"), H200
    for H, dtype, kind in itertools.product((1, 24, 64, 80, 128, 192, 256), ("bfloat16", "float32"), SHARED):
        change, device = {"head_dim": H, "dtype": dtype}, Device(kind, "gpu")
        yield "packed_attention", dataclasses.replace(PACKED, **change), device
        yield "cached_attention", dataclasses.replace(CACHED, **change), device


@pytest.mark.parametrize("op", LEGAL)
def test_heuristic_and_candidates_are_legal(op):
    """Tiles raise for what no kernel supports. The heuristic's come first, and none twice."""
    planner = PLANNERS[op]
    for name, problem, device in problems():
        for each in planner.passes if name == op else ():
            found = planner.candidates(each, problem, device)
            plan = planner.make_plan(problem, device, backend="pallas")
            assert found[0] == getattr(plan, each)
            assert len(set(found)) == len(found)
            assert all(LEGAL[op](each, problem, device, tiles) for tiles in found), (each, problem)


def test_programs_of_a_route():
    """Few programs count tokens. With groups several warps would spill the registers that these take."""
    for T, E in itertools.product((0, 1, 4096, 32768, 1 << 20), (1, 8, 160, 5000)):
        assert -(-T // route.make_plan(route.Problem(T, E), H200).fwd.rows) <= max(1056, T // 64)
    assert route.make_plan(route.Problem(16, 256), H200).fwd == route.Tiles(16, 16, 8)
    assert route.make_plan(route.Problem(16, 256, groups=8), H200).fwd == route.Tiles(2, 2)


# Rows a program of adaln: one wave of the 132 multiprocessors, measured faster than two and four.
MEASURED = [
    ("bwd", H200, (9001, 6144, 300), 69), ("bwd", H200, (6751, 8192, 225), 52), ("bwd", H200, (54_007, 1024, 1800), 69),
    ("bwd", dataclasses.replace(H200, cores=66), (9001, 6144, 300), 137), ("bwd", H200, (1000, 3072, 7), 16),
    ("fwd", H200, (9001, 6144, 300), 35), ("fwd", H200, (6751, 8192, 225), 52), ("fwd", H100, (1000, 3072, 7), 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "device", "sizes", "rows"), MEASURED)
def test_rows_a_program(name, device, sizes, rows):
    """Whatever the sequences are."""
    for T, D, B in (sizes, (*sizes[:2], 1)):
        assert getattr(adaln.make_plan(adaln.Problem(T, D, B, "bfloat16"), device), name).rows == rows


SHIPPED = list(tuned_rows("adaln", H200))


def test_tiles_of_rows():
    """Mostly 16 columns a thread. Backward: with a gate 12, and wide rows are not loaded ahead; without it up to 32."""
    tiles = lambda name, D, gated=False: dataclasses.replace(
        getattr(adaln.make_plan(adaln.Problem(65_536, D, 7, "bfloat16", gated), H100), name), rows=8
    )
    Tiles = adaln.Tiles
    assert (tiles("fwd", 64), tiles("fwd", 1024)) == (Tiles(8, 8, 64, 1, True), Tiles(8, 1, 1024, 1, True))
    assert (tiles("fwd", 2432), tiles("fwd", 2432, True)) == (Tiles(8, 1, 512, 4, True), Tiles(8, 1, 512, 8, True))
    assert (tiles("fwd", 6144), tiles("bwd", 6144)) == (Tiles(8, 1, 2048, 16, True), Tiles(8, 1, 1024, 8, True))
    assert (tiles("fwd", 8192), tiles("bwd", 8192)) == (Tiles(8, 2, 4096, 16, True), Tiles(8, 1, 1024, 8, True))
    assert (tiles("bwd", 3072), tiles("bwd", 4096)) == (Tiles(8, 1, 1024, 8, True), Tiles(8, 1, 1024, 4, True))
    assert (tiles("bwd", 1024), tiles("bwd", 1024, True)) == (Tiles(8, 1, 1024, 2, True), Tiles(8, 1, 1024, 4, True))
    assert tiles("bwd", 6144, True) == Tiles(8, 1, 2048, 16)


def test_rows_of_a_tuned_plan():
    """One wave of them too, in whole steps; an explicit one is obeyed."""
    wide, explicit = adaln.Problem(65536, 1024, 4, "bfloat16"), adaln.Tiles(64, 2, 512, 4)
    tuned = {"op": "adaln", "pass": "bwd", **vars(wide), "tiles": vars(dataclasses.replace(explicit, ahead=True))}
    make_plan = lambda T, **given: adaln.make_plan(dataclasses.replace(wide, T=T), H200, [tuned], **given).bwd
    assert [make_plan(T).rows for T in (65536, 32768, 16384, 4096, 1)] == [166, 84, 42, 16, 16]
    assert make_plan(1, plan=adaln.Plan("pallas", bwd=explicit)) == explicit


def test_statistics_are_saved_where_it_pays():
    """Measured: docs/notes/2026-11-28_tiles_of_row_ops.md."""
    saved = [
        adaln.make_plan(dataclasses.replace(ADALN, D=D, gated=gated), H200).save_stats
        for D, gated in itertools.product((4096, 5120, 6144), (False, True))
    ]
    assert saved == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("rows", "kv_heads", "S", "tiles"),
    [(16, 4, 1152, (4, 64)), (1, 4, 1152, (16, 32)), (64, 4, 1152, (1, 64)), (1, 4, 32_768, (64, 32)),
     (1, 1, 32_768, (128, 32)), (1, 1, 63, (1, 64))],
)  # fmt: skip
def test_how_a_row_of_a_cache_is_split(rows, kv_heads, S, tiles):
    """Two programs for each of 132 multiprocessors where the rows are few, never parts of less than 64 tokens."""
    problem = cached_attention.Problem(rows, 8 * kv_heads, kv_heads, S, 128, "bfloat16")
    assert cached_attention.make_plan(problem, H200).fwd == cached_attention.Tiles(*tiles)


@pytest.mark.parametrize(
    ("name", "tiles", "found"),
    [("fwd", (128, 64, 8, 3), 131_072), ("fwd", (128, 128, 8, 2), 163_840), ("dq", (128, 64, 8, 3), 163_840),
     ("dkv", (64, 64, 8, 2), 99_328), ("dkv", (128, 64, 8, 3), 233_472)],
)  # fmt: skip
def test_shared_memory(name, tiles, found):
    """At least what Triton 3.9 gave the compiled kernels for sm_90 (2026-11-24; causal, 16 and 2 heads of 128), and at
    most 8 % more."""
    assert found <= packed_plan.shared_bytes(name, packed_attention.Tiles(*tiles), PACKED) <= 1.08 * found


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "found"),
    [(8, 256, "bfloat16", 141_312), (8, 256, "float32", 282_624), (8, 512, "bfloat16", 280_576),
     (64, 256, "bfloat16", 229_376), (128, 128, "bfloat16", 131_072), (8, 128, "bfloat16", 71_680)],
)  # fmt: skip
def test_shared_memory_of_a_cache(group, head_dim, dtype, found):
    """At least what Triton 3.9 gave the kernel compiled for sm_90, with blocks of 64 in 3 stages (2026-11-25)."""
    problem = cached_attention.Problem(64, 4 * group, 4, 1152, head_dim, dtype)
    assert found <= cached_plan.shared_bytes(cached_attention.Tiles(1, 64), problem) <= 1.3 * found


# Keys of tuned rows


# What differs from a tuned row's problem, and whether the row is found all the same.
KEYS = [
    ("adaln", ADALN, {"dtype": "float32"}, False), ("adaln", ADALN, {"D": 1153}, False),
    ("adaln", ADALN, {"gated": True}, False), ("adaln", ADALN, {"T": 70_000, "B": 9}, True),
    ("packed_attention", PACKED, {"T": 9000, "cross": True}, True), ("packed_attention", PACKED, {"heads": 16}, False),
    ("packed_attention", PACKED, {"mask": "rows"}, False), ("cached_attention", CACHED, {"S": 4096}, False),
    ("cached_attention", CACHED, {"S": 1999}, True), ("route", route.Problem(4096, 64), {"T": 3000}, True),
    ("route", route.Problem(4096, 64), {"E": 65}, False), ("route", route.Problem(4096, 64), {"T": 4097}, False),
    ("permute", permute.Problem(9, 64, 8, "bfloat16"), {"T": 1, "k": 5}, True),
    ("permute", permute.Problem(9, 64, 8, "bfloat16"), {"k": 9}, False),
]  # fmt: skip


@pytest.mark.parametrize(("op", "problem", "change", "found"), KEYS, ids=str)
def test_what_a_tuned_row_is_found_by(op, problem, change, found):
    """By tiles that no heuristic chooses."""
    planner, name = PLANNERS[op], PLANNERS[op].passes[0]
    rare = next(tiles for tiles in reversed(planner.candidates(name, problem, H200)))
    row = {"op": op, "pass": name, **vars(problem), "tiles": vars(rare)}
    other = dataclasses.replace(problem, **change)
    plans = [planner.make_plan(other, H200, rows, backend="pallas") for rows in ((), [row])]
    assert (getattr(plans[1], name) != getattr(plans[0], name)) == found


def test_no_two_shipped_rows_have_one_key():
    """The second would never be found."""
    assert len({PLANNERS["adaln"].row_key(row) for row in SHIPPED}) == len(SHIPPED)


@pytest.mark.parametrize("row", SHIPPED, ids=lambda row: "-".join(str(x) for x in PLANNERS["adaln"].row_key(row)))
def test_shipped_row(row):
    """It names its device, is found at its own width, and is a candidate (and so lowered below)."""
    assert row["device"] == H200.kind
    problem = adaln.Problem(65536, row["D"], 64, row["dtype"], row["gated"])
    plan = adaln.make_plan(problem, H200, SHIPPED)
    found = getattr(plan, row["pass"])
    assert found == dataclasses.replace(adaln.Tiles(**row["tiles"]), rows=found.rows)
    assert found in adaln.candidates(row["pass"], problem, H200)


# Backends of attention


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ({}, "cudnn"), ({"mask": "whole"}, "cudnn"), ({"mask": "rows"}, "pallas"), ({"cross": True}, "pallas"),
        ({"sinks": True}, "pallas"), ({"soft_cap": True}, "pallas"), ({"value_dim": 64}, "pallas"),
        ({"cross": True, "head_dim": 264}, "xla"), ({"dtype": "float32"}, "xla"),
        ({"head_dim": 264, "mask": "rows"}, "xla"), ({"head_dim": 12}, "xla"), ({"head_dim": 136}, "xla"),
        ({"head_dim": 8, "dtype": "float16", "mask": "whole"}, "cudnn"),
    ],
    ids=str,
)  # fmt: skip
def test_what_attention_takes_on_a_gpu(change, backend):
    """On one that has no Hopper kernels."""
    Plan, problem, device = packed_attention.Plan, dataclasses.replace(PACKED, **change), Device("NVIDIA A100", "gpu")
    plan = packed_attention.make_plan(problem, device)
    assert (plan.backend, plan.block) == (backend, 512 if backend == "xla" else None)
    assert choices(packed_attention.make_plan(problem, Device("cpu", "cpu"))) == Plan("xla", block=64)
    assert packed_attention.make_plan(problem, device, plan=Plan("xla", block=7)).block == 7
    if backend != "cudnn":
        with pytest.raises(NotImplementedError, match=r"backend='cudnn' cannot run this: it.*Use backend='auto'"):
            packed_attention.make_plan(problem, device, backend="cudnn")


def test_heads_that_do_not_fit_take_xla():
    device = Device("NVIDIA L4", "gpu")
    for more, message in (
        ({"head_dim": 257}, "head_dim of at most 256, not 257"), ({"heads": 512}, "128 queries of a key head"),
    ):  # fmt: skip
        problem = dataclasses.replace(CACHED, dtype="float32", **more)
        assert cached_attention.make_plan(problem, device).backend == "xla"
        with pytest.raises(NotImplementedError, match=message):
            cached_attention.make_plan(problem, device, backend="pallas")


# Calls, lowered


def floats(tree: Any) -> list:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def lowered(call: Callable, *operands: Any, wrt: int) -> str:
    """The StableHLO of a call, and of its gradients in the first `wrt` operands."""

    def both(operands, cotangents):
        def smooth(*held):
            results = call(*held, *operands[wrt:])
            return floats(results), results

        _, vjp, results = jax.vjp(smooth, *operands[:wrt], has_aux=True)
        return results, vjp(cotangents) if wrt else ()

    return lower_for_h200(both, operands, floats(jax.eval_shape(call, *operands)))


def kernels_of(text: str) -> list[str]:
    """The kernels' names in order; the program has nothing else but reshapes: no copy, gather or cast of an operand."""
    names, operations = re.findall(r'name = "(\w+)", num_stages', text), re.findall(r"= \"?stablehlo\.(\w+)", text)
    assert set(operations) <= {"custom_call", "reshape"}, operations
    assert text.count("__gpu$xla.gpu.triton") == len(names)
    return names


def routed(T: int, E: int, k: int, dtype: str = "bfloat16", bias: bool = False, mask: bool = False, **options: Any):
    operands = shape(T, E, dtype=dtype), f32(E) if bias else None, shape(T, dtype="bool") if mask else None
    call = lambda logits, bias, mask: jaxops.route(logits, k, selection_bias=bias, mask=mask, **options)
    return call, *operands


DSV3 = {"score": "sigmoid", "expert_groups": 8, "top_expert_groups": 4}
ONE, SEVERAL = ["route_fwd"], ["route_choose", "route_count", "route_place"]
ROUTES = {
    "mixtral": (routed(4096, 8, 2), SEVERAL),
    "qwen3": (routed(32768, 128, 8, "float32"), SEVERAL),
    "dsv3": (routed(32768, 256, 8, bias=True, weight_scale=2.5, **DSV3), SEVERAL),
    "dsv2": (routed(1000, 160, 6, expert_groups=8, top_expert_groups=3, normalize=False), SEVERAL),
    "odd": (routed(77, 130, 3, "float16", capacity=9, expert_groups=13, top_expert_groups=2), SEVERAL),
    "one": (routed(1, 1, 1, capacity=1), ONE),
    "masked": (routed(8192, 160, 6, mask=True, **DSV3), SEVERAL),
    "masked-decode": (routed(32, 128, 8, mask=True), ONE),
    "all": (routed(33, 70, 70), SEVERAL),
    "many": (routed(500, 3000, 4, bias=True), SEVERAL),
    "decode": (routed(32, 128, 8, "float32"), ONE),
    "decode-dsv3": (routed(2, 256, 8, **DSV3), ONE),
}


@pytest.mark.parametrize(("call", "forward"), ROUTES.values(), ids=ROUTES)
def test_kernels_of_a_route(call, forward):
    """A single tile of tokens, as of a decode step, is one launch."""
    assert kernels_of(lowered(*call, wrt=1)) == [*forward, "route_bwd"]


def test_one_tile_waits_for_its_own_stores():
    """No other test would see the race: Pallas' interpreter has no threads."""
    with on_h200():
        program = jax.make_jaxpr(lambda logits: jaxops.route(logits, 2))(f32(16, 8))
    assert str(program).count("debug_barrier") == 1


def permuted(T: int, D: int, k: int, dtype: str = "bfloat16", plan: Any = None, **options: Any):
    def both(x, rows, weights, positions, indices, offsets):
        routing = Routing(weights, positions, indices, positions, offsets, offsets, *weights[0, :1], *weights[0, :1])
        return jaxops.permute(x, routing, plan=plan), jaxops.combine(rows, routing, plan=plan, **options)

    rows = shape(T, D, dtype=dtype), shape(T * k, D, dtype=dtype)
    return both, *rows, f32(T, k), i32(T, k), i32(T * k), i32(9)


PERMUTED = {
    "qwen3": permuted(32768, 2048, 8),
    "mixtral": permuted(16384, 4096, 2, out_dtype="float32"),
    "dsv3": permuted(131072, 7168, 8),  # rows of more than 2^32 bytes: 64-bit addresses
    "odd": permuted(77, 131, 5, "float16"),
    "many-choices": permuted(33, 24, 70),
    "wide": permuted(64, 16384, 1),
}


@pytest.mark.parametrize("call", PERMUTED.values(), ids=PERMUTED)
def test_kernels_of_a_permutation(call):
    names = re.findall(r'name = "(\w+)", num_stages', lowered(*call, wrt=3))
    assert sorted(names) == ["combine", "combine_bwd", "permute", "permute_bwd"]


def modulated(op: str, rows: int, modulation: int, D: int = 1000, dtype: str = "bfloat16", *, per_row: bool = False,
              plan: Any = None, **options: Any):  # fmt: skip
    T, B = 512, 5
    vectors = [shape(T if per_row else B, D, dtype=options.pop("vectors", dtype))] * modulation
    weights = [f32(D)] * options.pop("weights", 0)

    def call(*operands):
        *given, offsets = operands
        affine = dict(zip(("weight", "bias"), given[rows + modulation :], strict=False))
        per, given = "row" if per_row else "sequence", given[: rows + modulation]
        return getattr(jaxops, op)(*given, offsets, per=per, plan=plan, **affine, **options)

    return call, *[shape(T, D, dtype=dtype)] * rows, *vectors, *weights, i32(B + 1)


NORM, GATE, BOTH = ("adaln", 1, 2), ("gated_residual", 2, 1), ("gated_residual_adaln", 2, 3)
SAVED = adaln.Plan(save_stats=True)
RESIDUAL = ["gated_residual_fwd", "gated_residual_bwd", "adaln_sums"]
ADALNS = {
    "adaln": (modulated(*NORM), 3), "saved": (modulated(*NORM, vectors="float32", plan=SAVED), 3),
    "rows": (modulated(*NORM, per_row=True, activation="gelu"), 2), "residual": (modulated(*GATE), RESIDUAL),
    "residual-rows": (modulated(*GATE, per_row=True), RESIDUAL[:2]),
    "both": (modulated(*BOTH, norm="rms", activation="silu", plan=SAVED), 3),
    **{f"{D}-{dtype}": (modulated(*BOTH, D, dtype, activation="gelu"), 3) for D, dtype in (
        (64, "bfloat16"), (3072, "bfloat16"), (16384, "bfloat16"), (1000, "float32"), (129, "float16"))},
}  # fmt: skip


@pytest.mark.parametrize(("call", "names"), ADALNS.values(), ids=ADALNS)
def test_kernels_of_an_adaln(call, names):
    """One forward; the backward and, with a vector a sequence, the sums."""
    names = ["adaln_fwd", "adaln_bwd", "adaln_sums"][:names] if isinstance(names, int) else names
    assert kernels_of(lowered(*call, wrt=len(call) - 2)) == names


def test_a_learned_affine_costs_one_sum_over_sequences():
    call = modulated(*NORM, weights=2)
    text = lowered(*call, wrt=len(call) - 2)
    assert text.count("__gpu$xla.gpu.triton") == 3
    assert not re.search(r"stablehlo\.(transpose|gather|scatter|dot|dot_general|while|sort|concatenate|pad)\b", text)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("D", [64, 1000, 4096])
def test_results_in_fp8_are_one_kernel(D, dtype):
    assert kernels_of(lowered(*modulated(*NORM, D, out_dtype=dtype), wrt=0)) == ["adaln_fwd"]


def attended(mask: str, plan: Any, H: int = 64, dtype: str = "bfloat16", S: int = 1000, cross: bool = False):
    def call(q, k, v, offsets, until):
        how: dict[str, Any] = {"whole": {}, "until": {"visible_until": until}}.get(mask, {"causal": True})
        how |= ({"window": 100} if mask == "window" else {}) | ({"kv_offsets": offsets} if cross else {})
        return jaxops.packed_attention(q, k, v, offsets, plan=plan, **how)

    keys = shape(S, 2, H, dtype=dtype)
    return call, shape(1000, 4, H, dtype=dtype), keys, keys, i32(6), i32(1000)


PALLAS = packed_attention.Plan("pallas")
NAMES = [f"packed_attention_{name}" for name in ("fwd", "dq", "dkv")]
ATTENDED = {
    "whole": attended("whole", PALLAS), "causal": attended("causal", PALLAS),
    "window": attended("window", PALLAS), "until": attended("until", PALLAS),
    "cross": attended("whole", PALLAS, S=1100, cross=True),
    "cross-window": attended("window", PALLAS, S=1100, cross=True),
    **{f"{H}-{dtype}": attended("until", PALLAS, H, dtype) for H, dtype in (
        (1, "bfloat16"), (80, "float16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32"))},
}  # fmt: skip


@pytest.mark.parametrize("call", ATTENDED.values(), ids=ATTENDED)
def test_kernels_of_an_attention(call):
    assert re.findall(r'"(packed_attention_\w+)"', lowered(*call, wrt=3)) == NAMES


def test_costs_of_attention():
    """T 1000 rows of 4 heads of 64, keys of 2: 512,000 bytes of q, 256,000 of k; runs 8,000 bytes and 16 of what is
    inside. A causal row sees half of the rows, a window of 100 at most 101; a product is 2 * pairs * 4 * 64."""
    product, rows, keys, runs, sums = 2 * 4 * 64, 512_000, 256_000, 8_000 + 16, 16_000
    for mask, pairs in (("whole", 1_000_000), ("causal", 500_500), ("window", 101_000), ("until", 1_000_000)):
        blocks = 2 * -(-1000 // 64) * 4  # of dkv's list
        assert costs_of(lowered(*attended(mask, PALLAS), wrt=3)) == [
            (NAMES[0], 2 * product * pairs, 2 * rows + 2 * keys + runs + sums),
            (NAMES[1], 3 * product * pairs, 3 * rows + 2 * keys + runs + 2 * sums),
            (NAMES[2], 4 * product * pairs, 2 * rows + 4 * keys + runs + 2 * sums + blocks),
        ]


def test_no_mask_of_all_pairs():
    """On a CPU neither forward nor backward of attention holds T * S of anything."""
    rows = 4096
    x, loss = f32(rows, 1, 8), lambda *x: jnp.sum(jaxops.packed_attention(*x, backend="xla"))
    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, i32(3)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * rows / 4


# Some tiles of each op, one after another: (problem, call of a plan, how many operands have gradients, every n-th).
TILES = {
    "adaln": (adaln.Problem(512, 3072, 5, "bfloat16"), lambda plan: modulated(*NORM, 3072, plan=plan), 3, 3),
    "route": (route.Problem(4096, 64), lambda plan: routed(4096, 64, 2, plan=plan), 1, 9),
    "permute": (permute.Problem(4096, 96, 8, "bfloat16"), lambda plan: permuted(4096, 96, 8, plan=plan), 3, 40),
    "packed_attention": (dataclasses.replace(PACKED, T=1000, S=1000, heads=4, kv_heads=2, head_dim=64),
                         functools.partial(attended, "until"), 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("op", TILES)
def test_candidates_lower_for_an_h200(op):
    problem, call, wrt, every = TILES[op]
    planner, Plan = PLANNERS[op], PLANNERS[op].plan
    found = {name: planner.candidates(name, problem, H200) for name in planner.passes}
    for i in range(0, max(map(len, found.values())), every):
        plan = Plan("pallas", **{name: tiles[i % len(tiles)] for name, tiles in found.items()})
        assert lowered(*call(plan), wrt=wrt).count("__gpu$xla.gpu.triton") >= 3
