"""Tensors computed and cast in one pass: bits of numpy's products and of the same casts in numpy."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.ragged.offsets import padded_rows
from jaxops.ops.quantize import Format, Halves, Output, quantize_computed
from tests.compare import assert_close
from tests.hopper import lower_for_h200
from tests.jaxprs import same_program
from tests.ops.quantize.cases import E4M3, E5M2, OFFSETS, RUNS, R, Variant, backend_of, check_bits, make_x, np_quantize


def products(a, left, right, weights):
    """Each tensor is one rounded product after another, so that no compiler has sums to rearrange."""
    return (a * left, weights * right, weights * a), (a * right,)


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static: two tensors side by side, and one by itself."""

    pair: Output
    single: Output
    C: int = 256
    dtype: str = "bfloat16"

    def __str__(self):
        outputs = self.pair, self.single
        names = [f"{o.scaling}-{o.layouts}{'-plain' * o.plain}-{o.form.dtype[7:11]}" for o in outputs]
        return "-".join([*names, str(self.C), self.dtype])


def pair(scaling, layouts="both", fp8=E4M3, plain=False, pow2=False):
    return Output(Format(scaling, fp8, pow2), layouts, 2, plain)


def single(scaling, layouts="col", fp8=E4M3, **options):
    return Output(Format(scaling, fp8), layouts, **options)


CALLS = [
    Call(pair("block_1x128"), single("block_1x128")),
    Call(pair("tensorwise", fp8=E5M2), single("tensorwise"), C=200),
    Call(pair("block_1x128", fp8=E5M2, pow2=True), single("tensorwise", "both", plain=True), C=128),
    Call(pair("tensorwise", "row"), single("block_1x128", "row"), C=200),
    Call(pair("rowwise", "row", plain=True), Output(layouts="none", plain=True), C=133, dtype="float16"),
    Call(pair("block_1x128", "row", plain=True), single("rowwise", "row", E5M2), dtype="float32"),
    Call(pair("tensorwise", "col"), single("block_1x128", "both"), C=1),
]
UNFUSED = [
    Call(pair("block_1x128", "row"), single("block_1x128"), C=200),
    Call(pair("rowwise", "col"), single("rowwise"), C=133),
]
# A third of what CALLS[0] compiles: columns, stored transposed.
COLUMNS = Call(pair("block_1x128", "col"), Output(layouts="none", plain=True))


@functools.cache
def compiled(run: str, call: Call):
    how = {"dtype": call.dtype, "sums": 1, "backend": backend_of(run)}

    def run_it(a, both, weights, offsets):
        outputs = [call.pair, call.single]
        return quantize_computed(products, [a, Halves(both), weights], outputs, group_offsets=offsets, **how)

    return jax.jit(run_it)


def operands_of(call: Call, rows: int = R, seed: int = 0, offsets=None) -> list[np.ndarray]:
    """Zeros, huge and tiny rows, single NaN and infinities; rows outside the groups are NaN, infinities, or huge
    numbers with finite products."""
    a, both = (np.array(make_x((rows, n * call.C), call.dtype, seed + n)) for n in (1, 2))
    weights = np.random.default_rng(seed).normal(size=rows).astype(np.float32)
    if offsets is not None:
        outside = np.r_[0 : offsets[0], offsets[-1] : rows]
        for x in (a, both, weights):
            for first, value in enumerate((np.nan, np.inf, 1e15 if call.dtype != "float16" else 200)):
                x[outside[first::3]] = value
    return [a, both, weights]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(jnp.dtype(dtype)).astype(np.float32)


def check(call: Call, got, operands, offsets) -> None:
    a, both, weights = (np.asarray(x).astype(np.float32) for x in operands)
    C = a.shape[1]
    with np.errstate(all="ignore"):
        tensors = [a * both[:, :C], weights[:, None] * both[:, C:], weights[:, None] * a]
        tensors = [without_subnormals(x) for x in tensors]
        dots = (a.astype(np.float64) * both[:, C:])[offsets[0] : offsets[-1]]
    tensors = [rounded(x, call.dtype) for x in tensors]
    results, sums = jax.tree.map(np.asarray, got)
    for output, result, parts in zip((call.pair, call.single), results, (tensors[:2], tensors[2:]), strict=True):
        check_output(call, output, result, parts, offsets)
    (found,) = sums
    assert found.dtype == np.float32
    normal = np.abs(dots).max(axis=1, initial=0) < 1e6  # false for rows with NaN
    found = np.asarray(found, np.float64)[:, offsets[0] : offsets[-1]][:, normal]
    size = np.abs(dots[normal]).sum(axis=1) + 1e-30
    assert_close(found.sum(axis=0) / size, dots[normal].sum(axis=1) / size, "float32", "sums")


def without_subnormals(x: np.ndarray) -> np.ndarray:
    """float32 x with zeros of their sign for subnormals: XLA's CPU flushes them, a GPU does not."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def check_output(call: Call, output: Output, result, parts, offsets) -> None:
    """The layouts that are asked for and no others; the rows in groups, the columns that groups have."""
    mine = slice(offsets[0], offsets[-1])
    used = sum(-(-int(n) // 128) for n in np.diff(offsets))
    variant = Variant(output.scaling, "both", output.form.dtype, pow2=output.form.pow2, ragged=True)
    want = np_quantize(np.concatenate(parts, axis=1), variant, offsets)
    assert (result.row is not None, len(result.cols)) == (output.row, output.parts * output.col)
    equal = lambda name, *arrays: check_bits(f"{call}, {name}", *arrays)
    if output.row:
        equal("values", result.row.values[mine], want["values"][mine])
        where = {"tensorwise": (), "rowwise": (mine,), "block_1x128": (slice(None), mine)}[output.scaling]
        equal("scales", result.row.scales[where], np.asarray(want["scales"])[where])
    C = parts[0].shape[1]
    for i, q in enumerate(result.cols):
        columns = slice(i * C, (i + 1) * C)
        assert q.values_t.shape == (C, padded_rows(parts[0].shape[0], len(offsets) - 1))
        equal(f"values_t {i}", q.values_t[:, : 128 * used], want["values_t"][columns, : 128 * used])
        where = {"tensorwise": (), "rowwise": (columns,), "block_1x128": (slice(used), columns)}[output.scaling]
        scales_t = q.scales_t[:used] if output.scaling == "block_1x128" else q.scales_t
        equal(f"scales_t {i}", scales_t, np.asarray(want["scales_t"])[where])
    assert len(result.plain) == output.parts * output.plain
    for i, x in enumerate(result.plain):
        assert x.dtype == call.dtype
        found = without_subnormals(np.asarray(x[mine]).astype(np.float32)).astype(x.dtype)
        equal(f"plain {i}", found, parts[i][mine].astype(x.dtype))
    for q in (result.row, *result.cols):
        assert q is None or (q.scaling, q.dtype, q.group_offsets.shape) == (
            output.scaling, call.dtype, (len(offsets),)
        )  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values(run, call):
    f, first = compiled(run, call), CALLS.index(call)
    groups = list(OFFSETS.values()) * 2
    # The interpreter takes 0.2 s for each: three of the five, of each call others.
    for offsets in groups[first % 5 :][:3] if run == "interpret" else OFFSETS.values():
        operands = operands_of(call, offsets=offsets)
        check(call, f(*operands, np.array(offsets, np.int32)), operands, offsets)
    assert f._cache_size() == 1


@pytest.mark.parametrize("run", RUNS[:3])
@pytest.mark.parametrize("call", UNFUSED, ids=str)
def test_what_spans_tiles_is_written_first(run, call):
    """A block of 128 columns across both parts; scales of whole columns."""
    operands = operands_of(call, offsets=OFFSETS["outside"])
    got = compiled(run, call)(*operands, np.array(OFFSETS["outside"], np.int32))
    check(call, got, operands, OFFSETS["outside"])


@pytest.mark.parametrize("run", RUNS[:3])
@pytest.mark.parametrize(("rows", "calls"), [(0, CALLS[:2]), (1, CALLS[3:5]), (129, [COLUMNS])])
def test_few_rows(run, rows, calls):
    for call in calls:
        offsets = [0, 0, rows]
        operands = operands_of(call, rows, offsets=offsets)
        if rows == 0 and run == "interpret":
            assert same_program(*(compiled(r, call) for r in ("xla", run)), *operands, np.array(offsets, np.int32))
            continue
        check(call, compiled(run, call)(*operands, np.array(offsets, np.int32)), operands, offsets)


@pytest.mark.parametrize("run", RUNS[1:3])
def test_broken_offsets_stay_in_bounds(run):
    """Wrong rows, but no access out of bounds: the interpreter would raise or give NaN. On a GPU, what no tile writes
    is what the memory held, and compute-sanitizer looks for wild accesses."""
    for call in (CALLS[0], CALLS[1], CALLS[3]):
        operands = [np.ones_like(x) for x in operands_of(call)]
        for offsets in (
            [-9, 50, 90, 120, 400],
            [250, 100, 299, 0, 300],
            [2**31 - 1, -(2**31), 7, 300, 5],
            [0, 300, 0, 300, 0],
        )[:: 1 if call == CALLS[0] else 3]:
            got = jax.block_until_ready(compiled(run, call)(*operands, np.array(offsets, np.int32)))
            for result in got[0] if run == "interpret" else ():
                for q in result.cols:
                    held = np.asarray(q.values_t, np.float32)
                    assert set(np.unique(held[~np.isnan(held)])) <= {0.0, 448.0, 57344.0}


@pytest.mark.parametrize(
    ("call", "kernels", "others"),
    [
        (CALLS[0], ["schedule_rows", "quantize_computed_cast"], set()),
        (CALLS[1], ["quantize_computed_amax", "schedule_rows", "quantize_computed_cast"], {"reduce"}),
        (CALLS[4], ["quantize_computed_cast"], set()),
    ],
    ids=str,
)
def test_a_call_is_these_kernels(call, kernels, others):
    """XLA writes nothing as large as an operand: no half is sliced off, no tensor is computed before."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands_of(call)]
    text = lower_for_h200(compiled("gpu", call), *shapes, jax.ShapeDtypeStruct((5,), "int32"))
    assert re.findall(r'name = "((?:quantize|schedule)_\w+)"', text) == kernels
    lines = [line for line in text.splitlines() if f"{R}x{call.C}x" in line or f"{R}x{2 * call.C}x" in line]
    assert all("custom_call" in line or "return" in line for line in lines), lines
    assert others <= set(re.findall(r"stablehlo\.(\w+)", text))


def test_errors():
    x, offsets, double = jnp.ones((4, 128)), jnp.array([0, 4], jnp.int32), lambda x: ((2 * x,), ())
    how = {"group_offsets": offsets, "dtype": "float32", "backend": "pallas"}
    with pytest.raises(ValueError, match=r"one of the operands must be a matrix"):
        quantize_computed(double, [x[:, 0]], [Output()], **how)
    with pytest.raises(NotImplementedError, match=r"no gradient of its own"):
        jax.grad(lambda x: quantize_computed(double, [x], [Output()], **how)[0][0].row.scales.sum())(x)
