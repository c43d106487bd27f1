"""`dispatch` and `collect`: tokens to the devices of their experts, and results back; nothing goes where it is not
needed."""

import dataclasses
import typing
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.checks import check_choice, check_exact, check_float, check_integer, check_size, type_name
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.arrays.pytrees import register
from jaxops.ops.permute import check_routing, permute, sum_of_rows
from jaxops.ops.route import Routing, partial_routing, route_choices
from jaxops.parallel.plan import WAYS
from jaxops.parallel.ragged_exchange import Runs, exchange

Axis = str | tuple[str, ...]
Backend = Literal["auto", "mosaic", "padded"]


@register
@typing.no_type_check  # JAX unflattens pytrees with placeholders
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that a device received from all devices of an axis, and what sends results back.

    Attributes:
      x: [R, D], received rows, by source device, then by token. R is the bound of `dispatch`; rows beyond those that
        were sent are unspecified, and `routing` has no row of them.
      routing: a `jaxops.Routing` of these R rows, with k choices each, to the device's own E / n experts; choices of
        others are -1, losses None.
      dropped: [T, k] bool, which of the device's own choices were not sent, because the device of the expert had no
        room left; all False without `rows`.
      sends: a Routing of own tokens to devices: the rows that are sent, in order.
      here, there: `Runs` of the sent and of the received rows.
      axes: of `dispatch`, joined by commas.
    """

    x: jax.Array
    routing: Routing
    dropped: jax.Array
    sends: Routing
    here: Runs
    there: Runs
    axes: str = dataclasses.field(metadata={"static": True})


def dispatch(
    x: jax.Array, routing: Routing, axis_name: Axis, *, rows: int | None = None, backend: Backend = "auto"
) -> Dispatched:
    """Sends each token's row once to each device that has at least one of its experts, with its experts and weights.

    Call it inside `jax.shard_map`. Of E experts device d of n has d * E / n to (d + 1) * E / n - 1. A choice without a
    row (a masked token's, or one beyond a capacity) is not sent. `moe_mlp` of the result's x and routing, and
    `collect` of that, make the layer:

    >>> import jax, jax.numpy as jnp, jaxops
    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxops.parallel import collect, dispatch
    >>> def layer(x, logits, w):  # a device's own tokens and experts
    ...     received = dispatch(x, jaxops.route(logits, 2), "expert")
    ...     y = jaxops.moe_mlp(received.x, None, w, w, received.routing, activation="relu")
    ...     return collect(y, received)
    >>> n = jax.device_count()
    >>> mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> split = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    >>> jax.jit(split)(jnp.ones((3 * n, 4)), jnp.ones((3 * n, 2 * n)), jnp.ones((2 * n, 4, 4)))[0]
    Array([16., 16., 16., 16.], dtype=float32)

    Differentiable (reverse mode, any order) in x and routing.weights: gradients take the way of `collect`, sums are
    float32 and rounded once. How many rows go where is known on the devices only: no host sync, and new routings
    compile nothing. Deterministic. All devices of the mesh must come to the call, as to a collective.

    Args:
      x: [T, D] this device's tokens, bfloat16, float16 or float32; T is equal on all devices.
      routing: of these T tokens to all devices' E experts, from `jaxops.route` or `jaxops.route_choices`; not that of
        `Routing.own`.
      axis_name: the mesh axis, or several in order, over which tokens and experts are split.
      rows: None, or how many rows R a device has room for, which bounds its memory. Where more are sent to it, the last
        tokens of the last devices are dropped: they are marked in `dropped`, contribute nothing, and get no gradient.
        By default there is room for all devices' tokens.
      backend: "mosaic" is a kernel for Hopper GPUs of one host, which writes these rows alone. "padded" is
        `jax.lax.all_to_all` of T rows for each device. "auto" takes the first where it can run.

    Returns:
      A `Dispatched`.

    Raises:
      ValueError: shapes that do not fit, experts that the devices cannot share evenly, rows below 1, an axis that does
        not exist here, an unknown backend.
      TypeError: dtypes that the kernels do not take; a routing that is no `Routing`.
      NotImplementedError: backend="mosaic" where the kernel cannot run.

    Source: the dispatch of DeepSeek's DeepEP (DeepSeek-V3, arXiv:2412.19437, 3.2.2).
    """
    check_float("x", x, "[T, D]")
    check_choice("backend", backend, ("auto", *WAYS))
    given = check_routing(routing)
    T, k = given.row_positions.shape
    check_exact("routing.experts", routing.experts, "int32", "[T, k]", (T, k), "as row_positions are")
    check_size("x's number of rows", x.shape[0], "T of routing.row_positions", T)
    names = _names_of(axis_name)
    devices, E = lax.axis_size(names), given.group_offsets.shape[0] - 1
    if routing.load is not None:
        whole = "len(routing.load) + 1 (pass the routing of all experts, not Routing.own)"
        check_size("len(routing.group_offsets)", E + 1, whole, routing.load.shape[0] + 1)
    if E % devices:
        raise ValueError(f"routing has {E} experts, and axis_name={axis_name!r} {devices} devices: split them evenly.")
    if rows is not None and check_integer("rows", rows) < 1:
        raise ValueError(f"rows={rows} must be at least 1, or None for all devices' tokens.")
    R, own = min(devices * T, rows or devices * T), E // devices
    # What depends on the device must be marked so, even if the caller passes the same tokens everywhere.
    x, given, experts, _ = vary_together(x, given, routing.experts, lax.axis_index(names))
    experts = jnp.where(given.row_positions < T * k, experts, -1)
    target = jnp.where(experts >= 0, experts // own, -1)
    sends = _sends(target, devices)
    here, there = _runs(sends.load, names, R)
    sends = _keep(sends, here) if devices * T > R else sends
    # As numbers: exact, since there are fewer than 2**24 experts.
    beside = jnp.concatenate([experts.astype(jnp.float32), given.weights], axis=1)
    rows_of = permute(x, sends), permute(beside, sends)
    x, beside = exchange(names, backend, (sends.row_indices.size, R, T), rows_of, here, there)
    experts = beside[:, :k].astype(jnp.int32) - own * lax.axis_index(names)
    arrived = jnp.arange(R, dtype=jnp.int32) < there.at[-1] + there.sizes[-1]
    # The op wants no more choices than experts; a token may have more choices than this device has experts.
    received = route_choices(jnp.where(_inside(experts, own), experts, -1), beside[:, k:], max(own, k), mask=arrived)
    received = dataclasses.replace(received, group_offsets=received.group_offsets[: own + 1], load=received.load[:own])
    return Dispatched(x, received, _dropped(target, sends), _without_weights(sends), here, there, ",".join(names))


def collect(y: jax.Array, received: Dispatched, *, backend: Backend = "auto") -> jax.Array:
    """Sends results back to the devices of their tokens, over the axes of `dispatch`, one row for a token and device,
    and adds a token's rows.

    Differentiable (reverse mode, any order) in y, by `dispatch`'s way. The sum is float32, rounded once; a token that
    went nowhere gets zeros.

    Args:
      y: [R, N], bfloat16, float16 or float32, a result for each received row, as `moe_mlp(received.x, ...)`. Rows that
        were not received may hold anything.
      received: of `dispatch`.
      backend: as of `dispatch`.

    Returns:
      [T, N] in y's dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `dispatch`.
    """
    check_float("y", y, "[R, N]")
    check_choice("backend", backend, ("auto", *WAYS))
    if not isinstance(received, Dispatched):
        raise TypeError(f"received is {type_name(received)}; pass the result of jaxops.parallel.dispatch.")
    check_size("y's number of rows", y.shape[0], "the number of received rows", received.x.shape[0])
    names = _names_of(tuple(received.axes.split(",")))
    T, choices = received.sends.row_positions.shape
    y, sends, here, there = vary_together(y, received.sends, received.here, received.there)
    (rows,) = exchange(names, backend, (y.shape[0], T * choices, T), (y,), there, here)
    return sum_of_rows(rows, sends)


def _names_of(axis_name: Axis) -> tuple[str, ...]:
    """The mesh axes, which are there."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name={axis_name!r} must be the name of a mesh axis, or a tuple of names.")
    try:
        lax.axis_size(names)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here: call inside jax.shard_map over a mesh that has it."
        ) from None
    return names


def _inside(numbers: jax.Array, count: int) -> jax.Array:
    return (numbers >= 0) & (numbers < count)


def _sends(target: jax.Array, devices: int) -> Routing:
    """A Routing of tokens to devices, each once. target: [T, k], the devices of the choices, or -1."""
    k = target.shape[1]
    if devices <= k:
        number = jnp.arange(devices, dtype=jnp.int32)
        goes = jnp.any(target[:, :, None] == number[None, None, :], axis=1)
        target = jnp.where(goes, number[None, :], -1)
    else:
        earlier = jnp.tril(jnp.ones((k, k), bool), -1)[None]
        again = jnp.any((target[:, :, None] == target[:, None, :]) & earlier, axis=2)
        target = jnp.where(again, -1, target)
    return route_choices(target, jnp.ones(target.shape, jnp.float32), devices)


def _runs(load: jax.Array, axis_name: tuple[str, ...], R: int) -> tuple[Runs, Runs]:
    """Of the sent rows, in the order of their targets, and of the received ones, in that of their sources, of which a
    device has room for R. load: how many rows this device has for each device."""
    counts = lax.all_gather(load, axis_name)  # [source, target]
    sent, received = (jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts for axis in (1, 0))
    received = jnp.minimum(received, R)
    counts = jnp.minimum(counts, R - received)
    own, column = lax.axis_index(axis_name), lambda of: lax.dynamic_index_in_dim(of, own, 1, keepdims=False)
    here = Runs(sent[own], counts[own], received[own])
    return here, Runs(column(received), column(counts), column(sent))


def _keep(sends: Routing, here: Runs) -> Routing:
    """sends, without the choices for which their device has no room: of each device's rows the last ones."""
    row = jnp.arange(sends.row_indices.size, dtype=jnp.int32)
    target = jnp.clip(jnp.searchsorted(sends.group_offsets, row, side="right") - 1, 0, here.at.size - 1)
    kept = row < here.at[target] + here.sizes[target]
    positions, none = sends.row_positions, row.size
    there = jnp.concatenate([kept, jnp.zeros(1, bool)])[positions]
    return dataclasses.replace(sends, row_positions=jnp.where(there, positions, none))


def _dropped(target: jax.Array, sends: Routing) -> jax.Array:
    """[T, k], which choices' devices the tokens are not sent to."""
    sent = jnp.where(sends.row_positions < sends.row_indices.size, sends.experts, -1)
    return (target >= 0) & ~jnp.any(target[:, :, None] == sent[:, None, :], axis=2)


def _without_weights(sends: Routing) -> Routing:
    names = "row_positions", "row_indices", "group_offsets"
    return partial_routing(**{name: getattr(sends, name) for name in names})
