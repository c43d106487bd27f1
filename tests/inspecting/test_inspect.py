"""`jaxops.inspect` over the list of ops, and what it shows: compared with numbers that are known otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.choices import choices_of
from jaxops._lib.planning.device import Device, current_device
from jaxops._lib.planning.recorded import watch
from jaxops._lib.planning.tuned import read_rows, store_rows
from jaxops.inspecting import Inspection
from jaxops.ops import grouped_matmul, moe_mlp, quantize
from jaxops.ops.grouped_matmul import product
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.compare import LIMITS
from tests.contracts.ops import OPS
from tests.contracts.run import small

BY_NAME = {op.name: op for op in OPS if not op.sharded}
# Errors over the RMS of the reference: of FP8's rounding (e4m3 has 3 mantissa bits), of float32's elsewhere.
FP8_LIMITS = 0.5, 0.05


class _Stop(Exception):
    pass


def call_of(name: str) -> tuple:
    """(op, arguments, options) of what the list's entry calls."""
    op, seen = BY_NAME[name], []

    def stop(*args, **how):
        seen.append((args, how))
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        original = getattr(jaxops, name)
        patch.setattr(jaxops, name, stop)
        with pytest.raises(_Stop):
            op.call(small(op), **op.ways["xla"])
    return original, *seen[0]


def check_errors(report: Inspection, fp8: bool = False) -> None:
    assert report.errors
    largest, rms = FP8_LIMITS if fp8 else [10 * limit for limit in LIMITS["float32"]]
    for error in report.errors:
        assert error.max <= largest, error
        assert error.rms <= rms, error


@pytest.mark.parametrize("name", BY_NAME)
def test_every_op(name):
    function, args, how = call_of(name)
    report, op = jaxops.inspect(function, *args, **how), BY_NAME[name]
    check_errors(report, "fp8" in name or name == "quantize")
    gradients = [error.name for error in report.errors if error.name.startswith("gradient of ")]
    assert len(gradients) == len(jax.tree.leaves([small(op)[argument] for argument in op.wrt]))
    assert [f"gradient of {x.name}" for x in report.arguments if f"gradient of {x.name}" in gradients] == gradients
    assert list(report.times_us) == (["forward", "backward"] if gradients else ["forward"])
    assert all(us > 0 for us in report.times_us.values())
    assert (report.plan is None) == (not report.choices)
    if report.plan is not None:
        assert {plan.backend for plan in np.atleast_1d(report.plan)} == {"xla"}
        assert report.choices[0].source == "explicit"
    assert len(report.arguments) == sum(hasattr(x, "shape") for x in jax.tree.leaves((args, how)))
    assert all(x.name in str(report) for x in (*report.arguments, *report.errors))


def operands(dtype="float32", M: int = 12, K: int = 4, N: int = 8, G: int = 3) -> tuple:
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = jax.random.normal(keys[0], (M, K), dtype), jax.random.normal(keys[1], (G, K, N), "float32")
    return lhs, rhs, jnp.array([1, 5, 5, 10], jnp.int32)


def matmul(*args, **how) -> Inspection:
    return jaxops.inspect(jaxops.grouped_matmul, *args, **how)


def test_a_call():
    report = matmul(*operands(), compute_dtype="bfloat16")
    assert [(x.name, x.shape, x.dtype, x.bytes) for x in (*report.arguments, *report.results, *report.gradients)] == [
        ("lhs", (12, 4), "float32", 192), ("rhs", (3, 4, 8), "float32", 384), ("group_offsets", (4,), "int32", 16),
        ("result", (12, 8), "float32", 384),
        ("gradient of lhs", (12, 4), "float32", 192), ("gradient of rhs", (3, 4, 8), "float32", 384),
    ]  # fmt: skip
    assert (report.op, report.device, report.choices[0].why) == ("grouped_matmul", "cpu", "auto, on cpu")


@pytest.mark.parametrize("offsets", [[0, 6, 3, 12], [0, 3, 6, 13], [-1, 3, 6, 12]])
def test_offsets_that_are_not_valid(offsets):
    lhs, rhs, _ = operands()
    report = matmul(lhs, rhs, jnp.array(offsets, jnp.int32))
    assert report.errors == ()
    assert "group_offsets do not rise from 0 or more to at most 12 rows: rows are unspecified" in str(report)


def test_nan_is_counted():
    """Also with jax_debug_nans, which makes a call raise. A NaN stays in its row and in its group's gradient."""
    lhs, rhs, offsets = operands()
    lhs = lhs.at[2, 0].set(jnp.nan).at[11, 3].set(jnp.inf)  # row 11 is in no group
    with jax.debug_nans(True):
        report = matmul(lhs, rhs, offsets)
    arrays = (*report.arguments, *report.results, *report.gradients)
    counts = {x.name: x.not_finite for x in arrays if x.not_finite}
    assert counts == {"lhs": 2, "result": 8, "gradient of rhs": 8}
    assert all(error.max < 1e-5 for error in report.errors)  # the reference has them, too
    assert report.reference == "beside the xla backend in float32"
    assert "lhs: float32[12, 4], 192 bytes, 2 not finite" in str(report)


def test_a_wrong_kernel_shows(monkeypatch):
    """One row of 12 has twice its values, another is NaN. The gradients are right."""
    right = product.fwd_xla

    def wrong(lhs, *args, transpose_rhs, **how):
        out = right(lhs, *args, transpose_rhs=transpose_rhs, **how)
        return out if transpose_rhs else out.at[2].multiply(factor)  # the gradient reads rhs transposed

    monkeypatch.setattr(product, "fwd_xla", wrong)
    factor = 2
    lhs, rhs, offsets = operands(N=9)  # a shape that no other test has compiled
    result, *gradients = matmul(lhs, rhs, offsets).errors
    want = np.asarray(grouped_matmul_reference(lhs, rhs, offsets))
    rms = np.sqrt(np.mean(want**2))
    np.testing.assert_allclose(result.max, np.abs(want[2]).max() / rms, 1e-5)
    np.testing.assert_allclose(result.rms, np.sqrt(np.sum(want[2] ** 2) / want.size) / rms, 1e-5)
    assert all(error.max < 1e-5 for error in gradients)
    factor = np.nan
    lhs, rhs, offsets = operands(N=10)
    assert np.isnan(matmul(lhs, rhs, offsets).errors[0].max)


def test_a_plan(tmp_path, monkeypatch):
    """With an explicit pass, a tuned row of one's own, and the heuristic."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read_rows.cache_clear()
    problem = {"G": 3, "M": 12, "K": 4, "N": 8, "dtype": "float32"}
    tiles = {"bm": 32, "bn": 16, "bk": 16, "kernel": "pallas"}
    row = {"op": "grouped_matmul", "pass": "dgrad", **problem, "tiles": tiles, "us": 12.5}
    store_rows("grouped_matmul", current_device(), [row], lambda a, b: False)
    given = grouped_matmul.Plan("pallas", fwd=grouped_matmul.Tiles(16, 16, 16))
    report = matmul(*operands(), plan=given)
    read_rows.cache_clear()
    by_name = {choice.name: choice for choice in report.choices}
    assert {name: choice.source for name, choice in by_name.items()} == {
        "backend": "explicit", "fwd": "explicit", "dgrad": "tuned", "wgrad": "heuristic",
    }  # fmt: skip
    assert by_name["backend"].why == "plan=, in Pallas' interpreter"
    key = "'float32', 'partial lines', 4, 16, 4, 8, 'pallas')"
    assert by_name["dgrad"].why == f"your tuned row ('dgrad', {key}, 12.5 us"
    assert by_name["dgrad"].value == report.plan.dgrad == grouped_matmul.Tiles(**tiles)
    assert f"no tuned row has the key ('wgrad', {key}" in by_name["wgrad"].why
    assert report.plan.fwd == given.fwd
    check_errors(report)


def test_shipped_rows_are_the_packages():
    """A plan for an H200, made here. Composite ops show the plans of their parts, by path."""
    device = Device("NVIDIA H200", "gpu")
    rows = read_rows(("quantize",), device, "shipped")
    with watch() as decisions:
        fields = quantize.Problem.__dataclass_fields__
        quantize.make_plan(quantize.Problem(**{n: rows[0][n] for n in fields if n in rows[0]}), device, rows)
        mlp: Any = moe_mlp.make_plan(moe_mlp.Problem(16384, 2, 8, 4096, 14336, 4096, "bfloat16"), device, rows)
    of_product, of_mlp = (list(choices_of([each], device, "auto", None)) for each in decisions)
    tuned = [choice for choice in of_product if choice.source == "tuned"]
    assert tuned
    assert all(choice.why.startswith("the package's tuned row") for choice in tuned)
    parts = {"moe_mlp", "moe_mlp.unit", "moe_mlp.unit.products", "moe_mlp.down", "moe_mlp.rows"}
    assert parts <= {choice.op for choice in of_mlp}
    wgrad = [choice.value for choice in of_mlp if (choice.op, choice.name) == ("moe_mlp.unit.products", "wgrad")]
    assert wgrad == [mlp.unit.products.wgrad]


@pytest.mark.parametrize("op", [jnp.matmul, jaxops.bucket_length, jaxops.inspect, jaxops.Routing, "adaln", [], None])
def test_no_op(op):
    with pytest.raises(TypeError, match=r"pass a public op of jaxops .*adaln, .*, route"):
        jaxops.inspect(op, 1)


def test_errors():
    lhs, rhs, offsets = operands()
    for op in (jaxops.all_gather_matmul, jaxops.matmul_reduce_scatter):
        with pytest.raises(NotImplementedError, match=r"jax\.shard_map.*device_times_us"):
            jaxops.inspect(op, lhs, rhs[0], "tensor")
    with pytest.raises(ValueError, match="K of lhs"):
        matmul(lhs[:, :3], rhs, offsets)
    with pytest.raises(TypeError, match=r"grouped_matmul\(\) missing 1 required positional argument: 'group_offsets'"):
        matmul(lhs, rhs)
    with pytest.raises(TypeError, match=r"lhs is a .*Tracer; .* outside of jax\.jit"):
        jax.jit(lambda x: matmul(x, rhs, offsets).errors)(lhs)
    with pytest.raises(TypeError, match="rhs is a ShapeDtypeStruct"):
        matmul(lhs, jax.ShapeDtypeStruct(rhs.shape, rhs.dtype), offsets)
    with pytest.raises(ValueError, match="incompatible devices"):
        matmul(*(jax.device_put(x, jax.devices()[i]) for i, x in enumerate((lhs, rhs))), offsets)


def test_without_gradients():
    x = jnp.ones((4, 128))
    quantized = jaxops.inspect(jaxops.quantize, x, layouts="both")
    assert [each.name for each in quantized.errors] == ["result[0]", "result[1]"]
    assert "no gradient: a cast to float8_e4m3fn has no gradient of its own" in str(quantized)
    weight = jaxops.quantize(jnp.ones((128, 8)), scaling="rowwise", layouts="col")
    for_inference = jaxops.inspect(jaxops.fp8_matmul, x, weight, recipe="rowwise")
    assert "no gradient: the quantized tensor has no row layout" in str(for_inference)
    # FP8's casts have plans of their own.
    assert list(dict.fromkeys(choice.op for choice in for_inference.choices)) == ["fp8_matmul", "quantize"]
    integers = jnp.ones((4, 3), jnp.int32), jnp.ones((1, 3, 2), jnp.int32), jnp.array([3])
    assert [(each.name, each.max) for each in jaxops.inspect(jaxops.ragged_dot, *integers).errors] == [("result", 0)]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_on_a_gpu(backend):
    lhs, rhs, _ = operands("bfloat16", M=4096, K=1024, N=2048, G=8)
    offsets = jnp.array([0, 500, 500, 1500, 2000, 2500, 3000, 3500, 4096], jnp.int32)
    report = matmul(lhs, rhs, offsets, compute_dtype="bfloat16", backend=backend)
    least_us = 2 * 4096 * 1024 * 2048 / 1e9  # at 1,000 TFLOP/s
    assert all(least_us < us < 1e5 for us in report.times_us.values())
    assert all(error.max < 6e-2 for error in report.errors)
