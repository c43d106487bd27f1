"""Linear layers of a decoder, with float32 parameters or a checkpoint's float8 ones; norms and gated units."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxops
from models.decoder.config import DecoderConfig
from models.distributed.tensor_parallel import narrow, wide
from models.precision import linear_layer

BLOCK = 128


def decodes(x: jax.Array) -> bool:
    """Whether x [B, T, ...] has a single token a row."""
    return x.ndim == 3 and x.shape[1] == 1


class StoredFp8(nnx.Module):
    """Matrices [*leading, in, out] as DeepSeek-V3 has them, [*leading, out, in]: float8, a scale for each 128 x 128."""

    def __init__(self, *sizes: int):
        *leading, ins, outs = sizes
        blocks = (*leading, -(-outs // BLOCK), -(-ins // BLOCK))
        self.weight = nnx.Param(jnp.zeros((*leading, outs, ins), jnp.float8_e4m3fn))
        self.scale = nnx.Param(jnp.ones(blocks, jnp.float32))

    def quantized(self, dtype: str) -> jaxops.Quantized:
        return jaxops.Quantized.from_deepseek(self.weight[...], self.scale[...], dtype)


class StoredFp8Linear(StoredFp8):
    """A linear layer of a stored matrix; its input is quantized in blocks of 128, but a single token a row, as in
    decoding, is not: reading the matrix takes the time then."""

    def __init__(self, ins: int, outs: int, *, config: DecoderConfig, use_bias: bool, rngs: nnx.Rngs):
        super().__init__(ins, outs)
        self.config = config
        self.bias = nnx.Param(jnp.zeros(outs, jnp.float32)) if use_bias else nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.config.dtype
        how: dict[str, Any] = {"quantize_lhs": not decodes(x), "backend": self.config.backend}
        y: Any = jaxops.fp8_matmul(x.astype(dtype), self.quantized(dtype), recipe="blockwise", **how)
        return y if self.bias is None else y + self.bias[...].astype(dtype).reshape(*(1,) * (y.ndim - 1), -1)


class SideBySide(nnx.Module):
    """Linear layers of one input as one product, for inference: decoding has few rows, and then kernels are short."""

    def __init__(self, layers: Sequence[Any]):
        self.layer = nnx.clone(layers[0])
        # The axis of columns: of a stored matrix and its scales, of any other matrix, and of both biases.
        for name, axis in (("weight", 0), ("scale", 0), ("kernel", 1), ("bias", 0)):
            parts = [part[...] for layer in layers if (part := getattr(layer, name, None)) is not None]
            if parts:
                setattr(self.layer, name, nnx.Param(jnp.concatenate(parts, axis)))
        # Where each one's columns end, but for the last.
        self.ends = tuple(itertools.accumulate(map(_columns, layers[:-1])))

    def parts(self, x: jax.Array) -> list[jax.Array]:
        """Each one's result."""
        return jnp.split(self.layer(x), self.ends, axis=-1)


def join(module: nnx.Module, whole: str, *parts: str) -> None:
    """Replaces the module's layers `parts` by the attribute `whole`, a `SideBySide`, where they are plain, or stored
    float8 matrices whose blocks of 128 columns fit side by side."""
    layers = [getattr(module, part) for part in parts]
    stored = all(isinstance(x, StoredFp8Linear) for x in layers) and not any(_columns(x) % BLOCK for x in layers[:-1])
    if stored or all(type(x) is nnx.Linear for x in layers):
        setattr(module, whole, SideBySide(layers))
        for part in parts:
            setattr(module, part, nnx.data(None))


def _columns(layer: Any) -> int:
    return layer.weight.shape[0] if isinstance(layer, StoredFp8Linear) else layer.kernel.shape[1]


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, *how: Any, **more: Any) -> jax.Array:
    """`lax.dot_general` of rows x [..., in] and a kernel [in, out], with a single row, as in decoding, taken twice.

    XLA for GPUs turns a product of one row into two passes: one writes every product with an element of the kernel, the
    other sums them (H200, 2026-11-24: 3.4 of the 8.4 ms that the kernels of a step of Qwen3-30B-A3B's sizes take).
    """
    if x.size != x.shape[-1]:
        return lax.dot_general(x, kernel, dimension_numbers, *how, **more)
    twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.size))
    y = lax.dot_general(twice, kernel, (((1,), (0,)), ((), ())), *how, **more)
    return y[0].reshape(*x.shape[:-1], -1)


def linear_of(config: DecoderConfig) -> Callable[..., Any]:
    """The class of linear layers, called with sizes, use_bias and rngs."""
    if config.stored_fp8:
        return functools.partial(StoredFp8Linear, config=config)
    how = {"dot_general": dot_general} if config.recipe is None else {}
    return functools.partial(linear_layer(config.recipe, config.backend), dtype=jnp.dtype(config.dtype), **how)


def matrix_of(linear: Any, dtype: Any) -> jax.Array:
    """The matrix [in, out] of a linear layer without a recipe."""
    if isinstance(linear, StoredFp8Linear):
        return jaxops.dequantize(linear.quantized(jnp.dtype(dtype).name).T).T
    return linear.kernel[...].astype(dtype)


def normalized(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """norm(x) (Zhang and Sennrich 2019, arXiv:1910.07467), written so that XLA needs few kernels for it.

    Numbers are those of `nnx.RMSNorm`, up to the order of float32 roundings. Statistics are float32. The backward keeps
    only the input: recomputing the float32 intermediates costs less than storing them.

    XLA for GPUs makes one kernel of a norm if only unary operations are between its reduction and the product with x
    (JAX 0.11.2). So epsilon and the division by the number of features are inside the sum, and the scale comes last.
    """
    assert norm.scale is not None

    def run(scale: jax.Array, x: jax.Array) -> jax.Array:
        x_wide = x.astype(jnp.float32)
        terms = (jnp.square(x_wide) + norm.epsilon) * (1 / x.shape[-1])  # their sum: the mean square and epsilon
        factors = lax.rsqrt(jnp.sum(terms, axis=-1, keepdims=True))
        scale = scale.astype(norm.dtype).astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), -1)
        return (x_wide * factors * scale).astype(norm.dtype)

    return jax.checkpoint(run, prevent_cse=False)(norm.scale[...], x)


class GatedUnit(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, hidden: int, *, rngs: nnx.Rngs):
        linear = functools.partial(linear_of(config), use_bias=config.mlp_bias, rngs=rngs)
        self.gate = linear(config.width, hidden)
        self.up = linear(config.width, hidden)
        self.gate_up: SideBySide | None = nnx.data(None)  # instead of these: `join`
        self.down = linear(hidden, config.width)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, None]:
        """mask: as of `Experts`, for which this stands; unused."""
        gate, up = wide(x, self.gate, self.up) if self.gate_up is None else self.gate_up.parts(x)
        gate, up = checkpoint_name(gate, "mlp.gate"), checkpoint_name(up, "mlp.up")
        return narrow(jax.nn.silu(gate) * up, self.down), None
