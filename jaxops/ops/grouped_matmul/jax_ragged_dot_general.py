"""`jax.lax.ragged_dot_general`, run as `grouped_matmul` or `grouped_wgrad`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import check_array, check_choice, check_out_sharding, type_name
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops.ops.grouped_matmul.jax_ragged_dot import Product, offsets_of
from jaxops.ops.grouped_matmul.plan import Plan


def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type=None,
    group_offset: jax.Array | int | None = None,
    out_sharding=None,
    *,
    backend: str = "auto",
    plan: Plan | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` with the kernels of `grouped_matmul` and `grouped_wgrad`: a drop-in replacement.

    With batch axes b, contracted axes k, and the other axes m of lhs and n of rhs, the ragged axis of lhs is one of
    - m: lhs [b.., m.., k..], rhs [g, b.., k.., n..] -> [b.., m.., n..], `grouped_matmul`. x are the axes m before it.
    - k: lhs [b.., m.., k..], rhs [b.., k.., n..] -> [g, b.., m.., n..], `grouped_wgrad`. x are the contracted axes that
      the dimension numbers list before it.
    - b: lhs [b.., m.., k..], rhs [b.., k.., n..] -> [b.., m.., n..], `jax.lax.dot_general`. As in JAX, group_sizes
      change nothing.

    The axes may stand in any order. Of rhs [g, n, k] and [g, k, n] no copy is made. Axes b and x are mapped by
    `jax.vmap`. Differentiable in lhs and rhs (reverse mode).

    >>> import jax, jax.numpy as jnp, jaxops
    >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])  # the rows are contracted
    >>> jaxops.ragged_dot_general(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.array([1, 2]), numbers)[:, 0, 0]
    Array([1., 2.], dtype=float32)

    Args:
      lhs, rhs: as above, any numeric dtype, as in `ragged_dot`.
      group_sizes: [g] integers, or [b.., x.., g]. Rows past their sum are zeros, or are not in a sum.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      precision, preferred_element_type: as in `ragged_dot`.
      group_offset: as in `ragged_dot`, where the ragged axis is one of m.
      out_sharding: None, or one that splits no axis over several devices.
      backend, plan: as in `grouped_matmul`; "auto" or "xla" and no plan where the ragged axis is one of b.

    Returns:
      As above, in preferred_element_type.

    Raises:
      ValueError: shapes or dimension numbers that do not fit.
      TypeError: as `ragged_dot`; other dimension numbers than JAX's.
      NotImplementedError: as `ragged_dot`; group_offset or a kernel where there is none.
    """
    check_out_sharding(out_sharding)
    for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        check_array(name, x, "a JAX array")
    if not len(group_sizes.shape) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        given = f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}"
        raise TypeError(f"{given}; it must be [g] or [b.., x.., g] integers, the rows of each group.")
    axes = _Axes.of(lhs, rhs, ragged_dot_dimension_numbers)
    check_choice("backend", backend, ("auto", "triton", "pallas", "xla"))
    if group_offset is not None and axes.group is None:
        raise NotImplementedError(
            "group_offset needs an rhs with a group axis: the ragged axis must be neither contracted nor a batch axis. "
            "Slice the result, or pass a slice of the offsets to jaxops.grouped_wgrad."
        )
    lhs, rhs, group_sizes = vary_together(lhs, rhs, group_sizes)
    product = Product(precision, preferred_element_type, backend, plan)
    if axes.ragged in axes.lhs_batch:
        if backend not in ("auto", "xla") or plan is not None:
            raise NotImplementedError("a ragged batch axis has no kernel: use backend='auto' or 'xla', without a plan.")
        _check_sizes(group_sizes, _shape(lhs, axes.lhs_batch[: axes.lhs_batch.index(axes.ragged)]))
        numbers = (axes.lhs_contracted, axes.rhs_contracted), (axes.lhs_batch, axes.rhs_batch)
        return lax.dot_general(lhs, rhs, numbers, precision, product.result_dtype(lhs, rhs))
    multiply = _rows if axes.group is not None else _contraction
    return multiply(axes, product, lhs, rhs, group_sizes, group_offset)


Axis = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes by their meaning; group is None unless the ragged axis is one of lhs_rest."""

    lhs_batch: Axis
    lhs_contracted: Axis
    lhs_rest: Axis
    rhs_batch: Axis
    rhs_contracted: Axis
    rhs_rest: Axis
    ragged: int
    group: int | None

    @classmethod
    def of(cls, lhs: jax.Array, rhs: jax.Array, numbers: lax.RaggedDotDimensionNumbers) -> "_Axes":
        if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
            needed = "pass a jax.lax.RaggedDotDimensionNumbers"
            raise TypeError(f"ragged_dot_dimension_numbers is {type_name(numbers)}; {needed}.")

        def check(right: bool, needed: str) -> None:
            if not right:
                shapes = f"lhs {tuple(lhs.shape)}, rhs {tuple(rhs.shape)}"
                raise ValueError(f"ragged_dot_dimension_numbers={numbers} of {shapes}: {needed}.")

        (left, right), (lhs_batch, rhs_batch) = (tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
        ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        for x, used in ((lhs, (*left, *lhs_batch)), (rhs, (*right, *rhs_batch, *groups))):
            check(all(0 <= axis < len(x.shape) for axis in used), "an axis is out of range; count from 0")
            check(len(set(used)) == len(used), "an axis has two meanings")
        for kind, of_lhs, of_rhs in (("contracted", left, right), ("batch", lhs_batch, rhs_batch)):
            sizes = [x.shape[axis] for x, axes in ((lhs, of_lhs), (rhs, of_rhs)) for axis in axes]
            same = len(of_lhs) == len(of_rhs) and sizes[: len(of_lhs)] == sizes[len(of_lhs) :]
            check(same, f"the {kind} axes of lhs and rhs must have equal sizes, not {sizes}")
        check(len(ragged) == 1 and 0 <= ragged[0] < len(lhs.shape), "lhs must have one ragged axis")
        rest = tuple(axis for axis in range(len(lhs.shape)) if axis not in (*left, *lhs_batch))
        needed = 1 if ragged[0] in rest else 0
        check(len(groups) == needed, f"rhs must have {needed} group axes for this ragged axis")
        rhs_rest = tuple(axis for axis in range(len(rhs.shape)) if axis not in (*right, *rhs_batch, *groups))
        return cls(lhs_batch, left, rest, rhs_batch, right, rhs_rest, ragged[0], groups[0] if groups else None)


def _around(axes: Axis, ragged: int) -> tuple[Axis, Axis]:
    """The axes before the ragged one, and those behind it."""
    return axes[: axes.index(ragged)], axes[axes.index(ragged) + 1 :]


def _ordered(x: jax.Array, *kinds: Sequence[int], kept: int) -> jax.Array:
    """x with the axes of each kind in one; of the first `kept` kinds only if there are some."""
    sizes = [math.prod(x.shape[axis] for axis in axes) for i, axes in enumerate(kinds) if axes or i >= kept]
    return x.transpose([axis for axes in kinds for axis in axes]).reshape(sizes)


def _sizes(axes: _Axes, lhs: jax.Array, group_sizes: jax.Array, outer: Axis, inner: Axis) -> jax.Array:
    """[B?, X?, g] int32, of rows of the ragged axis and those behind it."""
    of_lhs, g = [_shape(lhs, kind) for kind in (axes.lhs_batch, outer)], group_sizes.shape[-1]
    prefix = of_lhs[0] + of_lhs[1]
    _check_sizes(group_sizes, prefix)
    each = jnp.broadcast_to(group_sizes.astype(jnp.int32), (*prefix, g)) * math.prod(lhs.shape[axis] for axis in inner)
    return each.reshape([math.prod(sizes) for sizes in of_lhs if sizes] + [g])


def _check_sizes(group_sizes: jax.Array, prefix: tuple[int, ...]) -> None:
    g = group_sizes.shape[-1]
    if len(group_sizes.shape) > 1 and tuple(group_sizes.shape) != (*prefix, g):
        given = f"group_sizes has shape {tuple(group_sizes.shape)}"
        raise ValueError(f"{given}; it must be [g] = {(g,)} or [b.., x.., g] = {(*prefix, g)}.")


def _mapped(call: Callable, axes: Axis, in_axes: tuple[int | None, ...]) -> Callable:
    return jax.vmap(call, in_axes) if axes else call


def _shape(x: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(x.shape[axis] for axis in axes)


def _rows(axes: _Axes, product: Product, lhs, rhs, group_sizes, group_offset) -> jax.Array:
    assert axes.group is not None
    outer, inner = _around(axes.lhs_rest, axes.ragged)
    sizes = _sizes(axes, lhs, group_sizes, outer, inner)
    offsets = offsets_of(sizes, group_offset, rhs.shape[axes.group], axes.group)
    left = _ordered(lhs, axes.lhs_batch, outer, (axes.ragged, *inner), axes.lhs_contracted, kept=2)
    columns, swapped = (axes.rhs_contracted, axes.rhs_rest), (axes.rhs_rest, axes.rhs_contracted)
    order = [*axes.rhs_batch, axes.group, *axes.rhs_rest, *axes.rhs_contracted]
    transpose_rhs = order == sorted(order)  # then it is read in place
    right = _ordered(rhs, axes.rhs_batch, (axes.group,), *(swapped if transpose_rhs else columns), kept=1)
    call = functools.partial(product.rows, transpose_rhs=transpose_rhs)
    call = _mapped(_mapped(call, outer, (0, None, 0)), axes.lhs_batch, (0, 0, 0))
    shape = _shape(lhs, axes.lhs_batch + axes.lhs_rest) + _shape(rhs, axes.rhs_rest)
    if 0 in shape:  # an axis that is mapped may be empty
        return jnp.zeros(shape, product.result_dtype(lhs, rhs))
    return call(left, right, offsets).reshape(shape)


def _contraction(axes: _Axes, product: Product, lhs, rhs, group_sizes, _) -> jax.Array:
    outer, inner = _around(axes.lhs_contracted, axes.ragged)
    sizes = _sizes(axes, lhs, group_sizes, outer, inner)
    left = _ordered(lhs, axes.lhs_batch, outer, (axes.ragged, *inner), axes.lhs_rest, kept=2)
    i = len(outer)
    rows, outer = axes.rhs_contracted[i:], axes.rhs_contracted[:i]
    right = _ordered(rhs, axes.rhs_batch, outer, rows, axes.rhs_rest, kept=2)
    out = product.result_dtype(lhs, rhs)
    if outer and jnp.issubdtype(out, jnp.floating):  # the sum over x is rounded once
        product = dataclasses.replace(product, preferred_element_type=jnp.promote_types(out, jnp.float32))
    shape = group_sizes.shape[-1:] + _shape(lhs, axes.lhs_batch + axes.lhs_rest) + _shape(rhs, axes.rhs_rest)
    if 0 in (*shape, *lhs.shape):
        return jnp.zeros(shape, out)
    one = lambda lhs, rhs, sizes: product.contraction(lhs, rhs, offsets_of(sizes, None, sizes.shape[0]))
    sums = _mapped(_mapped(one, outer, (0, 0, 0)), axes.lhs_batch, (0, 0, 0))(left, right, sizes)
    sums = jnp.sum(sums, axis=-4).astype(out) if outer else sums
    return jnp.moveaxis(sums, -3, 0).reshape(shape)
