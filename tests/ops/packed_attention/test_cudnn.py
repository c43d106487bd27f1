"""cuDNN's ragged layout: what it is given, with a stand-in for JAX's private names; and on a GPU, itself."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops.packed_attention import Plan, Problem, cudnn, make_plan
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.packed_attention.cases import H200, arrays, cudnn_stand_in, jit, with_gradients

pytestmark = pytest.mark.versions

ROWS, DIM = 50, 16
ON_H200 = Plan("cudnn", device=H200)


@pytest.fixture
def stand_in(monkeypatch) -> None:
    monkeypatch.setattr(cudnn, "_private", cudnn_stand_in)


def half(seed: int, rows: int) -> list[jax.Array]:
    return [put(x, jnp.bfloat16) for x in arrays(seed, rows, dim=DIM)]


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("offsets", [[3, 15, 15, 16, 37, 48], [2, 40]], ids=["some", "one"])
@pytest.mark.usefixtures("stand_in")
def test_what_it_is_given(offsets, causal):
    """Rows outside, an empty sequence, grouped queries."""
    q, k, v, dout = half(0, ROWS)
    ends = jnp.array(offsets, jnp.int32)
    outside = np.r_[0 : offsets[0], offsets[-1] : ROWS]
    spoilt = [x.at[outside].set(jnp.nan) for x in (q, k, v, dout)]
    clean = q, k, v, dout.at[outside].set(0)

    @jit
    def run(clean, spoilt):
        call = functools.partial(jaxops.packed_attention, causal=causal)
        wanted = with_gradients(lambda *x: call(*x, ends, backend="xla"), *clean)
        return wanted, with_gradients(lambda *x: call(*x, ends, plan=ON_H200), *spoilt)

    want, found = run(clean, spoilt)
    for got, wanted in zip(found, want, strict=True):
        assert_close(got, wanted, "bfloat16", scale=4)
        assert not np.asarray(got, np.float32)[outside].any()


def test_crowd_has_no_effect():
    q, k, v, _ = half(0, ROWS)
    ends = jnp.array([0, 20, ROWS], jnp.int32)
    with pytest.warns(DeprecationWarning, match="crowd has no effect any more") as caught:
        out = jaxops.packed_attention(q, k, v, ends, crowd=1, longest=30)
    assert len(caught) == 1
    assert (out == jaxops.packed_attention(q, k, v, ends)).all()


A100 = Device("NVIDIA A100-SXM4-80GB", "gpu")
PLAIN = Problem(4096, 4096, 16, 4, 64, "bfloat16", "causal")


@pytest.mark.parametrize("lacking", [None, types.SimpleNamespace(MaskType=1)], ids=["module", "name"])
def test_where_jax_has_no_such_names(lacking, monkeypatch):
    """ "auto" goes on without; an explicit choice says what is missing."""
    assert make_plan(PLAIN, A100).backend == "cudnn"

    def import_module(name):
        if lacking is None:
            raise ImportError(name)
        return lacking

    monkeypatch.setattr(cudnn.importlib, "import_module", import_module)
    assert make_plan(PLAIN, A100).backend == "xla"
    with pytest.raises(NotImplementedError, match=r"cannot run this: JAX .* has no jax\._src.* with MaskType and dot"):
        make_plan(PLAIN, A100, backend="cudnn")


@pytest.mark.parametrize(
    "lacking", [{"sinks": True}, {"soft_cap": True}, {"value_dim": 32}], ids=lambda x: next(iter(x))
)
def test_what_it_lacks(lacking):
    problem = dataclasses.replace(PLAIN, **lacking)
    assert make_plan(problem, H200).backend != "cudnn"
    with pytest.raises(NotImplementedError, match="it has no sinks, no soft_cap and no other head_dim of v"):
        make_plan(problem, H200, backend="cudnn")


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
    for got, wanted in zip(run(backend="cudnn")(*spoilt), want, strict=True):
        assert_close(got, wanted, "bfloat16", scale=4)
