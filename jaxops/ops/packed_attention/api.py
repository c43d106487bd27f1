"""The public function: checks, the plan, then the custom_vjp of the passes."""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from jaxops._lib.arrays.checks import (
    check_exact,
    check_flag,
    check_float,
    check_integer,
    check_number,
    check_offsets,
    check_size,
)
from jaxops._lib.arrays.differentiable import differentiable, differentiable_as
from jaxops._lib.arrays.precision import resolve_precision
from jaxops._lib.arrays.residual_names import named
from jaxops.ops.packed_attention.bwd_pallas import backward_pallas
from jaxops.ops.packed_attention.cudnn import attend_cudnn
from jaxops.ops.packed_attention.fwd_pallas import forward_pallas
from jaxops.ops.packed_attention.plan import PLANNER, Arrays, Plan, Problem, Spec
from jaxops.ops.packed_attention.visible import most_pairs, visible_rows
from jaxops.ops.packed_attention.xla import along_rows, backward_xla, forward_xla


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_offsets: jax.Array, *, causal: bool = False,
    kv_offsets: jax.Array | None = None, scale: float | None = None, window: int | None = None,
    visible_until: jax.Array | None = None, sinks: jax.Array | None = None, soft_cap: float | None = None,
    precision: lax.PrecisionLike = None, longest: int | None = None, crowd: int | None = None, backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax attention of each row over the rows of its own sequence, of sequences that are packed one after another.

    Sequence s is rows `sequence_offsets[s]` to `sequence_offsets[s + 1] - 1`. Sequences may be empty and of any length;
    the offsets stay on the device, and new values never recompile. No row sees another sequence, whatever the offsets
    are; but a NaN or infinity in k or v of one sequence may make rows of its neighbours NaN, as zero times NaN is NaN.
    Rows outside all sequences are written as zeros; their input values (NaN included) affect no output and no gradient.
    So are rows that see nothing. Differentiable (reverse mode) in q, k, v and sinks. Deterministic, but for cuDNN's
    backward.

    >>> import jax.numpy as jnp, jaxops
    >>> x = jnp.arange(5.)[:, None, None]
    >>> offsets = jnp.array([0, 3, 4], jnp.int32)  # rows 0 to 2, row 3; row 4 is outside
    >>> jaxops.packed_attention(0 * x, x, x, offsets).ravel()
    Array([1., 1., 1., 3., 0.], dtype=float32)
    >>> jaxops.packed_attention(0 * x, x, x, offsets, causal=True).ravel()
    Array([0. , 0.5, 1. , 3. , 0. ], dtype=float32)

    A document of text and images (as in Transfusion): a row of text sees the past and itself, a row of an image the
    past and all of its image.

    >>> ends = jnp.array([1, 3, 3, 4, 5], jnp.int32)  # rows 1 and 2 are an image
    >>> jaxops.packed_attention(0 * x, x, x, offsets, visible_until=ends).ravel()
    Array([0., 1., 1., 3., 0.], dtype=float32)

    Args:
      q: [T, heads, head_dim], bfloat16, float16 or float32. Scores, softmax and sums are float32. A row whose largest
        score is 2**20 or more in magnitude has the right output and NaN gradients: float32 scores are an eighth
        apart there, too coarse for the backward. Only cuDNN's gradients of such rows are wrong.
      k: [S, kv_heads, head_dim] in q's dtype; heads / kv_heads queries share a key and a value.
      v: [S, kv_heads, value_dim] in q's dtype; value_dim may be another than head_dim (DeepSeek has 128 and 192).
      sequence_offsets: [B + 1] int32, non-decreasing, within 0 to T. Other values give unspecified rows, but no access
        out of bounds.
      causal: row i of a sequence sees keys 0 to i of it. Where kv_offsets give a sequence more or fewer keys than
        queries, both end together: the last query sees all keys, the one before it all but the last, and so on.
      kv_offsets: [B + 1] int32, within 0 to S, where sequence s has other rows of k and v than of q. Without it S is T.
      scale: factor on the scores, a Python number; head_dim ** -0.5 by default.
      window: a row sees at most this many rows before its own, and without causal and visible_until as many after it.
        A row's own key is counted from the end, as by causal.
      visible_until: [T] int32, instead of causal: the first row of k and v that each row of q sees no more. A row sees
        from the start of its own sequence (or of its window) up to there, at most to the sequence's end. Of a row of
        text that is its own index + 1, of a row of an image the row after the image.
      sinks: [heads], a score beside those of the keys, without a value (gpt-oss); its share is lost. float32.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`, as in Gemma 2; None for no cap. "triton" has the
        GPU's approximate tanh.
      precision: of float32 products, as in `jax.lax.dot`. None follows `jax_default_matmul_precision`.
      longest: rows of the longest sequence that may come, if known: only for the estimate of what a call costs, by
        which XLA schedules and `jaxops.profiling` reports.
      crowd: has no effect any more; a DeprecationWarning.
      backend: "auto" takes "triton", the kernels for Hopper, for bfloat16 and float16 and a head_dim and value_dim that
        are multiples of 8 up to 256 (Python 3.12). Elsewhere it takes "cudnn" where that can run (on a GPU, bfloat16 or
        float16, causal or whole sequences), "pallas" on a GPU for other masks, sinks and soft_cap, and "xla". Each of
        them runs or raises ("pallas" is interpreted on a CPU).
      plan: a `Plan`, instead of the tuned or heuristic one.

    Returns:
      [T, heads, value_dim] in q's dtype.

    Raises:
      ValueError: shapes that do not fit together, causal with visible_until, a soft_cap that is not positive, an
        unknown backend.
      TypeError: unsupported dtypes, numbers that are no Python numbers; forward-mode differentiation (JAX's error).
      NotImplementedError: a backend that cannot run this call, such as "cudnn" of float32, with visible_until or with
        sinks; a precision algorithm that the kernels do not have.

    Residuals: named "attention.q", "attention.k", "attention.v", "attention.out", "attention.lse"; all of cuDNN's are
    "attention.cudnn".

    Source: FlashAttention-2 and, on Hopper, FlashAttention-3 (Dao 2023, arXiv:2307.08691; Shah et al. 2024,
    arXiv:2407.08608); the mask of text and images is that of Transfusion (Zhou et
    al. 2024, arXiv:2408.11039).
    """
    causal = check_flag("causal", causal)
    _check_shapes(q, k, v, sequence_offsets, kv_offsets)
    if q.shape[2] == 0:  # all scores are zero
        q, k = (jnp.pad(x, ((0, 0), (0, 0), (0, 1))) for x in (q, k))
    (T, N, H), (S, K, V) = q.shape, v.shape
    if visible_until is not None:
        what = "for each row of q the first row of k that it sees no more"
        check_exact("visible_until", visible_until, "int32", "[T]", (T,), what)
        if causal:
            hint = "leave causal away: a causal row's visible_until is its own index + 1."
            raise ValueError(f"visible_until and causal=True both say where each row's keys end; {hint}")
    if sinks is not None:
        check_exact("sinks", sinks, "float32", "[heads]", (N,), "for each head a score beside those of the keys")
    if soft_cap is not None and (soft_cap := check_number("soft_cap", soft_cap)) <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap.")
    factor = H**-0.5 if scale is None else check_number("scale", scale)
    window = None if window is None else check_integer("window", window, 0)
    longest = None if longest is None else check_integer("longest", longest, 1)
    if crowd is not None:
        check_integer("crowd", crowd, 1)
        warnings.warn(
            "packed_attention: crowd has no effect any more; leave it away.", DeprecationWarning, stacklevel=2
        )
    precision, compute = resolve_precision(precision, q.dtype)
    mask = "rows" if window is not None or visible_until is not None else "causal" if causal else "whole"
    more = V, sinks is not None, soft_cap is not None
    problem = Problem(T, S, N, K, H, q.dtype.name, mask, kv_offsets is not None, *more)
    B = sequence_offsets.shape[0] - 1
    chosen, q, k, v, sequence_offsets, kv_offsets, visible_until, sinks = PLANNER.prepare(
        problem, backend, plan, q, k, v, sequence_offsets, kv_offsets, visible_until, sinks
    )
    if 0 in (T, S, N, V, B):  # no row sees anything
        return jnp.zeros((T, N, V), q.dtype)
    limits = {"T": T, "S": S, "causal": causal, "window": window}
    arrays = Arrays(q, k, v, *visible_rows(sequence_offsets, kv_offsets, visible_until, **limits), sinks=sinks)
    if chosen.backend == "cudnn":
        return _cudnn(arrays, sequence_offsets, causal=causal, scale=factor)
    pairs = most_pairs(T=T, S=S, causal=causal, window=window, free=visible_until is not None, longest=longest)
    spec = Spec(factor, precision, pairs, soft_cap)
    out = _call(spec, chosen, False, *(x.astype(compute) for x in arrays[:3]), *arrays[3:])[0]
    return out.astype(q.dtype)


def _check_shapes(q, k, v, sequence_offsets, kv_offsets) -> None:
    check_float("q", q, "[T, heads, head_dim]")
    for name, x, width in (("k", k, "head_dim"), ("v", v, "value_dim")):
        check_float(name, x, f"[S, kv_heads, {width}]")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} and q is {q.dtype}: cast one of them.")
    check_size("head_dim of k", k.shape[2], "that of q", q.shape[2])
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; rows and kv_heads must be equal.")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads if kv_heads else heads:
        needed = "each key and value serves as many heads of q: heads must be a multiple of kv_heads."
        raise ValueError(f"q has {heads} heads and k and v have {kv_heads}; {needed}")
    check_offsets(sequence_offsets, "sequence_offsets", "B")
    if kv_offsets is None:
        hint = "S of k and v without kv_offsets (rows of queries and keys are the same)"
        check_size(hint, k.shape[0], "T of q", q.shape[0])
    else:
        check_offsets(kv_offsets, "kv_offsets", "B")
        wanted = "len(sequence_offsets) (the same sequences)"
        check_size("len(kv_offsets)", kv_offsets.shape[0], wanted, sequence_offsets.shape[0])


def _cudnn(arrays: Arrays, sequence_offsets: jax.Array, **options: Any) -> jax.Array:
    q, k, v, first, end, *_ = arrays
    # Rows in a sequence see themselves, and queries and keys are the same rows.
    inside = (first < end)[:, None, None]
    q, k, v = (jnp.where(inside, x, 0) for x in (q, k, v))
    out = named(functools.partial(attend_cudnn, **options), "attention.cudnn")(q, k, v, sequence_offsets)
    return jnp.where(inside, out, 0)


def _forward(spec: Spec, plan: Plan, save: bool, *operands: Any) -> tuple[jax.Array, ...]:
    """(out [T, N, V],), and with `save` lse float32 [N, T], each row's logarithm of the sum of exponentials, which gets
    no gradient."""
    arrays = Arrays(*operands)
    if plan.backend == "triton":
        from jaxops.ops.packed_attention.fwd_triton import forward_triton  # jax-triton needs Python >= 3.12

        assert plan.fwd is not None  # make_plan fills what a backend has
        kernel = functools.partial(forward_triton, spec, plan.fwd, cores=plan.on.cores)
        results = sequential_vmap(kernel)(arrays)  # a jax-triton call has no batching rule
        return results if save else results[:1]
    if plan.backend == "pallas":
        assert plan.fwd is not None
        return forward_pallas(spec, plan.fwd, arrays, save=save, interpret=plan.on.interpret)
    assert plan.block is not None
    out, lse = forward_xla(spec, plan.block, arrays)
    return (out, lse) if save else (out,)


def _call_fwd(spec: Spec, plan: Plan, save: bool, *operands: Any):
    arrays = Arrays(*operands)
    # _call, not _forward: a second derivative differentiates this.
    q, k, v = (checkpoint_name(getattr(arrays, name), f"attention.{name}") for name in ("q", "k", "v"))
    out, lse = _call(spec, plan, True, q, k, v, *arrays[3:])
    out, lse = checkpoint_name(out, "attention.out"), checkpoint_name(lse, "attention.lse")
    return (out, lse) if save else (out,), (Arrays(q, k, v, *arrays[3:]), out, lse)


def _call_bwd(spec: Spec, plan: Plan, save: bool, saved, cotangents):
    arrays, out, lse = saved
    *of_heads, of_sinks = _gradients(spec, plan, arrays, out, lse, cotangents[0])
    return (*of_heads, None, None, None, of_sinks)


def _find_gradients(spec: Spec, plan: Plan, arrays: Arrays, out, lse, dout) -> tuple[jax.Array | None, ...]:
    """Of q, k, v and sinks."""
    of_heads = _gradients_of_heads(spec, plan, arrays, out, lse, dout)
    if arrays.sinks is None:
        return (*of_heads, None)
    lse = lse if plan.backend == "xla" else lse * math.log(2)  # the kernels' logarithms have base 2
    share = jnp.where((arrays.first < arrays.end)[None, :], jnp.exp(arrays.sinks[:, None] - lse), 0)
    return (*of_heads, -jnp.sum(share * along_rows(arrays, out, dout), axis=1))


def _gradients_of_heads(spec: Spec, plan: Plan, arrays: Arrays, out, lse, dout) -> tuple[jax.Array, ...]:
    if plan.backend == "xla":
        assert plan.block is not None  # make_plan fills what a backend has
        return backward_xla(spec, plan.block, arrays, out, lse, dout)
    assert plan.dq is not None
    assert plan.dkv is not None
    if plan.backend == "triton":
        from jaxops.ops.packed_attention.bwd_triton import backward_triton

        backward = functools.partial(backward_triton, spec, plan.dq, plan.dkv, cores=plan.on.cores)
        return sequential_vmap(backward)(arrays, out, lse, dout)
    return backward_pallas(spec, plan.dq, plan.dkv, arrays, out, lse, dout, interpret=plan.on.interpret)


def _plain_gradients(spec: Spec, plan: Plan, arrays: Arrays, out, lse, dout) -> tuple[jax.Array | None, ...]:
    """`_find_gradients` without loops, for a second derivative; out and lse are found again."""

    def forward(q, k, v, sinks):
        return forward_xla(spec, None, arrays._replace(q=q, k=k, v=v, sinks=sinks))[0]

    _, vjp = jax.vjp(forward, *arrays[:3], arrays.sinks)
    return vjp(dout)


_call = differentiable(_forward, _call_fwd, _call_bwd, static=3)
_gradients = differentiable_as(_find_gradients, _plain_gradients, static=2)
