"""Results and gradients against the float32 reference: options, dtypes, loops over rows, layouts, NaN outside."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jaxops
from tests.compare import assert_close
from tests.ops.adaln.cases import KERNELS, PLANS, RUNS, Variant, apply, check, compiled_forward, make_case, run_all

# Every activation, every op with every value of its options, and every way to walk over rows; norms with a row a tile
# are in `test_sequences_of_many_tiles`.
VARIANTS = [
    Variant("adaln", "layer", plan="ahead"),
    Variant("adaln", "rms", "sigmoid", affine=True, plan="steps"),
    Variant("adaln", "layer", "gelu", affine=True, per_row=True, plan="ahead-steps"),
    Variant("gated_residual", plan="steps"),
    Variant("gated_residual", per_row=True, plan="single"),
    Variant("gated_residual_adaln", "layer", "silu", affine=True, plan="whole"),
    Variant("gated_residual_adaln", "rms", "relu", plan="ahead-steps"),
    Variant("gated_residual_adaln", "rms", "gelu_tanh", affine=True, per_row=True, plan="ahead"),
]


def name_of(variant: Variant) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(variant) if value not in (None, False))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_variants(run, variant):
    """In the program of its layouts, below, the one with twelve sequences."""
    sizes, before = LAYOUTS["twelve-across-multiples"] if variant is TWELVE else ([9, 0, 31, 2, 1], 5)
    check(make_case(sizes, 37, per_row=variant.per_row, before=before, after=61 - before - sum(sizes)), variant, run)


# One compiled shape each, T = 61, D = 37. Sums take a program a sequence with five, a multiple of 8 rows with twelve.
FIVE, TWELVE = VARIANTS[0], VARIANTS[5]
LAYOUTS = {
    "all-rows": ([17, 4, 27, 0, 13], 0),
    "one-sequence": ([0, 61, 0, 0, 0], 0),
    "last-sequence": ([0, 0, 0, 0, 40], 21),
    "one-tile-each": ([8, 8, 8, 8, 8], 0),
    "a-tile-and-a-row": ([9, 9, 9, 9, 9], 7),
    "half-tiles-unaligned": ([4, 12, 20, 4, 16], 3),
    "no-rows": ([0, 0, 0, 0, 0], 30),
    "single-rows-at-the-end": ([1, 1, 1, 1, 1], 56),
    "twelve-all-rows": ([1, 2, 0, 3, 9, 16, 0, 8, 5, 7, 0, 10], 0),
    "twelve-across-multiples": ([4, 9, 7, 1, 8, 8, 0, 2, 0, 17, 1, 1], 2),
    "twelve-one-sequence": ([0] * 11 + [61], 0),
    "twelve-no-rows": ([0] * 12, 61),
    "twelve-fives": ([5] * 12, 1),
    **{
        f"empty-{pattern}": ([0 if empty else 3 + 4 * i for i, empty in enumerate(pattern)], 3)
        for pattern in itertools.product([False, True], repeat=5)
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_layouts(run):
    for said, (sizes, before) in LAYOUTS.items():
        case = make_case(sizes, 37, before=before, after=61 - before - sum(sizes))
        try:
            check(case, FIVE if len(sizes) == 5 else TWELVE, run)
        except AssertionError as error:
            error.add_note(said)
            raise


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("B", [5, 12])
@hypothesis.given(data=st.data())
def test_random_layouts(run, B, data):
    """Any sizes, anywhere, in the shapes that are compiled already."""
    ends = sorted(data.draw(st.lists(st.integers(0, 61), min_size=B + 1, max_size=B + 1)))
    check(
        make_case(np.diff(ends), 37, before=ends[0], after=61 - ends[-1], seed=data.draw(st.integers(0, 9))),
        FIVE if B == 5 else TWELVE,
        run,
    )


BFLOAT16 = Variant("gated_residual_adaln", "layer", "gelu", affine=True, plan="whole")
DTYPES = {
    "bfloat16": (BFLOAT16, "bfloat16", None),
    "float16-float32": (Variant("adaln", "rms", affine=True, plan="ahead"), "float16", "float32"),
    "float32-bfloat16": (Variant("gated_residual", per_row=True, plan="whole"), "float32", "bfloat16"),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("variant", "dtype", "modulation"), DTYPES.values(), ids=DTYPES)
def test_dtypes(run, variant, dtype, modulation):
    options = {"dtype": dtype, "modulation_dtype": modulation, "per_row": variant.per_row}
    check(make_case([9, 0, 31, 2, 1], 64, **options, before=5, after=13), variant, run)


@pytest.mark.parametrize("run", KERNELS)
def test_sequences_of_many_tiles(run):
    """One row a program: more parts of a sequence than the sums add in a step (128), as many, and fewer."""
    variant = Variant("gated_residual_adaln", "rms", affine=True, plan="single")
    for sizes in ([150, 20, 1, 0, 32], [129, 2, 1, 3, 68], [203, 0, 0, 0, 0], [130, 60, 0, 2, 11]):
        check(make_case(sizes, 5, before=2, after=205 - sum(sizes)), dataclasses.replace(variant, epsilon=0.5), run)


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize("B", [127, 128, 16_383, 16_384])
def test_every_row_finds_its_sequence(run, B):
    """About where the search takes a second step of 128 offsets, and a third. The shift says whose a row is."""
    T = 40
    offsets = np.sort(np.random.default_rng(B).integers(1, T, size=B + 1)).astype(np.int32)
    offsets[: B // 2] = offsets[0]  # most sequences are empty
    row = np.arange(T)
    sequence = np.searchsorted(offsets, row, side="right") - 1
    want = np.where((sequence >= 0) & (sequence < B), sequence, 0)
    x, shift = np.zeros((T, 1), np.float32), np.arange(B, dtype=np.float32)[:, None]
    f = jax.jit(lambda x, shift, offsets: jaxops.adaln(x, 0 * shift, shift, offsets, plan=PLANS["single"]))
    np.testing.assert_array_equal(np.asarray(f(x, shift, offsets))[:, 0], want)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [1, 7], ids=["one-sequence", "per-row"])
def test_no_offsets(run, rows):
    """One vector for all rows, or one for each."""
    case = make_case([7], 6, per_row=rows == 7)
    variant = Variant("gated_residual_adaln", per_row=rows == 7, epsilon=0.5)
    got = compiled_forward(run, variant)(case, None)
    for name, want in compiled_forward("reference", variant)(case, case["offsets"]).items():
        assert_close(got[name], want, "float32", name)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("per_row", [False, True], ids=["sequence", "row"])
def test_as_many_sequences_as_rows(run, per_row):
    """Where B = T, `per` says which of them a vector belongs to. Not under jit."""
    case = make_case([2, 0, 1, 4, 0, 0, 0], 6)
    variant = Variant(epsilon=0.5, per_row=per_row)
    got = apply(variant, variant.plan_for(run), case, case["offsets"])["y"]
    assert_close(got, compiled_forward("reference", variant)(case, case["offsets"])["y"], "float32")


@pytest.mark.parametrize("run", RUNS)
def test_zero_epsilon(run):
    """With epsilon 0, too, rows that are not there, or outside, are zeros: a tile's last step holds some."""
    variant = Variant("adaln", "rms", affine=True, epsilon=0.0, plan="whole")
    # 1e-30 is nothing beside a row's mean square, and keeps the reference's outside rows, zeros, finite.
    check(
        make_case([9, 0, 5], 24, before=3, after=2), variant, run, reference=dataclasses.replace(variant, epsilon=1e-30)
    )


@pytest.mark.parametrize("run", RUNS)
def test_a_bad_row_stays_in_its_sequence(run):
    """NaN in a row and in the last sequence's scale change no other row and sum; rows outside are zero."""
    case = make_case([9, 0, 31, 2, 1], 37, before=5, after=13)
    want = run_all(case, FIVE, run)
    bad = case | {name: np.array(case[name]) for name in ("x", "scale")}
    bad["x"][5 + 3], bad["scale"][4] = np.nan, np.nan
    got = run_all(bad, FIVE, run)
    rows, sequences = np.r_[0:8, 9:47, 48:61], [1, 2, 3]
    for name in ("y", "dx", "dscale", "dshift"):
        kept = rows if name in ("y", "dx") else sequences
        np.testing.assert_array_equal(np.asarray(got[name])[kept], np.asarray(want[name])[kept], err_msg=name)
    assert np.isnan(np.asarray(got["y"])[[8, 47]]).all()
    assert np.isnan(np.asarray(got["dscale"][0])).all()


def float64_norm(x, epsilon: float, norm: str = "layer") -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.mean(1, keepdims=True) if norm == "layer" else x
    return x / np.sqrt((x**2).mean(1, keepdims=True) + epsilon)


@pytest.mark.parametrize("run", RUNS)
def test_large_mean(run):
    """Mean 1e4, variance 1: off by some ulps of 1e4 (1e-3); E[x^2] - E[x]^2 would lose the variance."""
    x, zero = 1e4 + np.random.default_rng(0).normal(size=(5, 129)).astype(np.float32), np.zeros((1, 129), np.float32)
    got = compiled_forward(run, Variant(plan="whole"))({"x": x, "scale": zero, "shift": zero}, None)["y"]
    assert np.abs(np.asarray(got) - float64_norm(x, 1e-6)).max() < 2 * np.spacing(np.float32(1e4))


@pytest.mark.parametrize("run", RUNS)
def test_both_in_one_are_one_after_the_other(run):
    """In bfloat16, where it shows whether the norm sees the residual before or after it is rounded."""
    variant, dtype = BFLOAT16, "bfloat16"
    case = make_case([9, 0, 31, 2, 1], 64, dtype=dtype, before=5, after=13)
    both = run_all(case, variant, run)
    plan = variant.plan_for(run)
    alone = jax.jit(functools.partial(jaxops.gated_residual, plan=plan))(
        case["x"], case["h"], case["gate"], case["offsets"]
    )
    assert np.asarray(both["residual"]).tobytes() == np.asarray(alone).tobytes()
    adaln = dataclasses.replace(variant, op="adaln")
    y = jax.jit(lambda given: apply(adaln, plan, given, case["offsets"])["y"])(
        {**{n: case[n] for n in adaln.names}, "x": alone}
    )
    assert_close(both["y"], y, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [1000, 1024, 3072, 4096, 16384])
def test_heuristic_and_tuned_plans(dtype, D):
    """On the GPU, with the plans that users get."""
    case = make_case([300, 0, 1, 723, 0, 212], D, dtype=dtype, before=7, after=5)
    for op in ("adaln", "gated_residual", "gated_residual_adaln"):
        check(case, Variant(op, affine=op != "gated_residual", plan="auto"), "gpu")


@pytest.mark.parametrize("run", RUNS)
def test_offsets_that_break_the_contract(run):
    """Below 0, past T, decreasing: a result of the right shape, no access out of bounds (see tests/sanitize.py)."""
    for sizes, variant in (([9, 0, 31, 2, 1], FIVE), ([5] * 12, TWELVE)):
        case = make_case(sizes, 37, before=0, after=61 - sum(sizes))
        for bad in (
            [-5, 10, 30, 40],
            [0, 10, 30, 10_000],
            [0, 30, 10, 40],
            [2**31 - 1, -(2**31), 0, 7],
            [61, 0, 61, 0],
        ):
            offsets = np.resize(np.array(bad, np.int32), len(sizes) + 1)
            got = jax.block_until_ready(run_all(case | {"offsets": offsets}, variant, run))
            assert {name: value.shape for name, value in got.items()} == {
                name: case["x" if name in ("y", "residual") else name[1:]].shape for name in got
            }
