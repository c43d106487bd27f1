"""Bad input: what was passed, what is needed, what to write instead."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.nn import ColumnParallelLinear, RowParallelLinear
from tests.parallel.cases import AXIS, mesh_of

X, W = jax.ShapeDtypeStruct((4, 6), "float32"), jax.ShapeDtypeStruct((6, 8), "float32")


def of(shape: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(f, *operands) -> None:
    """On every device of two, with whole operands."""
    jax.eval_shape(jax.shard_map(f, mesh=mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False), *operands)


@pytest.mark.parametrize("op", [jaxops.all_gather_matmul, jaxops.matmul_reduce_scatter])
@pytest.mark.parametrize(
    ("error", "match", "operands", "how"),
    [
        (ValueError, r"has shape \(4,\); it must be \[", (of((4,)), W), {}),
        (ValueError, r"w has shape \(6,\); it must be \[", (X, of((6,))), {}),
        (ValueError, r"w\.shape\[0\] is 5, but .\.shape\[1\] is 6", (X, of((5, 8))), {}),
        (TypeError, "is float32 and w is bfloat16: cast one of them, or pass compute", (X, of((6, 8), "bfloat16")), {}),
        (TypeError, "is int32; the kernels take", (of((4, 6), "int32"), W), {}),
        (NotImplementedError, "the kernel needs a Hopper GPU, and this is", (X, W), {"backend": "mosaic"}),
        (ValueError, r"rows has shape \(2,\); it must be a scalar", (X, W), {"rows": jnp.array([1, 2])}),
        (TypeError, "rows is float32; it must be an integer", (X, W), {"rows": jnp.float32(1)}),
        (TypeError, "rows is a bool; it must be an integer", (X, W), {"rows": True}),
        (ValueError, r"bias has shape \(7,\); it must be \(8,\)", (X, W), {"bias": jnp.zeros(7)}),
        (ValueError, "axis_name='other' is not an axis here", (X, W), {"axis_name": "other"}),
    ],
)  # fmt: skip
def test_arguments(op, error, match, operands, how):
    how = {"axis_name": AXIS} | how
    with pytest.raises(error, match=match):
        trace(lambda *operands: op(*operands, **how), *operands)


def test_rows_that_the_devices_do_not_divide():
    with pytest.raises(
        ValueError,
        match=r"h has 5 rows, which is no multiple of the 2 devices of axis 'tensor': pad them, and pass rows=5",
    ):
        trace(lambda h, w: jaxops.matmul_reduce_scatter(h, w, AXIS), of((5, 6)), W)


@pytest.mark.parametrize(
    ("error", "match", "w", "bias"),
    [
        (ValueError, "w is an empty tuple", (), None),
        (ValueError, "bias must be a tuple of 2", (W, W), (None,)),
        (ValueError, "bias must be a tuple of 1", (W,), jnp.zeros(8)),
        (TypeError, "bias is a tuple and w is one array", W, (jnp.zeros(8),)),
    ],
)  # fmt: skip
def test_tuples(error, match, w, bias):
    with pytest.raises(error, match=match):
        trace(lambda x, w: jaxops.all_gather_matmul(x, w, AXIS, bias=bias), X, w)


def test_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"axis_name='tensor' is not an axis here: call inside jax\.shard_map"):
        jaxops.all_gather_matmul(jnp.ones((4, 6)), jnp.ones((6, 8)), AXIS)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layers(kind):
    from flax import nnx

    layer = kind(6, 8, AXIS, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"axis_name='tensor' is not an axis here: call this layer inside jax\.shard_map"
    ):
        layer(jnp.ones((4, 6)))
    with pytest.raises(
        ValueError, match=r"this device has a kernel of shape \(6, 8\), and its part of \(6, 8\) over axis 'tensor' is"
    ):
        trace(layer, of((4, 6 if kind is ColumnParallelLinear else 3)))
    with pytest.raises(ValueError, match=r"x has shape \(4, 5\); it must be \[rows, "):
        trace(layer, of((4, 5)))
    odd = kind(7, 7, AXIS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="7 features are no multiple of the 2 devices of axis 'tensor'"):
        trace(odd, of((4, 7)))
    with pytest.raises(ValueError, match="in_features=0 must be at least 1"):
        kind(0, 8, AXIS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="backend='pallas'"):
        kind(6, 8, AXIS, backend="pallas", rngs=nnx.Rngs(0))
