"""The passes over chunks of rows: logits, their statistics, their gradients and the products with these."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from jaxops._lib.arrays.manual_axes import barrier, out_struct, vary_as
from jaxops._lib.arrays.partitioning import partitioned
from jaxops.ops.grouped_matmul import grouped_wgrad
from jaxops.ops.linear_cross_entropy.plan import Plan, stores_bfloat16


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes.

    Attributes:
      transpose_w: w is [V, D].
      ignore_index: the value of a target that does not count.
      label_smoothing, z_loss: factors.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; None for no cap.
      axis_name: a mesh axis over whose devices the vocabulary is split, or None.
      compute_dtype, logits_dtype: of the products' operands, and of the logits in memory.
      precision: of float32 products.
      plan: made by `make_plan`.
      dtypes: of x, w and bias, as they were passed.
    """

    transpose_w: bool
    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    axis_name: str | None
    compute_dtype: jnp.dtype
    logits_dtype: jnp.dtype
    precision: lax.Precision
    plan: Plan
    dtypes: tuple[jnp.dtype | None, ...]


class Operands(NamedTuple):
    """x [T, D] and w [D, V] ([V, D] with Spec.transpose_w) in the compute dtype, bias [V] or None, targets [T]."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    targets: jax.Array


class Tokens(NamedTuple):
    """Values of each token, [T] float32, or their cotangents. With a mesh axis each device has a share: the values are
    the sums of the shares.

    Attributes:
      losses: zero for a token that does not count.
      log_sums: logarithms of the sums of exponentials; zero likewise.
    """

    losses: jax.Array
    log_sums: jax.Array


def tokens(spec: Spec, operands: Operands) -> Tokens:
    """Losses without gradients."""

    def of_chunk(_, rows: Operands) -> tuple[None, Tokens]:
        logits = _logits(spec, rows)
        return None, _tokens(spec, rows, logits, _statistics(spec, rows, logits))

    return _over_chunks(spec, of_chunk, operands)[1]


def tokens_and_gradients(
    spec: Spec, operands: Operands, cotangents: Tokens
) -> tuple[Tokens, tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Also the gradients of x, in the compute dtype, and of w and bias, in float32; of w in one chunk as of
    `stores_bfloat16`."""
    whole = spec.plan.rows is None or spec.plan.rows >= operands.x.shape[0]
    narrow = whole and stores_bfloat16(spec.compute_dtype.name, str(spec.dtypes[1]))
    dw_dtype = jnp.bfloat16 if narrow else jnp.float32

    def of_chunk(sums, rows: Operands, cotangents: Tokens) -> tuple[Any, tuple[Tokens, jax.Array]]:
        logits, (dw, dbias) = _logits(spec, rows), sums or (None, None)
        found = _statistics(spec, rows, logits)
        d = _logit_gradients(spec, rows, logits.products, found, cotangents)
        dbias = None if rows.bias is None else _added(dbias, jnp.sum(d, axis=0, dtype=jnp.float32))
        d = d.astype(spec.compute_dtype)
        x = jnp.where(_counts(spec, rows)[:, None], rows.x, 0)  # NaN times the zero gradient of such a row is NaN
        pair = (d, x) if spec.transpose_w else (x, d)
        dw = _weight_gradient(spec, dw, *pair, dw_dtype)
        dx = _product(spec, d, rows.w, (1, 0 if spec.transpose_w else 1), spec.compute_dtype)
        return (dw, dbias), (_tokens(spec, rows, logits, found), dx)

    (dw, dbias), (found, dx) = _over_chunks(spec, of_chunk, operands, cotangents)
    return found, (dx, dw, dbias)


def _over_chunks(spec: Spec, of_chunk: Callable, operands: Operands, *more: Tokens) -> tuple[Any, Any]:
    """of_chunk(sums, operands, *more) of chunks of rows, one after the other: (the last sums, all rows' results). The
    first one's sums are None: it stores what the others, in a `lax.scan`, add to, and no zeros are written."""
    (x, w, bias, targets), rows = operands, spec.plan.rows
    T = x.shape[0]

    def turn(sums, chunk):
        x, targets, *more = chunk
        return of_chunk(sums, Operands(x, w, bias, targets), *more)

    given = (x, targets, *more)
    if rows is None or rows >= T:
        return turn(None, given)

    others, fewer = (T - 1) // rows, (T - 1) % rows + 1  # of the first chunk, so that the others are whole
    # The barrier keeps the first chunk's logits from being in memory with the others'.
    sums, first = barrier(turn(None, jax.tree.map(lambda a: a[:fewer], given)))
    cut = lambda a: a[fewer:].reshape(others, rows, *a.shape[1:])
    sums, rest = lax.scan(turn, sums, jax.tree.map(cut, given))
    join = lambda a, b: jnp.concatenate([a, b.reshape(T - fewer, *b.shape[2:])])
    return sums, jax.tree.map(join, first, rest)


def _added(total: jax.Array | None, more: jax.Array) -> jax.Array:
    return more if total is None else total + more


def _weight_gradient(spec: Spec, total: jax.Array | None, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
    """total + a.T @ b in dtype, which is total's. On Hopper L2 adds, beside the products: cuBLAS reads and writes total
    in between them."""
    if spec.plan.backend != "triton":
        return _added(total, _product(spec, a, b, (0, 0), dtype))
    into, plan = None if total is None else total[None], spec.plan.products
    offsets = jnp.array([0, a.shape[0]], jnp.int32)
    return grouped_wgrad(a, b, offsets, accumulate_into=into, out_dtype=dtype, plan=plan)[0]


def _product(spec: Spec, a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype) -> jax.Array:
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=spec.precision, preferred_element_type=dtype)


class _Logits(NamedTuple):
    """products: x @ w in the logits' dtype, the one array [rows, V] in memory before its gradients. log_sums: of each
    row's logits the logarithm of the sum of exponentials; totals: their sum, for label smoothing only."""

    products: jax.Array
    log_sums: jax.Array
    totals: jax.Array | float


def _logits(spec: Spec, rows: Operands) -> _Logits:
    if spec.plan.backend == "triton":
        return _logits_on_hopper(spec, rows)
    wide = jnp.promote_types(spec.compute_dtype, spec.logits_dtype)
    numbers = (1, 1 if spec.transpose_w else 0)
    products = _product(spec, rows.x, rows.w, numbers, wide).astype(spec.logits_dtype)
    values, _ = _values(spec, products, rows.bias)
    most = lax.stop_gradient(jnp.max(values, axis=1))
    log_sums = most + jnp.log(jnp.sum(jnp.exp(values - most[:, None]), axis=1))
    return _Logits(products, log_sums, jnp.sum(values, axis=1) if spec.label_smoothing else 0.0)


def _logits_on_hopper(spec: Spec, rows: Operands) -> _Logits:
    from jaxops.ops.linear_cross_entropy.logits_triton import logits_triton

    tiles = None if spec.plan.products is None else spec.plan.products.fwd
    assert tiles is not None
    kernel = functools.partial(
        logits_triton, transpose_w=spec.transpose_w, soft_cap=spec.soft_cap, total=spec.label_smoothing > 0,
        tiles=tiles, cores=spec.plan.on.cores,
    )  # fmt: skip

    def of_part(_, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> dict[str, jax.Array]:
        results = sequential_vmap(kernel)(x, w, bias)  # a call through jax-triton has no batching rule
        return dict(zip(("products", "log_sums", "totals"), results, strict=False))

    axes = {"products": "m.", "log_sums": ".m", "totals": ".m"}
    made: Any = partitioned(of_part, (rows.x, rows.w, rows.bias), ("m.", "..", "."), axes, split="m")
    totals = jnp.sum(made["totals"], axis=0) if spec.label_smoothing else 0.0
    return _Logits(made["products"], jax.nn.logsumexp(made["log_sums"], axis=0), totals)


def _values(spec: Spec, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The logits in float32, elementwise, and the slope of the soft cap. XLA computes them where they are read."""
    values = products.astype(jnp.float32)
    values = values if bias is None else values + jnp.broadcast_to(bias.astype(jnp.float32), values.shape)
    if spec.soft_cap is None:
        return values, None
    capped = jnp.tanh(values / spec.soft_cap)
    return spec.soft_cap * capped, 1 - capped * capped


def _counts(spec: Spec, rows: Operands) -> jax.Array:
    return rows.targets != spec.ignore_index


def _words(spec: Spec, products: jax.Array) -> tuple[jax.Array | int, int]:
    """The number of this device's first word, and how many words all devices have."""
    own = products.shape[1]
    if spec.axis_name is None:
        return 0, own
    return lax.axis_index(spec.axis_name) * own, lax.axis_size(spec.axis_name) * own


class _Statistics(NamedTuple):
    """Statistics of each row: the logarithm of the sum of all words' exponentials; of this device's words the target's
    logit, NaN for a target outside of the vocabulary."""

    log_sum: jax.Array
    chosen: jax.Array


def _statistics(spec: Spec, rows: Operands, logits: _Logits) -> _Statistics:
    (products, log_sum, _), (first, count) = logits, _words(spec, logits.products)
    if spec.axis_name is not None:
        most = lax.pmax(log_sum, spec.axis_name)
        log_sum = most + jnp.log(lax.psum(jnp.exp(log_sum - most), spec.axis_name))
    own = rows.targets - first
    at = jnp.clip(own, 0, products.shape[1] - 1)
    bias = None if rows.bias is None else rows.bias[at]
    # Of the array in memory: XLA would write `values` for an index into it.
    chosen, _ = _values(spec, jnp.take_along_axis(products, at[:, None], axis=1)[:, 0], bias)
    chosen = jnp.where(own == at, chosen, 0.0)
    chosen = jnp.where(_known(spec, rows, count), chosen, jnp.nan)
    return _Statistics(log_sum, chosen)


def _known(spec: Spec, rows: Operands, count: int) -> jax.Array:
    """Whether the target is a word, or does not count."""
    return (rows.targets >= 0) & (rows.targets < count) | ~_counts(spec, rows)


def _tokens(spec: Spec, rows: Operands, logits: _Logits, found: _Statistics) -> Tokens:
    devices = 1 if spec.axis_name is None else lax.axis_size(spec.axis_name)
    log_sum = vary_as(out_struct((), jnp.float32, logits.products), found.log_sum) / devices
    smooth, (_, count) = spec.label_smoothing, _words(spec, logits.products)
    loss = log_sum * (1 + spec.z_loss * found.log_sum) - (1 - smooth) * found.chosen - smooth / count * logits.totals
    counts = _counts(spec, rows)
    return Tokens(jnp.where(counts, loss, 0.0), jnp.where(counts, log_sum, 0.0))


def _logit_gradients(
    spec: Spec, rows: Operands, products: jax.Array, found: _Statistics, cotangents: Tokens
) -> jax.Array:
    """Gradients of the products, in float32 or rounded: zero in rows that do not count, NaN in those whose target is no
    word."""
    first, count = _words(spec, products)
    smooth, dloss = spec.label_smoothing, jnp.where(_known(spec, rows, count), cotangents.losses, jnp.nan)
    of_sum = dloss * (1 + 2 * spec.z_loss * found.log_sum) + cotangents.log_sums
    of_target, of_words, own = dloss * (1 - smooth), dloss * (smooth / count), rows.targets - first
    counts = _counts(spec, rows)
    if spec.plan.backend == "triton":
        # All that reads the logits comes first: the kernel overwrites them.
        products, found = barrier((products, found))
        numbers = jnp.stack([found.log_sum, of_sum, of_target, of_words, counts.astype(jnp.float32)])
        return _gradients_on_hopper(spec, products, rows.bias, own, numbers)
    values, slope = _values(spec, products, rows.bias)
    words = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    d = of_sum[:, None] * jnp.exp(values - found.log_sum[:, None]) - of_words[:, None]
    d = d - jnp.where(words == own[:, None], of_target[:, None], 0.0)
    d = d if slope is None else d * slope
    return jnp.where(counts[:, None], d, 0.0)


def _gradients_on_hopper(
    spec: Spec, products: jax.Array, bias: jax.Array | None, targets: jax.Array, numbers: jax.Array
) -> jax.Array:
    from jaxops.ops.linear_cross_entropy.gradients_triton import gradients_triton

    kernel = sequential_vmap(functools.partial(gradients_triton, soft_cap=spec.soft_cap))
    of_part = lambda _, *given: kernel(*given)
    return partitioned(of_part, (products, bias, targets, numbers), ("m.", ".", "m", ".m"), "m.", split="m")
