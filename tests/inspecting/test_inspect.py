"""`jaxops.inspect` over the list of ops, and what it shows: compared with numbers that are known otherwise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import jaxops
from jaxops._lib.planning.device import Device, current_device
from jaxops._lib.planning.recorded import watch
from jaxops._lib.planning.tuned import read_rows, store_rows
from jaxops.inspecting import Inspection, SideBySide, programs
from jaxops.inspecting.choices import choices_of
from jaxops.inspecting.programs import Kernel, Setting, compiled, least_us, measured, work_of
from jaxops.inspecting.ragged import Ragged, split
from jaxops.inspecting.references import COLLECTIVES, ENTRIES
from jaxops.inspecting.values import errors_of
from jaxops.ops import adaln, grouped_matmul, moe_mlp
from jaxops.ops.grouped_matmul import product
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from jaxops.profiling.machine import Ceilings
from tests.compare import LIMITS
from tests.contracts.ops import NO_OPS, OPS
from tests.contracts.run import small

BY_NAME = {op.name: op for op in OPS if not op.sharded}
# Errors over the RMS of the reference: of FP8's rounding (e4m3 has 3 mantissa bits), of float32's elsewhere.
H200 = Device("NVIDIA H200", "gpu")
FP8_LIMITS = 0.5, 0.05


class _Stop(Exception):
    pass


def call_of(name: str, way: str, arguments: dict | None = None) -> tuple:
    """(op, arguments, options) of what the list's entry calls."""
    op, seen = BY_NAME[name], []

    def stop(*args, **how):
        seen.append((args, how))
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        original = getattr(jaxops, name)
        patch.setattr(jaxops, name, stop)
        with pytest.raises(_Stop):
            op.call(small(op) if arguments is None else arguments, **op.ways[way])
    return original, *seen[0]


def test_every_op_is_known():
    assert sorted(op.__name__ for op in (*ENTRIES, *COLLECTIVES)) == sorted(set(jaxops.__all__) - NO_OPS)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_op(name):
    function, args, how = call_of(name, "xla")
    found, op = jaxops.inspect(function, *args, **how), BY_NAME[name]
    check_errors(found, "fp8" in name or name == "quantize")
    gradients = [error.name for error in found.errors if error.name.startswith("gradient of ")]
    # The bias of a router's choice has no gradient; a tuple of weights has one for each.
    assert len(gradients) == {"route": 1, "modality_grouped_matmul": 3}.get(name, len(op.wrt))
    assert [program.name for program in found.programs] == (["forward", "backward"] if gradients else ["forward"])
    assert all(program.us and program.compile_s and program.flops is not None for program in found.programs)
    assert all(program.kernels == () and not program.on_device for program in found.programs)
    assert bool(found.kept) == bool(gradients)
    assert (found.plan is None) == (not found.choices)
    if found.plan is not None:
        assert {plan.backend for plan in np.atleast_1d(found.plan)} == {"xla"}
        assert found.choices[0].source == "explicit"
    assert len(found.arguments) == sum(hasattr(x, "shape") for x in jax.tree.leaves((args, how)))
    text = str(found)
    assert all(argument.name in text for argument in found.arguments)
    assert "cannot be known here" in text
    OF_ONE_OP.get(name, lambda found: None)(found)


def check_errors(found: Inspection, fp8: bool = False) -> None:
    assert found.errors
    largest, rms = FP8_LIMITS if fp8 else [10 * limit for limit in LIMITS["float32"]]
    for error in found.errors:
        assert error.max <= largest, error
        assert error.rms <= rms, error
        assert not error.one_sided, error


def check_route(found: Inspection) -> None:
    """The split that it returns."""
    (split,) = found.ragged
    assert (split.name, split.groups, split.rows) == ("result.group_offsets", 12, 17 * 3)
    assert split.dropped == split.outside > 0


def check_mlp(found: Inspection) -> None:
    names = [argument.name for argument in found.arguments]
    assert {"x", "w_down", "routing.weights", "routing.row_positions"} <= set(names)
    (split,) = found.ragged
    assert split.dropped
    assert {choice.op for choice in found.choices} == {"moe_mlp"}  # one backend for all parts, and no tiles
    assert found.plan.unit.products.backend == "xla"


def check_ragged_dot(found: Inspection) -> None:
    assert [(split.name, split.groups) for split in found.ragged] == [("group_sizes", 4)]


OF_ONE_OP = {"route": check_route, "moe_mlp": check_mlp, "ragged_dot": check_ragged_dot}


def operands(dtype="float32", M: int = 12, K: int = 4, N: int = 8, G: int = 3) -> tuple:
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = jax.random.normal(keys[0], (M, K), dtype), jax.random.normal(keys[1], (G, K, N), "float32")
    return lhs, rhs, jnp.array([1, 5, 5, 10], jnp.int32)


def matmul(*args, **how) -> Any:
    return jaxops.inspect(jaxops.grouped_matmul, *args, **how)


def test_a_call():
    """Arguments, groups and, by hand, what the backward keeps: both operands cast to bfloat16, and the offsets."""
    found = matmul(*operands(), compute_dtype="bfloat16")
    assert [(a.name, a.shape, a.dtype, a.bytes) for a in found.arguments] == [
        ("lhs", (12, 4), "float32", 192), ("rhs", (3, 4, 8), "float32", 384), ("group_offsets", (4,), "int32", 16),
    ]  # fmt: skip
    assert found.arguments[0].device == "cpu:0"
    assert found.static == {"compute_dtype": "bfloat16"}
    assert found.choices[0].why == "auto, on cpu"
    (split,) = found.ragged
    assert (split.groups, split.empty, split.rows, split.outside, split.largest) == (3, 1, 12, 3, 5)
    assert split.skew == 5 / (9 / 3)
    kept = {each.name: (each.bytes, each.arrays) for each in found.kept}
    assert kept == {
        "grouped_matmul.lhs": (12 * 4 * 2, ("bfloat16[12, 4]",)),
        "unnamed": (3 * 4 * 8 * 2, ("bfloat16[3, 4, 8]",)),
        "argument group_offsets": (16, ("int32[4]",)),
    }
    assert found.kept_bytes == 96 + 192
    with rich.console.Console(quiet=True) as console:
        console.print(found)


def test_offsets_that_are_not_valid():
    lhs, rhs, _ = operands()
    found = matmul(lhs, rhs, jnp.array([0, 6, 3, 13], jnp.int32))
    problems = ["offset 2 is 3, less than the 6 before it", "the largest offset, 13, is past the 12 rows"]
    assert list(found.ragged[0].problems) == problems
    assert found.errors == ()
    assert all(problem in str(found) for problem in problems)
    assert "nothing is compared" in str(found)


@pytest.mark.parametrize(
    ("offsets", "groups", "empty", "outside", "largest", "problems"),
    [
        ([0, 4, 4, 10], 3, 1, 0, 6, []),
        ([2, 2, 2], 2, 2, 10, 0, []),
        ([0], 0, 0, 10, 0, []),
        ([-1, 4, 10], 2, 0, 0, 6, ["the least offset, -1, is negative"]),
    ],
)
def test_splits(offsets, groups, empty, outside, largest, problems):
    found = split("group_offsets", np.array(offsets, np.int32), 10)
    assert found == Ragged("group_offsets", groups, empty, 10, outside, largest, None, tuple(problems))
    assert np.isnan(found.skew) == (outside == 10)


def test_nan_is_counted():
    """Also with jax_debug_nans, which makes a call raise. A NaN stays in its row and in its group's gradient."""
    lhs, rhs, offsets = operands()
    lhs = lhs.at[2, 0].set(jnp.nan).at[11, 3].set(jnp.inf)  # row 11 is in no group
    with jax.debug_nans(True):
        found = matmul(lhs, rhs, offsets)
    counts = {v.name: (v.nans, v.infs) for v in found.values}
    assert counts == {
        "lhs": (1, 1), "rhs": (0, 0), "result": (8, 0), "gradient of lhs": (0, 0), "gradient of rhs": (8, 0),
    }  # fmt: skip
    finite = np.asarray(lhs)[np.isfinite(lhs)]
    of_lhs = found.values[0]
    np.testing.assert_allclose((of_lhs.min, of_lhs.max, of_lhs.mean), (finite.min(), finite.max(), finite.mean()), 1e-5)
    assert all(error.max < 1e-5 and not error.one_sided for error in found.errors)  # the reference has them, too
    assert "lhs (1 NaN, 1 Inf)" in str(found)


def test_a_wrong_kernel_shows(monkeypatch):
    """One row of 12 has twice its values. The gradients are right."""
    right = product.fwd_xla

    def wrong(lhs, *args, transpose_rhs, **how):
        out = right(lhs, *args, transpose_rhs=transpose_rhs, **how)
        return out if transpose_rhs else out.at[2].multiply(2)  # the gradient reads rhs transposed

    monkeypatch.setattr(product, "fwd_xla", wrong)
    lhs, rhs, offsets = operands(N=9)  # a shape that no other test has compiled
    result, *gradients = matmul(lhs, rhs, offsets).errors
    want = np.asarray(grouped_matmul_reference(lhs, rhs, offsets))
    rms = np.sqrt(np.mean(want**2))
    np.testing.assert_allclose(result.max, np.abs(want[2]).max() / rms, 1e-5)
    np.testing.assert_allclose(result.rms, np.sqrt(np.sum(want[2] ** 2) / want.size) / rms, 1e-5)
    assert all(error.max < 1e-5 for error in gradients)


def test_errors_of_what_is_not_finite():
    nan, inf = np.nan, np.inf
    pairs = [
        ([1.0, nan, 3.0], [1.0, nan, 3.0], (0, 0, 0, 0)),
        ([1.0, nan, 3.0], [1.0, 2.0, 2.0], (nan, nan, 1, 2)),
        ([1.0, 2.0, 3.0], [inf, 2.0, 2.0], (0.5, 0.125**0.5, 1, 2)),
        ([0.0, 1.0], [0.0, 0.0], (inf, inf, 0, 1)),
        ([], [], (0, 0, 0, 0)),
    ]
    got = [(str(i), jnp.array(x)) for i, (x, _, _) in enumerate(pairs)]
    for error, (*_, want) in zip(errors_of(got, [jnp.array(y) for _, y, _ in pairs]), pairs, strict=True):
        np.testing.assert_allclose((error.max, error.rms, error.one_sided, error.differ), want, 1e-6)
    (integers,) = errors_of([("0", jnp.arange(3))], [jnp.array([0, 2, 2])])
    assert (integers.max, integers.differ) == (0, 1)


def test_two_plans(tmp_path, monkeypatch):
    """Side by side: one with an explicit pass, a tuned row of one's own, and the heuristic; and XLA's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read_rows.cache_clear()
    problem = {"G": 3, "M": 12, "K": 4, "N": 8, "dtype": "float32"}
    tiles = {"bm": 32, "bn": 16, "bk": 16, "kernel": "pallas"}
    row = {"op": "grouped_matmul", "pass": "dgrad", **problem, "tiles": tiles, "us": 12.5}
    store_rows("grouped_matmul", current_device(), [row], lambda a, b: False)
    given = grouped_matmul.Plan("pallas", fwd=grouped_matmul.Tiles(16, 16, 16))
    both: Any = matmul(*operands(), plan=(given, grouped_matmul.Plan("xla")))
    read_rows.cache_clear()

    first = both.first
    by_name = {choice.name: choice for choice in first.choices}
    assert {name: choice.source for name, choice in by_name.items()} == {
        "backend": "explicit", "fwd": "explicit", "dgrad": "tuned", "wgrad": "heuristic",
    }  # fmt: skip
    assert by_name["backend"].why == "plan=, in Pallas' interpreter"
    key = "'float32', 'partial lines', 4, 16, 4, 8, 'pallas')"
    assert by_name["dgrad"].why == f"your tuned row ('dgrad', {key}, 12.5 us"
    assert by_name["dgrad"].value == first.plan.dgrad == grouped_matmul.Tiles(**tiles)
    assert f"no tuned row has the key ('wgrad', {key}" in by_name["wgrad"].why
    assert first.plan.fwd == given.fwd
    assert "in Pallas' interpreter" in str(first)
    assert all(program.flops is None for program in first.programs)

    assert isinstance(both, SideBySide)
    assert both.second.plan.backend == "xla"
    assert [each.name for each in both.differences] == ["result", "gradient of lhs", "gradient of rhs"]
    assert all(each.max < 1e-5 for each in both.differences)
    for found in (both.first, both.second):
        check_errors(found)
    text = str(both)
    assert "plan=Plan(fwd=Tiles(" in text
    assert "beside plan=Plan(backend='xla')" in text
    assert "first / second" in text
    with rich.console.Console(quiet=True) as console:
        console.print(both)


def test_shipped_rows_are_the_packages():
    """A plan for an H200, traced here. Composite ops show the plans of their parts, by path."""
    device = H200
    rows = read_rows(("grouped_matmul", "grouped_glu", "permute"), device, "shipped")
    row = next(row for row in rows if row["op"] == "grouped_matmul")
    with watch() as decisions:
        problem = grouped_matmul.Problem(*(row[name] for name in ("G", "M", "K", "N", "dtype")))
        plan = grouped_matmul.make_plan(problem, device, rows, backend=row["tiles"].get("kernel", "pallas"))
        assert plan == decisions[0].plan
        mlp = moe_mlp.make_plan(moe_mlp.Problem(16384, 2, 8, 4096, 14336, 4096, "bfloat16"), device, rows)
    assert len(decisions) == 2
    tuned = [choice for choice in choices_of(decisions[:1], device, "auto", None) if choice.source == "tuned"]
    assert tuned
    assert all(choice.why.startswith("the package's tuned row") for choice in tuned)
    of_parts = {choice.op: choice.value for choice in choices_of(decisions[1:], device, "auto", None)}
    assert {"moe_mlp", "moe_mlp.unit", "moe_mlp.unit.products", "moe_mlp.down", "moe_mlp.rows"} <= set(of_parts)
    values = {choice.name: choice.value for choice in choices_of(decisions[1:], device, "auto", None)
              if choice.op == "moe_mlp.unit.products"}  # fmt: skip
    assert values["wgrad"] == mlp.unit.products.wgrad  # pyright: ignore


def test_plans_of_what_an_op_calls():
    """FP8's casts have plans of their own."""
    lhs, rhs, _ = operands(K=16)
    found = jaxops.inspect(jaxops.fp8_matmul, lhs, rhs[0], recipe="tensorwise")
    assert list(dict.fromkeys(choice.op for choice in found.choices)) == ["fp8_matmul", "quantize"]


def test_nobody_listens():
    """make_plan gives the same plan, and notes nothing outside of `watch`."""
    problem = grouped_matmul.Problem(3, 12, 4, 8, "float32")
    alone = grouped_matmul.make_plan(problem, current_device(), backend="pallas")
    with watch() as decisions:
        assert grouped_matmul.make_plan(problem, current_device(), backend="pallas") == alone
    assert len(decisions) == 1
    grouped_matmul.make_plan(problem, current_device())
    assert len(decisions) == 1


def test_what_is_kept_of_adaln():
    """x, and with save_stats mean and rstd of each row, [16, 1] float32 each."""
    x, scale = jax.random.normal(jax.random.key(0), (16, 64)), jnp.ones((1, 64))
    tiles = adaln.Tiles(4, 4, 64, 4)
    plan = adaln.Plan("pallas", tiles, tiles, save_stats=True)
    found = jaxops.inspect(jaxops.adaln, x, scale, scale, plan=plan)
    check_errors(found)
    kept = {each.name: each.bytes for each in found.kept}
    assert kept["adaln.stats"] == 2 * 16 * 4
    assert kept["argument x"] == 16 * 64 * 4
    assert found.kept_bytes - kept["adaln.stats"] <= 8  # the offsets that the op made


@pytest.mark.parametrize("op", [jnp.matmul, jaxops.bucket_length, jaxops.inspect, jaxops.Routing, "adaln", [], None])
def test_no_op(op):
    with pytest.raises(TypeError, match=r"pass a public op of jaxops .*adaln, .*, route"):
        jaxops.inspect(op, 1)


def test_errors():
    lhs, rhs, offsets = operands()
    for op in COLLECTIVES:
        with pytest.raises(NotImplementedError, match=r"jax\.shard_map.*device_times_us.* @ w"):
            jaxops.inspect(op, lhs, rhs[0], "tensor")
    with pytest.raises(ValueError, match="K of lhs"):
        matmul(lhs[:, :3], rhs, offsets)
    with pytest.raises(TypeError, match=r"grouped_matmul\(\) missing 1 required positional argument: 'group_offsets'"):
        matmul(lhs, rhs)
    with pytest.raises(TypeError, match=r"lhs is a .*Tracer; .* outside of jax\.jit"):
        jax.jit(lambda x: matmul(x, rhs, offsets))(lhs)
    with pytest.raises(TypeError, match="rhs is a ShapeDtypeStruct"):
        matmul(lhs, jax.ShapeDtypeStruct(rhs.shape, rhs.dtype), offsets)
    with pytest.raises(ValueError, match=r"several devices \(lhs on .*, rhs on"):
        matmul(lhs, jax.device_put(rhs, jax.devices()[1]), offsets)
    for how in ({"backend": ("xla",)}, {"backend": ("xla", "pallas"), "plan": (None, None)}):
        with pytest.raises(ValueError, match="pass one tuple of two"):
            matmul(lhs, rhs, offsets, **how)


def test_without_gradients():
    x = jnp.ones((4, 128))
    quantized = jaxops.inspect(jaxops.quantize, x)
    assert [each.name for each in quantized.errors] == ["result['values * scales']"]
    assert "no gradient: a cast to float8_e4m3fn has no gradient of its own" in str(quantized)
    normed = jaxops.inspect(jaxops.adaln, x, x[:1], x[:1], out_dtype="float8_e4m3fn")
    assert "no gradient: a result in float8_e4m3fn has no gradient" in str(normed)
    weight = jaxops.quantize(jnp.ones((128, 8)), scaling="rowwise", layouts="col")
    for_inference = jaxops.inspect(jaxops.fp8_matmul, x, weight, recipe="rowwise")
    assert "no gradient: the quantized tensor has no row layout" in str(for_inference)
    whole = jnp.ones((4, 3), jnp.int32)
    integers = jaxops.inspect(jaxops.ragged_dot, whole, jnp.ones((1, 3, 2), jnp.int32), jnp.array([3]))
    assert [(each.name, each.differ) for each in integers.errors] == [("result", 0)]


def test_stated_work_is_counted():
    """FLOPs and bytes of kernels are in their HLO attributes; XLA's rules give the rest."""
    program = """HloModule jit_f

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %a = f32[4]{0} custom-call(%x), custom_call_target="o", frontend_attributes={jaxops_bytes="64",jaxops_flops="1000"}
  %b = f32[4]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2"
  ROOT %c = f32[4]{0} add(%b, %x)
}
"""

    class Compiled:
        def as_text(self):
            return program

    assert work_of(Compiled()) == (1000 + 4, 64 + 32 + 48, ("mosaic_gpu_v2",))


def test_a_program_on_a_gpu(monkeypatch):
    """With CUPTI's answers replaced: two kernels of 30 and 10 us, then calls of 41, 40 and 45 us in all."""
    x = jnp.ones((64, 32))
    call, compile_s = compiled(jnp.matmul, x, x.T)
    monkeypatch.setattr(programs, "kernel_times_us", lambda call, *args: [("gemm", 30.0), ("copy", 10.0)])
    monkeypatch.setattr(programs, "device_times_us", lambda call, *args, iterations: [41.0, 40.0, 45.0])
    card = Ceilings("NVIDIA H200", 4000.0, {"float32": 0.02}, 50.0, 50.0, "pinned", "0.12", None, "2026-11-24")
    found: Any = measured("forward", (call, compile_s), (x, x.T), Setting(H200, card, "float32", False))
    assert found.kernels == (Kernel("gemm", 30.0), Kernel("copy", 10.0))
    assert (found.us, found.on_device) == (41.0, True)
    assert found.flops >= 2 * 64 * 32 * 64
    np.testing.assert_allclose(found.tflops, found.flops / 41e6)
    np.testing.assert_allclose(found.of_ceiling, found.flops / (0.02 * 1e6) / 41)
    nothing_measured = dataclasses.replace(card, dense_tflops={})
    assert least_us(nothing_measured, 1e12, 4e6, "float32") == 1.0


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_on_a_gpu(backend):
    lhs, rhs, _ = operands("bfloat16", M=4096, K=1024, N=2048, G=8)
    offsets = jnp.array([0, 500, 500, 1500, 2000, 2500, 3000, 3500, 4096], jnp.int32)
    found = matmul(lhs, rhs, offsets, compute_dtype="bfloat16", backend=backend)
    for program in found.programs:
        assert program.on_device
        assert program.kernels
        assert 0.3 < sum(kernel.us for kernel in program.kernels) / program.us < 3
        assert 0 < program.of_ceiling < 1.5
        if backend == "auto":  # XLA's is a loop, of which one iteration counts
            assert program.flops >= 2 * 4096 * 1024 * 2048
            assert not program.silent
    assert all(error.max < 6e-2 for error in found.errors)
    print(found)
