"""The public function: checks, then a custom_vjp whose forward makes the gradients while the logits are there."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import (
    check_array,
    check_choice,
    check_exact,
    check_flag,
    check_float,
    check_integer,
    check_number,
    check_size,
    compute_dtype_of,
    float_dtype,
)
from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import axis_index, barrier, vary_together
from jaxops._lib.arrays.precision import resolve_precision
from jaxops._lib.planning.device import device_of
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.linear_cross_entropy.chunks import Operands, Spec, Tokens, tokens, tokens_and_gradients
from jaxops.ops.linear_cross_entropy.plan import Plan, Problem, make_plan

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array | None = None, *,
    bias: jax.Array | None = None, transpose_w: bool = False, reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None,
    axis_name: str | None = None, compute_dtype=None, logits_dtype=None, precision: lax.PrecisionLike = None,
    backend: str = "auto", plan: Plan | None = None,
) -> Any:  # fmt: skip
    """The cross-entropy of the logits `x @ w` with target words, without an array of all logits.

    Rows are taken in chunks of at most 1 GB of logits; on Hopper their gradients are made in their memory. All rows are
    one chunk if T is a symbolic size, if logits and gradients take at most 2 GB, or if they take no more than a chunk
    and a float32 sum of w's gradient, which one chunk does not need: in bfloat16 w's gradient is then rounded before it
    is multiplied by the loss' cotangent.
    With "mean" and "sum" a differentiated call makes a chunk's gradients while its logits are there: three products in
    all, where a `jax.checkpoint` around each chunk takes four. A call that is not differentiated makes no gradients.
    With "none" the tokens' cotangents are known only in the backward, which makes the logits again. Differentiable
    (reverse mode) in x, w, bias and weights. Deterministic.

    >>> import jax.numpy as jnp, jaxops
    >>> x, w = jnp.eye(3), jnp.log(jnp.array([[1., 2., 1.], [4., 2., 2.], [9., 9., 9.]]))
    >>> jaxops.linear_cross_entropy(x, w, jnp.array([1, 0, -100])).round(4)  # the mean of log 2 and log 2
    Array(0.6931, dtype=float32)

    Args:
      x: [T, D], bfloat16, float16 or float32.
      w: [D, V], or [V, D] with transpose_w, as of tied embeddings; dtype of x unless compute_dtype is given.
      targets: [T] int32, each row's word. A target outside of 0 to V - 1 that is not ignore_index makes loss and
        gradients NaN; nothing is read out of bounds.
      weights: [T], floating or bool, factors on the tokens' losses; None for ones. Not with "none": multiply the
        losses yourself.
      bias: [V], any of the dtypes of x, or None. On Hopper its gradient is the float32 sum of the logits' gradients as
        they are multiplied, rounded to compute_dtype.
      transpose_w: w is [V, D].
      reduction: "mean", over the sum of the weights of tokens that count (0 if that is 0); "sum"; or "none".
      ignore_index: a target of this value does not count; what its row of x holds (NaN too) reaches nothing.
      label_smoothing: share of the target that is spread over all words, 0 to 1 (Szegedy et al. 2016,
        arXiv:1512.00567).
      z_loss: factor on the square of a token's log-sum-exp, added to its loss (PaLM, arXiv:2204.02311, section 5).
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, as in Gemma 2; None for no cap.
      axis_name: a mesh axis inside `jax.shard_map`, over whose devices w's and bias' V is split, in order; all of them
        have the same x and targets, and get the same results. T, D and V of each device are equal.
      compute_dtype: x and w are cast to it. Gradients of float32 weights stay float32 and are never rounded to it.
      logits_dtype: bfloat16, float16 or float32, of the logits in memory; compute_dtype by default. Everything between
        the products is computed in float32.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      backend: "auto", "triton" (Hopper: the logits' statistics are made in the epilogue of their product) or "xla".
      plan: see `Plan` of this module, e.g. for rows of a chunk.

    Returns:
      A float32 scalar, in nats. With "none" `(losses, log_sums)`: each token's loss and the logarithm of the sum of its
      exponentials, [T] float32, zero for tokens that do not count.

    Raises:
      ValueError: shapes that do not fit, V = 0, an unknown reduction, a label_smoothing outside of 0 to 1, a soft_cap
        that is not positive, weights with "none".
      TypeError: dtypes that the products do not take, dtypes that differ without compute_dtype; forward-mode
        differentiation (JAX's own error).
      NotImplementedError: a precision algorithm that jaxops' products do not have; what the backend cannot run.

    Residuals: "linear_cross_entropy.out" (a checkpoint name). The backward of "mean" and "sum" multiplies the gradients
      by a number; that of "none" needs the operands only.

    Source: gradients in the forward as in Liger (Hsu et al. 2024, arXiv:2410.10989); the statistics over a split
    vocabulary as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).
    """
    T, V = _check_arrays(x, w, targets, weights, bias, check_flag("transpose_w", transpose_w))
    check_choice("reduction", reduction, REDUCTIONS)
    if reduction == "none" and weights is not None:
        raise ValueError("weights with reduction='none', whose results are (losses, log_sums): multiply the losses.")
    smoothing, cap = check_number("label_smoothing", label_smoothing, least=0), soft_cap
    if smoothing > 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1.")
    if cap is not None and (cap := check_number("soft_cap", soft_cap)) <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap.")
    compute = compute_dtype_of("x", x, "w", w, compute_dtype, "the weights' gradients stay")
    precision, compute = resolve_precision(precision, compute)
    logits = compute if logits_dtype is None else float_dtype("logits_dtype", logits_dtype)
    problem = Problem(T, x.shape[1], V, compute.name, logits.name, transpose_w, jnp.dtype(w.dtype).name)
    device = device_of(x, w, targets)
    rows = tuned_rows("linear_cross_entropy", device, "grouped_matmul")
    made = make_plan(problem, device, rows, backend=backend, plan=plan)
    dtypes = tuple(None if a is None else jnp.dtype(a.dtype) for a in (x, w, bias))
    spec = Spec(
        transpose_w, check_integer("ignore_index", ignore_index), smoothing, check_number("z_loss", z_loss, least=0),
        cap, axis_name, compute, logits, precision, made, dtypes,
    )  # fmt: skip
    index = None if axis_name is None else axis_index(axis_name)  # the operands vary over this axis, too
    if reduction == "none":
        found: Any = _each(spec, *vary_together(x, w, bias, targets, index)[:-1])
        return tuple(found if axis_name is None else lax.psum(found, axis_name))
    counts = jnp.asarray(targets) != spec.ignore_index
    weights = jnp.where(counts, 1 if weights is None else weights, 0).astype(jnp.float32)
    total = jnp.sum(weights) if reduction == "mean" else jnp.float32(1)
    total = jnp.where(total == 0, 1, total)
    # Before the gradients are made: a division behind them reads and writes w's gradient once more. In float16 it stays
    # behind them, since gradients of logits that are divided first would underflow to zero.
    early = compute != jnp.float16
    weights = weights / total if early else weights
    loss: Any = _weighted(spec, *vary_together(x, w, bias, targets, weights, index)[:-1])
    # Each device of the axis returns its share, and the sum is outside of the custom_vjp: so the cotangent that reaches
    # a share is the sum's, whether or not shard_map checks what varies.
    loss = loss if axis_name is None else lax.psum(loss, axis_name)
    return loss if early else loss / total


def _check_arrays(x: jax.Array, w: jax.Array, targets: jax.Array, weights, bias, transpose_w: bool) -> tuple[int, int]:
    """T and V."""
    check_float("x", x, "[T, D]")
    check_float("w", w, "[V, D]" if transpose_w else "[D, V]")
    (T, D), (rows, V) = x.shape, w.shape[::-1] if transpose_w else w.shape
    check_size("D of x (its columns)", D, f"D of w {tuple(w.shape)}", rows)
    if V == 0:
        raise ValueError(f"w has shape {tuple(w.shape)}: a vocabulary needs at least one word.")
    check_exact("targets", targets, "int32", "[T]", (T,), "a word for each row of x")
    if bias is not None:
        check_float("bias", bias, "[V]")
        check_size("len(bias)", bias.shape[0], f"V of w {tuple(w.shape)}", V)
    if weights is not None:
        check_array("weights", weights, "an array [T]")
        if weights.dtype != jnp.bool_:
            check_float("weights", weights, "[T]")
        if tuple(weights.shape) != (T,):
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}; it must be [T] = ({T},), one for each row of x."
            )
    return T, V


def _cast(spec: Spec, x: jax.Array, w: jax.Array, bias: jax.Array | None, targets: jax.Array) -> Operands:
    return Operands(x.astype(spec.compute_dtype), w.astype(spec.compute_dtype), bias, targets)


def _scaled(spec: Spec, gradients, factor: jax.Array | None = None) -> list[jax.Array | None]:
    """Gradients of x, w and bias in their dtypes, times a factor."""
    of = lambda d: d if factor is None else factor * d.astype(jnp.float32)
    return [None if d is None else of(d).astype(dtype) for d, dtype in zip(gradients, spec.dtypes, strict=True)]


# A scalar: the weighted sum


def _weighted_sum(weights: jax.Array, found: Tokens) -> jax.Array:
    return checkpoint_name(jnp.sum(weights * found.losses), "linear_cross_entropy.out")


def _weighted_forward(spec: Spec, x, w, bias, targets, weights):
    return _weighted_sum(weights, tokens(spec, _cast(spec, x, w, bias, targets)))


def _weighted_fwd(spec: Spec, x, w, bias, targets, weights):
    cotangents = Tokens(weights, jnp.zeros_like(weights))
    found, gradients = tokens_and_gradients(spec, _cast(spec, x, w, bias, targets), cotangents)
    return _weighted_sum(weights, found), (gradients, found.losses)


def _weighted_bwd(spec: Spec, residuals, dloss):
    gradients, losses = residuals
    return *_scaled(spec, gradients, dloss), None, dloss * losses


_weighted = differentiable(_weighted_forward, _weighted_fwd, _weighted_bwd, static=1)

# Each token: the backward makes the logits again.


def _each_forward(spec: Spec, x, w, bias, targets):
    found = tokens(spec, _cast(spec, x, w, bias, targets))
    return Tokens(*(checkpoint_name(values, "linear_cross_entropy.out") for values in found))


def _each_fwd(spec: Spec, *operands):
    return _each_forward(spec, *operands), operands


def _each_bwd(spec: Spec, operands, cotangents):
    # Not before the cotangents exist: XLA would share the products with the forward, and keep them.
    operands, cotangents = barrier((operands, cotangents))
    _, gradients = tokens_and_gradients(spec, _cast(spec, *operands), cotangents)
    return *_scaled(spec, gradients), None


_each = differentiable(_each_forward, _each_fwd, _each_bwd, static=1)
