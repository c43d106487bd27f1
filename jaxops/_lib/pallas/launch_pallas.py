"""The launch of every Pallas kernel, lowered through Triton, with int64 offsets for the FP8 arrays that need them."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.numerics.instructions import assembled_by
from jaxops._lib.planning.costs import Cost

# JAX's lowering (jax/_src/pallas/triton/lowering.py, _compute_offsets_from_indices, up to 0.12) uses int32 element
# offsets for arrays of at most 2^32 bytes. They overflow in an array of 1-byte numbers of that size with over 2^31
# elements.
_MOST_INT32, _MOST_BYTES = 2**31, 2**32


def _assemble(asm: str, x: jax.Array, constraints: str, pack: int) -> jax.Array:
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    how = {"constraints": constraints, "pack": pack, "result_shape_dtypes": [like]}
    return plgpu.elementwise_inline_asm(asm, args=[x], **how)[0]


def _overflows(x) -> bool:
    """Whether offsets into an array of this shape and dtype overflow int32."""
    return x.dtype.itemsize == 1 and _MOST_INT32 < math.prod(x.shape) <= _MOST_BYTES


def _widened_shape(x) -> tuple[int, ...]:
    """x's shape, or one of so many more rows that offsets are int64."""
    return (_MOST_BYTES // math.prod(x.shape[1:]) + 1, *x.shape[1:]) if _overflows(x) else x.shape


def launch(
    kernel: Callable, *operands: jax.Array, out: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...], warps: int, stages: int = 1, interpret: bool, name: str, flops: int,
    bytes_accessed: int | None = None, aliases: dict[int, int] | None = None,
) -> Any:  # fmt: skip
    """Calls a kernel whose refs are the whole operands, then the whole results.

    An operand or result of 1-byte numbers (FP8) with more than 2^31 and at most 2^32 elements gets enough extra leading
    rows that JAX uses int64 offsets: such an operand is copied, and such a result is sliced, which may be a copy too.
    So a kernel must not read the length of the first axis from an FP8 ref. Under vmap, batches whose FP8 arrays would
    have such a size run one example after another; other batches are one launch.

    Args:
      kernel: takes the operands' refs and the results' refs.
      out: of the result; or a sequence of them, for a list of results.
      grid: programs along each axis.
      warps, stages: warps per program, and software-pipeline stages of its loops.
      interpret: runs in Pallas' interpreter.
      name: shown by profilers.
      flops: see `Cost`.
      bytes_accessed: where each operand and each result once is not the least traffic: an operand that only gives its
        memory to a result is not read.
      aliases: from an operand's number to the number of the result that is written to its memory.
    """
    outs = [out] if isinstance(out, jax.ShapeDtypeStruct) else list(out)
    cost = Cost.of(flops, operands, outs, bytes_accessed)
    estimate = pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=0)

    def body(*refs):
        with Cost.detached(), assembled_by(None if interpret else _assemble):
            kernel(*refs)

    def call(*operands):
        widened = [
            jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, _widened_shape(x), strict=True)]) if _overflows(x) else x
            for x in operands
        ]
        kernel_call = pl.pallas_call(
            body,
            out_shape=[x.update(shape=_widened_shape(x)) for x in outs],
            grid=grid,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            cost_estimate=estimate,
            interpret=interpret,
            name=name,
        )
        # The interpreter's call is many operations, of which each would carry the whole launch's cost.
        with contextlib.nullcontext() if interpret else cost.attached():
            found = kernel_call(*widened)
        return [x[: like.shape[0]] if _overflows(like) else x for x, like in zip(found, outs, strict=True)]

    if any(x.dtype.itemsize == 1 for x in (*operands, *outs)):
        call = _batched_within_reach(call)
    found = call(*operands)
    return found[0] if isinstance(out, jax.ShapeDtypeStruct) else found


def launch_named(
    kernel: Callable[[dict], None],
    operands: Mapping[str, jax.Array | None],
    out: dict[str, jax.ShapeDtypeStruct],
    *,
    flops: int,
    aliases: dict[str, str] | None = None,
    **how: Any,
) -> dict[str, jax.Array]:
    """`launch` of a kernel that takes one dict of refs, without those of None; returns the results by name."""
    given = {name: x for name, x in operands.items() if x is not None}
    numbers = {[*given].index(operand): [*out].index(result) for operand, result in (aliases or {}).items()}

    def with_names(*refs):
        kernel(dict(zip((*given, *out), refs, strict=True)))

    results = launch(with_names, *given.values(), out=[*out.values()], flops=flops, aliases=numbers, **how)
    return dict(zip(out, results, strict=True))


def _batched_within_reach(call: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """`call`, which under vmap runs example by example where a batched array's offsets would overflow, and else as JAX
    batches it. The same holds under a further vmap."""
    guarded = custom_vmap(call)

    @guarded.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array):
        axes = [0 if each else None for each in batched]
        every = jax.vmap(call, in_axes=axes, axis_size=size)
        results = jax.eval_shape(every, *operands)
        moving = [x for x, each in zip(operands, batched, strict=True) if each]
        if any(map(_overflows, [*moving, *results])):

            def one(moving):
                rest = iter(moving)
                return guarded(*(next(rest) if each else x for x, each in zip(operands, batched, strict=True)))

            found = lax.map(one, moving)
        else:
            found = _batched_within_reach(every)(*operands)
        return found, [True] * len(found)

    return guarded
