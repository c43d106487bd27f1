"""`jax.lax.scan` whose backward reads residuals from host memory, with the copies hidden behind the layers' work."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxops._lib.arrays.checks import type_name
from jaxops._lib.arrays.manual_axes import barrier, vary_as
from jaxops.offload.policies import Policy
from jaxops.offload.residuals import CARRY, check_known, count_names, origin, residual_bytes, unknown

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Arrays = list[jax.Array]


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    policy: Policy,
) -> tuple[Any, Any]:
    """`jax.lax.scan(jax.checkpoint(body, policy=policy), init, xs)`, with hidden copies to the host and back.

    Residuals are copied out behind the rest of their layer, and prefetched one layer ahead in the backward: the device
    holds those of two layers. On a CPU nothing moves; values are the same. Compile with `compiler_options`.

    The carry at the start of each layer is named "carry": `policy({"carry": "offload"})` alone recomputes each layer
    from an input on the host. Without a choice it is kept, as by `jax.checkpoint`. Random keys and complex carries are
    always kept.

    Args:
      body, init, xs, length, reverse, unroll: as of `jax.lax.scan`.
      policy: of body's named values.

    Returns:
      (carry, ys). Differentiable in reverse mode, also in arrays that body closes over, but not by `jax.jvp`
      alone, like jaxops' ops. Under `jax.vmap` a layer's residuals of the whole batch are copied together.

    Raises:
      ValueError: those of `jax.lax.scan`; an array of xs without axes. In differentiation: a name in the policy that
        neither body's values nor any of jaxops' ops have.
      TypeError: those of `jax.lax.scan`; policy is no `Policy`; `jax.jvp`.
      NotImplementedError: a second derivative (`jax.hessian`) with values on the host; `policy.on_device()` has it.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {type_name(policy)}; pass a jaxops.offload.Policy.")
    x_leaves, x_tree = jax.tree.flatten(xs)
    if not all(map(jnp.ndim, x_leaves)):
        raise ValueError("xs has an array without axes: all arrays need one leading axis, the layers.")
    if not all(map(len, x_leaves)) or not (x_leaves or length):
        return jax.lax.scan(body, init, xs, length)  # without layers, or its error
    carry_leaves, carry_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, init))
    if not x_leaves:
        x_leaves = [jnp.zeros(length or 0, jnp.int8)]  # which body does not see

    def named(carry: Arrays, x: Arrays) -> tuple[Any, Any]:
        # jax.checkpoint cannot keep complex numbers by a name: it passes them to lax.reduce_precision.
        carry = [c if jnp.issubdtype(c.dtype, jnp.complexfloating) else checkpoint_name(c, CARRY) for c in carry]
        return body(jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(x_tree, x[: x_tree.num_leaves]))

    closed, (carry, ys) = jax.make_jaxpr(named, return_shape=True)(carry_leaves, [x[0] for x in x_leaves])
    if (got := jax.tree.structure(carry)) != carry_tree:
        raise TypeError(f"body returns a carry of the structure {got}; it gets one of {carry_tree}.")
    direction = {"length": length, "reverse": bool(reverse), "unroll": unroll}
    layer = _Layer(_narrow_inputs(closed, len(carry_leaves)), len(carry_leaves), policy, direction)
    carry, y_leaves = _run(layer, closed.consts, carry_leaves, x_leaves)
    return jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(jax.tree.structure(ys), y_leaves)


def _narrow_inputs(closed: core.ClosedJaxpr, first: int) -> core.ClosedJaxpr:
    """The function with narrower types for inputs, from `first` on, whose only use is one cast to a narrower float.

    Their gradients then have the narrower type too: with float32 parameters and bfloat16 products, the stack of all
    layers' gradients takes half the memory. The values are the same: the cast's gradient only widens.
    """
    jaxpr = closed.jaxpr
    users: dict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if isinstance(var, core.Var):
                users[var].append(eqn)
    # Not with two casts: the gradient is then a sum, which needs the wider type.
    casts = {
        var: users[var][0]
        for var in jaxpr.invars[first:]
        if len(users[var]) == 1 and var not in jaxpr.outvars and _narrows(users[var][0])
    }
    invars = [casts[var].outvars[0] if var in casts else var for var in jaxpr.invars]
    eqns = [eqn for eqn in jaxpr.eqns if not any(eqn is cast for cast in casts.values())]
    return closed.replace(jaxpr=jaxpr.replace(invars=invars, eqns=eqns))


def _narrows(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type" or eqn.params["sharding"] is not None:
        return False
    dtypes = [var.aval.dtype for var in (eqn.invars[0], eqn.outvars[0])]
    return all(jnp.issubdtype(d, jnp.floating) for d in dtypes) and dtypes[1].itemsize < dtypes[0].itemsize


def _differentiable(arrays: list[Any]) -> list[Any]:
    return [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """body as a function of flat lists: closed-over arrays, the carry, and one layer's x in the types of `cast`."""

    closed: core.ClosedJaxpr
    carries: int
    policy: Policy
    direction: dict[str, Any]  # length, reverse and unroll of `jax.lax.scan`

    def cast(self, x: Arrays) -> Arrays:
        wanted: list[Any] = self.closed.in_avals[self.carries :]
        return [v if v.dtype == aval.dtype else v.astype(aval.dtype) for v, aval in zip(x, wanted, strict=True)]

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = core.jaxpr_as_fun(self.closed.replace(consts=consts))(*carry, *x)
        return out[: self.carries], out[self.carries :]

    def vjp(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Any]:
        """(carry, y, vjp of the differentiable ones)."""

        def run(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
            # Values to offload are kept here; `_forward` moves them. No barriers against CSE: the forward and the
            # backward are two loops.
            carry, y = jax.checkpoint(self, policy=self.policy.on_device(), prevent_cse=False)(consts, carry, x)
            return (_differentiable(carry), _differentiable(y)), (carry, y)

        _, vjp, (carry, y) = jax.vjp(run, consts, carry, x, has_aux=True)
        return carry, y, vjp


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """Where a layer's backward finds the leaves of its vjp function, a pytree of structure `tree`."""

    tree: Any
    # ("const", i) or ("x", i), which exist anyway; ("own", i), which a layer saves
    sources: tuple[tuple[str, int], ...]
    offloaded: int  # how many of its own go to the host; they come first

    def vjp(self, consts: Arrays, x: Arrays, own: Arrays) -> Any:
        arrays = {"const": consts, "x": x, "own": own}
        return jax.tree.unflatten(self.tree, [arrays[kind][i] for kind, i in self.sources])


def _trace(layer: _Layer, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[core.ClosedJaxpr, _Residuals]:
    """One layer's forward as a function of (consts, carry, x) that returns (carry, y, own residuals).

    Each residual is returned once: a `jax.checkpoint` inside body returns its inputs again, weights included.
    """
    closed, (_, y, vjp) = jax.make_jaxpr(layer.vjp, return_shape=True)(consts, carry, x)
    invars, outvars, results = closed.jaxpr.invars, closed.jaxpr.outvars, len(carry) + len(y)
    given = {var: ("const", i) for i, var in enumerate(invars[: len(consts)])}
    given |= {var: ("x", i) for i, var in enumerate(invars[len(consts) + len(carry) :])}
    origins = [origin(closed.jaxpr, var) for var in outvars[results:]]
    own: dict[bool, dict[Any, Any]] = {True: {}, False: {}}  # by whether it is offloaded: its origin -> its variable
    for var, (source, name) in zip(outvars[results:], origins, strict=True):
        if source not in given and source not in own[True] | own[False]:
            on_host = name is not None and layer.policy.choice(name) == "offload"
            on_host &= not jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)  # XLA has no host memory for keys
            own[on_host][source] = var
    saved = own[True] | own[False]
    sources = given | {source: ("own", i) for i, source in enumerate(saved)}
    debug_info = closed.jaxpr.debug_info._replace(result_paths=None)
    jaxpr = closed.jaxpr.replace(outvars=[*outvars[:results], *saved.values()], debug_info=debug_info)
    of_leaves = tuple(sources[source] for source, _ in origins)
    return closed.replace(jaxpr=jaxpr), _Residuals(jax.tree.structure(vjp), of_leaves, len(own[True]))


def _run(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
    @jax.custom_vjp
    def run(consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return jax.lax.scan(lambda carry, x: layer(consts, carry, layer.cast(x)), init, xs, **layer.direction)

    run.defvjp(lambda *args: _forward(layer, *args), functools.partial(_backward, layer))
    return run(consts, init, xs)


def _forward(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
    """Each residual's copy starts when it is computed and ends with its layer: later it would need memory beside the
    next layer's. The last layer's residuals also stay on the device: the backward reads them first."""
    layers = xs[0].shape[0]
    x = layer.cast([x[0] for x in xs])
    forward, residuals = _trace(layer, consts, init, x)
    names = layer.policy.names
    if unknown(names, count_names(forward.jaxpr)):  # the forward has only the names that the policy saves
        check_known(names, residual_bytes(layer, consts, init, x), "body")
    results = len(layer.closed.out_avals)
    kept_from = results + residuals.offloaded

    def step(state: tuple[jax.Array, Arrays, Arrays, Arrays], x: Arrays) -> tuple[Any, Any]:
        i, carry, _, host = state
        out = core.jaxpr_as_fun(forward)(*consts, *carry, *layer.cast(x))
        own = out[results:kept_from]
        # Of another type than the counter: XLA would merge an int32 i + 1 with the loop's next counter, which is
        # written over i after all reads of i.
        row = i.astype(jnp.uint32) + 1
        host = [_write_row(h, r, row) for h, r in zip(host, own, strict=True)]
        return (i + 1, out[: len(carry)], own, host), (out[len(carry) : results], out[kept_from:])

    def fill(number: int, shape: tuple[int, ...], aval: Any) -> jax.Array:
        return vary_as(aval, jnp.full(shape, number, aval.dtype))

    avals = forward.out_avals[results:kept_from]
    # Each host buffer gets a different fill value, so that XLA does not merge the allocations and copy.
    host = [_to_host(fill(number, (layers + 1, *aval.shape), aval)) for number, aval in enumerate(avals)]
    own = [fill(0, aval.shape, aval) for aval in avals]
    (_, carry, last, host), (ys, kept) = jax.lax.scan(step, (jnp.int32(0), init, own, host), xs, **layer.direction)
    return (carry, ys), (residuals, consts, xs, last, host, kept)


@functools.partial(jax.jit, inline=True)
def _to_host(x: jax.Array) -> jax.Array:
    """Copies x in a program of its own: jax.shard_map without jax.jit takes no jax.device_put."""
    return jax.device_put(x, HOST)


def _backward(
    layer: _Layer, saved: Any, cotangents: tuple[list[Any], list[Any]]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Each iteration fetches the residuals of the layer before it, layer i's from row i + 1: layer 0 fetches the unused
    row 0. A row's index must be linear in the loop's counter: XLA reads any other index back from the device, and
    waits.
    """
    residuals, consts, xs, last, host, kept = saved
    ct_carry, ct_ys = map(_differentiable, cotangents)
    totals = [jnp.zeros_like(c) for c in _differentiable(consts)]

    def step(state: tuple[jax.Array, Arrays, Arrays, Arrays], per_layer: Any) -> tuple[Any, Arrays]:
        i, ct_carry, own, totals = state
        x, ct_y, kept = per_layer
        fetched = [_read_row(h, i) for h in host]
        vjp = residuals.vjp(consts, layer.cast(x), [*own, *kept])
        ct_consts, ct_carry, ct_x = map(_differentiable, vjp((ct_carry, ct_y)))
        # Gradients are written to their stacks after the fetch. XLA estimates every copy as five products long and
        # schedules what hides it from the iteration's end: without the barrier only the writes to the stacks are there.
        if fetched:
            ct_x, fetched = barrier((ct_x, fetched))
        return (i - 1, ct_carry, fetched, [t + ct for t, ct in zip(totals, ct_consts, strict=True)]), ct_x

    state = (jnp.int32(xs[0].shape[0] - 1), ct_carry, last, totals)
    direction = layer.direction | {"reverse": not layer.direction["reverse"]}
    (_, ct_carry, _, totals), ct_xs = jax.lax.scan(step, state, (xs, ct_ys, kept), **direction)
    return _spread(consts, totals), _spread(cotangents[0], ct_carry), _spread(xs, ct_xs)


# Rows of an array on the host. JAX's vmap makes a gather of them, whose index would have to be on the host too: here it
# is a row of another axis. JAX has tangents of host arrays on the device, and then two memories in one operation.
@functools.cache
def _rows(axis: int) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """(reads row i of a host array to the device, writes one)."""

    @jax.custom_batching.custom_vmap
    def read(h: jax.Array, i: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(h, i, axis, keepdims=False, allow_negative_indices=False)
        return jax.device_put(row, DEVICE)

    @jax.custom_batching.custom_vmap
    def write(h: jax.Array, r: jax.Array, i: jax.Array) -> jax.Array:
        r = jax.device_put(r, HOST)
        return jax.lax.dynamic_update_index_in_dim(h, r, i, axis, allow_negative_indices=False)

    @read.def_vmap
    def _(size: int, batched: list[bool], h: jax.Array, i: jax.Array) -> tuple[jax.Array, bool]:
        return _rows(axis + 1)[0](h, i), True

    @write.def_vmap
    def _(size: int, batched: list[bool], h: jax.Array, r: jax.Array, i: jax.Array) -> tuple[jax.Array, bool]:
        h, r = (
            x if there else jnp.broadcast_to(x, (size, *x.shape)) for x, there in zip((h, r), batched, strict=False)
        )
        return _rows(axis + 1)[1](h, r, i), True

    return read, write


@jax.custom_jvp
def _read_row(h: jax.Array, i: jax.Array) -> jax.Array:
    return _rows(0)[0](h, i)


@jax.custom_jvp
def _write_row(h: jax.Array, r: jax.Array, i: jax.Array) -> jax.Array:
    return _rows(0)[1](h, r, i)


@_read_row.defjvp
@_write_row.defjvp
def _differentiate_twice(primals: Any, tangents: Any) -> Any:
    keep = "keep these values instead: pass policy=policy.on_device()"
    raise NotImplementedError(f"a second derivative of jaxops.offload.scan with values on the host: {keep}.")


def _spread(primals: list[Any], cotangents: Arrays) -> list[Any]:
    """A cotangent for each primal, in its dtype; None for integers."""
    left = iter(cotangents)
    return [next(left).astype(p.dtype) if _differentiable([p]) else None for p in primals]
