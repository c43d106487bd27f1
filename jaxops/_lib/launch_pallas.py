"""The one way to launch a Pallas kernel that is lowered through Triton, and the rule for arrays of FP8 that its 32-bit offsets do not reach."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# JAX's lowering (jax/_src/pallas/triton/lowering.py, _compute_offsets_from_indices, up to 0.12) counts an array's elements in int32 up to 2^32 bytes. Arrays
# of 1-byte numbers in between have elements past what int32 reaches. Larger ones are counted in int64.
_REACHED, _WIDENED = 2**31, 2**32


def _is_misread(x) -> bool:
    """Whether offsets into an array of this shape and dtype overflow int32."""
    return x.dtype.itemsize == 1 and _REACHED < math.prod(x.shape) <= _WIDENED


def _readable_shape(x) -> tuple[int, ...]:
    """x's shape, or one of so many more rows that offsets are int64."""
    return (_WIDENED // math.prod(x.shape[1:]) + 1, *x.shape[1:]) if _is_misread(x) else x.shape


def launch(
    kernel: Callable,
    *operands: jax.Array,
    out: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    stages: int = 1,
    interpret: bool,
    name: str,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Calls a kernel whose refs are the whole operands and then the whole results.

    An operand or result of 1-byte numbers (FP8) with over 2^31 of them and at most 2^32 gets so many rows more that JAX counts its elements in int64. Such
    an operand is copied; such a result is sliced, which XLA may do by a copy. So a kernel must not read the length of the first axis of an FP8 ref.
    Under vmap, a batch of FP8 arrays of such a size is computed one after another; other batches are one launch.

    Args:
      kernel: of the operands' refs and the results' refs.
      out: of the result; or a sequence of them, for a list of results.
      grid: programs along each axis.
      warps, stages: of a program: its warps, and how many steps of a loop are loaded ahead.
      interpret: runs in Pallas' interpreter.
      name: what profilers show.
      aliases: numbers of operands whose memory becomes a result's, and of these results.
    """
    outs = [out] if isinstance(out, jax.ShapeDtypeStruct) else list(out)

    def call(*operands):
        readable = [jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, _readable_shape(x), strict=True)]) if _is_misread(x) else x for x in operands]
        found = pl.pallas_call(
            kernel,
            out_shape=[x.update(shape=_readable_shape(x)) for x in outs],
            grid=grid,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=name,
        )(*readable)
        return [x[: like.shape[0]] if _is_misread(like) else x for x, like in zip(found, outs, strict=True)]

    if any(x.dtype.itemsize == 1 for x in (*operands, *outs)):
        call = _batched_within_reach(call)
    found = call(*operands)
    return found[0] if isinstance(out, jax.ShapeDtypeStruct) else found


def _batched_within_reach(call: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """`call`, which under vmap goes one by one where the batched arrays would be misread, and else as JAX batches it. Under a second vmap likewise."""
    guarded = custom_vmap(call)

    @guarded.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array):
        axes = [0 if each else None for each in batched]
        every = jax.vmap(call, in_axes=axes, axis_size=size)
        results = jax.eval_shape(every, *operands)
        moving = [x for x, each in zip(operands, batched, strict=True) if each]
        if any(map(_is_misread, [*moving, *results])):

            def one(moving):
                rest = iter(moving)
                return guarded(*(next(rest) if each else x for x, each in zip(operands, batched, strict=True)))

            found = lax.map(one, moving)
        else:
            found = _batched_within_reach(every)(*operands)
        return found, [True] * len(found)

    return guarded
