"""FP8 in JAX without jaxops: quantisation in jnp, the bfloat16 linear, and the FP8 linear that XLA gives cuBLASLt."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
CUBLASLT_FP8 = "__cublas$lt$matmul$f8"
_DIMENSIONS = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}
Named = dict[str, jax.Array]


def cast(x: jax.Array, axes: tuple[int, ...] | None, dtype=E4M3) -> tuple[jax.Array, jax.Array]:
    """(values, scale with ones on the reduced axes): the maximum over axes, a division, a clip, a cast."""
    x = x.astype(jnp.float32)
    most = float(jnp.finfo(dtype).max)
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scale = jnp.where(amax > 0, amax / most, 1.0)
    return jnp.clip(x / scale, -most, most).astype(dtype), scale


def _row_layout(x: jax.Array, scaling: str) -> tuple[jax.Array, jax.Array]:
    rows, columns = x.shape
    if scaling == "tensorwise":
        return cast(x, None)
    if scaling == "rowwise":
        return cast(x, (1,))
    high = BLOCK if scaling == "block_128x128" else 1
    values, scale = cast(x.reshape(rows // high, high, columns // BLOCK, BLOCK), (1, 3))
    return values.reshape(x.shape), scale[:, 0, :, 0]


def quantize(x: jax.Array, scaling: str, layouts: str) -> Named:
    """x in the given layouts, each by itself, the second one of the transpose. M and K are whole blocks."""
    if scaling == "tensorwise":
        values, scale = _row_layout(x, scaling)
        result = {"values": values, "scales": scale}
        return result if layouts == "row" else result | {"values_t": values.T, "scales_t": scale}
    values, scale = _row_layout(x, scaling)
    result = {"values": values, "scales": scale}
    if layouts == "both":
        values, scale = _row_layout(x.T, scaling)
        result |= {"values_t": values, "scales_t": scale}
    return result


def bf16_passes() -> dict[str, Callable[..., Named]]:
    """The plain linear: (x, w, dy) -> results by name. dy belongs to fwd+bwd only."""

    def fwd_bwd(x, w, dy):
        y, vjp = jax.vjp(jnp.matmul, x, w)
        dx, dw = vjp(dy)
        return {"y": y, "dx": dx, "dw": dw}

    return {"fwd": lambda x, w, dy: {"y": x @ w}, "fwd+bwd": fwd_bwd}


def _product(a, b, form: str, how: str, out_dtype) -> jax.Array:
    """The product of two (values, scale), contracted as "nn", "nt" or "tn".

    how: "scaled" dequantises both to bfloat16, which XLA turns into a cuBLASLt FP8 product (Flax's quantise-dequantise
    ops rely on that); "direct" multiplies the FP8 values and scales the result.
    """
    dimensions = (_DIMENSIONS[form], ((), ()))
    if how == "scaled":
        a, b = (values.astype(out_dtype) * scale.astype(out_dtype).reshape(()) for values, scale in (a, b))
        return lax.dot_general(a, b, dimensions, preferred_element_type=out_dtype)
    product = lax.dot_general(a[0], b[0], dimensions, preferred_element_type=out_dtype)
    return (product.astype(jnp.float32) * (a[1] * b[1]).reshape(())).astype(out_dtype)


def fp8_passes(how: str) -> dict[str, Callable[..., Named]]:
    """The linear with tensorwise current scaling and every cast, as Flax's: e4m3 forward, dy in e5m2."""

    def fwd(x, w, dy):
        return {"y": _product(cast(x, None), cast(w, None), "nn", how, x.dtype)}

    def fwd_bwd(x, w, dy):
        qx, qw, qdy = cast(x, None), cast(w, None), cast(dy, None, E5M2)
        y = _product(qx, qw, "nn", how, x.dtype)
        return {"y": y, "dx": _product(qdy, qw, "nt", how, x.dtype), "dw": _product(qx, qdy, "tn", how, w.dtype)}

    return {"fwd": fwd, "fwd+bwd": fwd_bwd}


def cublaslt_gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, K] @ b[N, K].T of FP8 values, unscaled: the form that cuBLASLt supports."""
    return lax.dot_general(a, b, (_DIMENSIONS["nt"], ((), ())), preferred_element_type=jnp.bfloat16)


def fp8_calls(compiled) -> int:
    """How many FP8 products of a compiled program cuBLASLt computes."""
    return compiled.as_text().count(f'custom_call_target="{CUBLASLT_FP8}"')
