"""Kernels that JAX lacks, as differentiable ops: `import jaxops`, then an ordinary `jax.jit` training step.

>>> import jax, jax.numpy as jnp, jaxops
>>> tokens = jnp.ones((8, 16), jnp.bfloat16)  # rows sorted by expert
>>> experts = jnp.ones((4, 16, 32), jnp.float32)
>>> offsets = jnp.array([0, 3, 3, 7, 8], jnp.int32)  # on the device: new values never recompile
>>> loss = lambda w: jaxops.grouped_matmul(tokens, w, offsets, compute_dtype=jnp.bfloat16).astype(jnp.float32).sum()
>>> jax.jit(jax.grad(loss))(experts)[:, 0, 0]
Array([3., 0., 4., 1.], dtype=float32)
"""

import importlib
from typing import TYPE_CHECKING, Any

# Before anything is traced.
from jaxops._lib.planning import jit_keys as _jit_keys  # noqa: F401

if TYPE_CHECKING:  # for type checkers and editors; at run time a name is imported on first use
    from jaxops.inspecting import inspect
    from jaxops.lengths import bucket_length
    from jaxops.ops.adaln import adaln, gated_residual, gated_residual_adaln
    from jaxops.ops.cached_attention import cached_attention
    from jaxops.ops.fp8_matmul import fp8_grouped_matmul, fp8_matmul
    from jaxops.ops.grouped_glu import grouped_glu
    from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad, ragged_dot, ragged_dot_general
    from jaxops.ops.linear_cross_entropy import linear_cross_entropy
    from jaxops.ops.modality_grouped_matmul import modality_grouped_matmul
    from jaxops.ops.moe_mlp import moe_mlp
    from jaxops.ops.packed_attention import packed_attention
    from jaxops.ops.permute import combine, permute
    from jaxops.ops.quantize import Quantized, dequantize, quantize
    from jaxops.ops.route import Routing, route, route_choices, update_router_bias
    from jaxops.parallel import all_gather_matmul, matmul_reduce_scatter

__version__ = "0.1.0"
__all__ = [
    "Quantized", "Routing", "adaln", "all_gather_matmul", "bucket_length", "cached_attention", "combine", "dequantize",
    "fp8_grouped_matmul", "fp8_matmul", "gated_residual", "gated_residual_adaln", "grouped_glu", "grouped_matmul",
    "grouped_wgrad", "inspect", "linear_cross_entropy", "matmul_reduce_scatter", "modality_grouped_matmul", "moe_mlp",
    "packed_attention", "permute", "quantize", "ragged_dot", "ragged_dot_general", "route", "route_choices",
    "update_router_bias",
]  # fmt: skip
_MODULES = {
    "jaxops.inspecting": ("inspect",),
    "jaxops.lengths": ("bucket_length",),
    "jaxops.ops.adaln": ("adaln", "gated_residual", "gated_residual_adaln"),
    "jaxops.ops.cached_attention": ("cached_attention",),
    "jaxops.ops.fp8_matmul": ("fp8_grouped_matmul", "fp8_matmul"),
    "jaxops.ops.grouped_glu": ("grouped_glu",),
    "jaxops.ops.grouped_matmul": ("grouped_matmul", "grouped_wgrad", "ragged_dot", "ragged_dot_general"),
    "jaxops.ops.linear_cross_entropy": ("linear_cross_entropy",),
    "jaxops.ops.modality_grouped_matmul": ("modality_grouped_matmul",),
    "jaxops.ops.moe_mlp": ("moe_mlp",),
    "jaxops.ops.packed_attention": ("packed_attention",),
    "jaxops.ops.permute": ("combine", "permute"),
    "jaxops.ops.quantize": ("Quantized", "dequantize", "quantize"),
    "jaxops.ops.route": ("Routing", "route", "route_choices", "update_router_bias"),
    "jaxops.parallel": ("all_gather_matmul", "matmul_reduce_scatter"),
}
_SUBPACKAGES = ("nn", "offload", "ops", "parallel", "profiling", "tuning")


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(module), name)
            globals()[name] = found  # __getattr__ is then not called for it again
            return found
    if name in _SUBPACKAGES:
        return importlib.import_module(f"jaxops.{name}")
    raise AttributeError(f"module 'jaxops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
