"""What a model asks for instead of its products, so that the mesh axis `tensor` can split them.

Tensor and sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198): a device of the axis has its own rows of
the residual stream, `wide` gathers all rows and multiplies them by the device's own columns (heads, hidden units,
words), and `narrow` multiplies by its own rows of a kernel and sums the products to each device's rows. Everything
between runs on own rows. Rows are those of a batch, flattened: device d of N has the d-th of N equal runs.

Outside of `models.distributed.mesh.split_objective`, and where the axis has one device, each function is the plain one:
a model is written once.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxops
from jaxops.nn import Fp8Linear
from models.distributed.mesh import TENSOR
from models.embedding import look_up


def devices() -> int:
    """Of the axis `tensor`."""
    try:
        return lax.axis_size(TENSOR)
    except NameError:
        return 1


def wide(x: jax.Array, *layers: Any) -> list[jax.Array]:
    """The result for all rows, from own rows, of each `nnx.Linear` or each `Fp8Linear`: own columns. One gather."""
    if devices() == 1:
        return [layer(x) for layer in layers]
    x = x.reshape(-1, x.shape[-1])
    for layer in layers:
        _check_is_split(layer, axis=1)
    if isinstance(layers[0], Fp8Linear):
        x = lax.all_gather(x.astype(layers[0].dtype), TENSOR, tiled=True)
        return [_in_fp8(layer, x, bias=True) for layer in layers]
    biases = tuple(None if layer.bias is None else layer.bias[...] for layer in layers)
    kernels = tuple(layer.kernel[...] for layer in layers)
    return list(jaxops.all_gather_matmul(x, kernels, TENSOR, bias=biases, compute_dtype=layers[0].dtype))


def narrow(h: jax.Array, layer: Any) -> jax.Array:
    """The layer's result for own rows, from own columns of all rows."""
    if devices() == 1:
        return layer(h)
    h = h.reshape(-1, h.shape[-1])
    _check_is_split(layer, axis=0)
    bias = None if layer.bias is None else layer.bias[...]
    if not isinstance(layer, Fp8Linear):
        return jaxops.matmul_reduce_scatter(h, layer.kernel[...], TENSOR, bias=bias, compute_dtype=layer.dtype)
    y = lax.psum_scatter(_in_fp8(layer, h, bias=False), TENSOR, tiled=True)
    return y if bias is None else y + bias.astype(y.dtype)[None]


def _in_fp8(layer: Fp8Linear, x: jax.Array, *, bias: bool) -> jax.Array:
    y = layer.multiply(x)
    return y if layer.bias is None or not bias else y + layer.bias[...].astype(y.dtype)[None]


def _check_is_split(layer: Any, axis: int) -> None:
    sizes = (layer.in_features, layer.out_features)
    if layer.kernel.shape[axis] * devices() != sizes[axis]:
        raise ValueError(
            f"a kernel {sizes} has shape {layer.kernel.shape} on one of the {devices()} devices of axis {TENSOR!r}: "
            f"axis {axis} must be split over them, as RULES of models/distributed/mesh.py say."
        )


def own_rows(x: jax.Array) -> jax.Array:
    """This device's rows of x [rows, ...], which all devices have."""
    if devices() == 1:
        return x
    check_rows(x.shape[0], devices())
    return lax.dynamic_slice_in_dim(x, first_row(x.shape[0]), x.shape[0] // devices())


def check_rows(rows: int, devices: int) -> None:
    """Checks whether the devices of the axis divide the rows of a part of the batch."""
    if rows % devices:
        raise ValueError(
            f"a part of the batch has {rows} rows, which tensor={devices} does not divide: take a batch and a length "
            f"whose product, for each part, is a multiple of {devices}, or a tensor that divides {rows}."
        )


def check_heads(devices: int, **heads: int) -> None:
    """Checks whether the devices of the axis divide the numbers of heads."""
    for name, number in heads.items():
        if number % devices:
            raise ValueError(
                f"tensor={devices} does not divide {name}, {number}: attention is split by heads. Write a number that "
                f"divides {math.gcd(*heads.values())}."
            )


def first_row(rows: int) -> jax.Array | int:
    """The first of own rows, of all `rows`."""
    return 0 if devices() == 1 else lax.axis_index(TENSOR) * (rows // devices())


def all_rows(*parts: jax.Array) -> list[jax.Array]:
    """All rows of arrays [rows, columns], from own ones, in one gather."""
    if devices() == 1:
        return list(parts)
    ends = [sum(part.shape[1] for part in parts[: number + 1]) for number in range(len(parts) - 1)]
    return jnp.split(lax.all_gather(jnp.concatenate(parts, axis=1), TENSOR, tiled=True), ends, axis=1)


class WholeLinear(nnx.Linear):
    """`nnx.Linear` whose columns are split, and whose result is not: for rows that all devices have.

    For conditions: few rows, so that the results are cheaper to gather than the kernel. In FP8 the cast of the kernel
    would take longer than such a product saves.
    """

    def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().__call__(x)
        if devices() == 1:
            return y
        _check_is_split(self, axis=1)
        return lax.all_gather(y, TENSOR, axis=y.ndim - 1, tiled=True)


def total(x: Any) -> Any:
    """The sum of what the devices have from their own rows or words; of each array of a tree."""
    return x if devices() == 1 else lax.psum(x, TENSOR)


def embed(layer: nnx.Embed, tokens: jax.Array, backend: str) -> jax.Array:
    """Embeddings of tokens, [..., width]; over several devices those of own rows, [rows, width].

    Each device has some words of the vocabulary. backend: as of `look_up`.
    """
    table = layer.embedding[...]
    of = lambda words: cast(jax.Array, look_up(table, words, layer.dtype, backend))
    return of(tokens) if devices() == 1 else _looked_up(of, tokens.ravel(), table.shape[0])


def rows_at(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """x[numbers], [N, columns]; over several devices own ones of these N rows, from own rows of x."""
    return x[numbers] if devices() == 1 else _looked_up(lambda at: x[at], numbers, x.shape[0])


def _looked_up(look_up: Callable[[jax.Array], jax.Array], numbers: jax.Array, count: int) -> jax.Array:
    """Own ones of the rows of numbers [N], each looked up on the device that has it, of `count` a device."""
    check_rows(numbers.shape[0], devices())
    at = numbers - lax.axis_index(TENSOR) * count  # from this device's first
    own = (at >= 0) & (at < count)
    return lax.psum_scatter(jnp.where(own[:, None], look_up(jnp.clip(at, 0, count - 1)), 0), TENSOR, tiled=True)


def attend(layer: nnx.Embed, x: jax.Array) -> jax.Array:
    """Products with the embeddings, for all rows from own ones: of own words."""
    if devices() == 1:
        return layer.attend(x)
    words = layer.embedding[...].T
    return jaxops.all_gather_matmul(x.reshape(-1, x.shape[-1]), words, TENSOR, compute_dtype=layer.dtype)


def cross_entropies(layer: nnx.Linear | nnx.Embed, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The sum of the cross-entropies, in nats, of all rows' logits: products of own rows x [..., width] with a linear
    layer or the embeddings, which over several devices have own words.

    Args:
      targets: int32, one for each row of all devices; a row of -1 does not count.
    """
    x, axis = x.reshape(-1, x.shape[-1]), None
    if devices() > 1:
        x, axis = lax.all_gather(x.astype(layer.dtype), TENSOR, tiled=True), TENSOR
    how: dict[str, Any] = {"compute_dtype": layer.dtype, "ignore_index": -1, "reduction": "sum", "axis_name": axis}
    if isinstance(layer, nnx.Embed):
        return jaxops.linear_cross_entropy(x, layer.embedding[...], targets, transpose_w=True, **how)
    return jaxops.linear_cross_entropy(x, layer.kernel[...], targets, **how)
