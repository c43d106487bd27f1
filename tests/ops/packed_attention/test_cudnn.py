"""cuDNN's ragged layout: what it is given, with a stand-in for JAX's private names; and on a GPU, itself."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxops
from jaxops.offload import residual_bytes
from jaxops.ops.packed_attention import Plan, Problem, cudnn, make_plan
from jaxops.ops.packed_attention.cudnn import sequences_by_row
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.packed_attention.cases import H200, arrays, cudnn_stand_in, jit, with_gradients

pytestmark = pytest.mark.versions

ROWS, DIM = 50, 16
ON_H200 = Plan("cudnn", device=H200)
by_row = jax.jit(sequences_by_row, static_argnums=(1, 2, 3))


@pytest.fixture
def stand_in(monkeypatch) -> None:
    monkeypatch.setattr(cudnn, "_private", cudnn_stand_in)


def half(seed: int, rows: int) -> list[jax.Array]:
    return [put(x, jnp.bfloat16) for x in arrays(seed, rows, dim=DIM)]


@given(st.lists(st.integers(0, 30), min_size=7, max_size=7), st.integers(0, 3))
def test_sequences_by_row(lengths, before):
    """Row by row, from the left, nonempty sequences only, as cuDNN needs them; missing or long ones are reported."""
    rows, longest, crowd = 4, 10, 3
    offsets = np.minimum(np.cumsum([before, *lengths]), rows * longest).astype(np.int32)
    wanted = [
        [
            (start % longest, end - start)
            for start, end in itertools.pairwise(offsets)
            if end > start and start // longest == row
        ]
        for row in range(rows)
    ]
    starts, kept, fits = (np.asarray(x) for x in by_row(put(offsets), rows, longest, crowd))
    assert fits == all(len(some) <= crowd and all(length <= longest for _, length in some) for some in wanted)
    if fits:
        assert [
            [(s, n) for s, n in zip(*both, strict=False) if n >= 0]
            for both in zip(starts.tolist(), kept.tolist(), strict=True)
        ] == wanted
        assert all(sorted(row, key=lambda n: n < 0) == row for row in kept.tolist())
        np.testing.assert_array_equal(starts[:, :-1] < 0, kept < 0)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.usefixtures("stand_in")
def test_what_it_is_given(causal):
    """Rows of `longest` with what crosses their ends, rows outside, an empty sequence, grouped queries."""
    q, k, v, dout = half(0, ROWS)
    ends = jnp.array([3, 15, 15, 16, 37, 48], jnp.int32)
    outside = np.r_[0:3, 48:ROWS]
    spoilt = [x.at[outside].set(jnp.nan) for x in (q, k, v, dout)]
    clean = q, k, v, dout.at[outside].set(0)
    every = [{}, {"longest": 21, "crowd": 3}, {"longest": 1000}]

    @jit
    def run(clean, spoilt):
        call = functools.partial(jaxops.packed_attention, causal=causal)
        found = [
            with_gradients(lambda *x, limits=limits: call(*x, ends, plan=ON_H200, **limits), *spoilt)
            for limits in every
        ]
        return with_gradients(lambda *x: call(*x, ends, backend="xla"), *clean), found

    want, found = run(clean, spoilt)
    for results in found:
        for got, wanted in zip(results, want, strict=True):
            assert_close(got, wanted, "bfloat16", scale=4)
            assert not np.asarray(got, np.float32)[outside].any()


@pytest.mark.parametrize("limits", [{"longest": 10, "crowd": 4}, {"longest": 40, "crowd": 2}], ids=["longer", "more"])
@pytest.mark.usefixtures("stand_in")
def test_more_than_was_said_is_nan(limits):
    q, k, v, _ = half(0, ROWS)
    ends = jnp.array([0, 5, 9, 20, ROWS], jnp.int32)
    out = jit(lambda *x: jaxops.packed_attention(*x, ends, plan=ON_H200, **limits))(q, k, v)
    assert np.isnan(np.asarray(out, np.float32)).all()


@pytest.mark.usefixtures("stand_in")
def test_all_of_its_residuals_have_the_name():
    q, k, v, _ = half(0, ROWS)
    found = residual_bytes(lambda *x: jaxops.packed_attention(*x, jnp.array([0, ROWS]), plan=ON_H200), q, k, v)
    assert set(found) == {"attention.cudnn"}
    assert found["attention.cudnn"] > sum(x.nbytes for x in (q, k, v))


PLAIN = Problem(4096, 4096, 16, 4, 64, "bfloat16", "causal")


@pytest.mark.parametrize("lacking", [None, types.SimpleNamespace(MaskType=1)], ids=["module", "name"])
def test_where_jax_has_no_such_names(lacking, monkeypatch):
    """ "auto" goes on without; an explicit choice says what is missing."""
    assert make_plan(PLAIN, H200).backend == "cudnn"

    def import_module(name):
        if lacking is None:
            raise ImportError(name)
        return lacking

    monkeypatch.setattr(cudnn.importlib, "import_module", import_module)
    assert make_plan(PLAIN, H200).backend == "xla"
    with pytest.raises(NotImplementedError, match=r"cannot run this: JAX .* has no jax\._src.* with MaskType and dot"):
        make_plan(PLAIN, H200, backend="cudnn")


def test_this_jax_has_the_names():
    """Else "auto" takes other ways: then look for the new names in jaxops/ops/packed_attention/cudnn.py."""
    private = cudnn._private()
    assert private is not None
    assert {"PADDING", "PADDING_CAUSAL"} <= set(private.MaskType.__members__)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize(
    "offsets", [[0, 700, 700, 701, 1000], [3, 250, 250, 250, 990], [0, 1000]], ids=["whole", "outside", "one"]
)
def test_on_a_gpu(offsets, causal):
    """Values and gradients are those of the portable backend; NaN outside the sequences has no effect."""
    q, k, v, dout = (put(x, jnp.bfloat16) for x in arrays(0, 1000, dim=64))
    ends = put(offsets, jnp.int32)
    outside = np.r_[0 : offsets[0], offsets[-1] : 1000]
    run = lambda **how: jax.jit(
        functools.partial(with_gradients, lambda *x: jaxops.packed_attention(*x, ends, causal=causal, **how))
    )
    want = run(backend="xla")(q, k, v, dout)
    spoilt = [x.at[outside].set(jnp.nan) for x in (q, k, v, dout)]
    for limits in ({}, {"longest": int(max(np.diff(offsets))), "crowd": 4}):
        for got, wanted in zip(run(backend="cudnn", **limits)(*spoilt), want, strict=True):
            assert_close(got, wanted, "bfloat16", scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [{"longest": 100, "crowd": 4}, {"longest": 500, "crowd": 2}], ids=["longer", "more"])
def test_more_than_was_said_on_a_gpu(limits):
    q, k, v, _ = half(0, 1000)
    ends = jnp.array([0, 10, 20, 30, 1000], jnp.int32)
    out = jaxops.packed_attention(q, k, v, ends, backend="cudnn", **limits)
    assert np.isnan(np.asarray(out, np.float32)).all()


@settings(max_examples=20)
@given(
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from([8, 12, 64, 128, 136, 256]),
    st.sampled_from(["whole", "causal", "rows"]),
    st.booleans(),
)
def test_what_it_can(dtype, head_dim, mask, cross):
    problem = Problem(4096, 4096, 16, 4, head_dim, dtype, mask, cross)
    can = dtype != "float32" and head_dim in (8, 64, 128) and mask != "rows" and not cross
    assert (make_plan(problem, H200).backend == "cudnn") == can
    if not can:
        with pytest.raises(NotImplementedError, match=r"backend='cudnn' cannot run this: it.*Use backend='auto'"):
            make_plan(problem, H200, backend="cudnn")
