"""`jax.lax.scan` whose backward finds its residuals in the host's memory, moved there and back behind the layers' own work."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxops._lib.manual_axes import barrier, vary_as
from jaxops.offload.casts import without_casts
from jaxops.offload.names import CARRY, check_known, unknown
from jaxops.offload.policies import Policy
from jaxops.offload.residuals import count_names, origin, residual_bytes

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Arrays = list[jax.Array]


def scan(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, policy: Policy) -> tuple[Any, Any]:
    """`jax.lax.scan(jax.checkpoint(body, policy=policy), init, xs)`, with the copies to the host and back hidden.

    As JAX writes that scan, a layer's backward begins by waiting for its own residuals. Here they are fetched one layer ahead: while a layer is computed,
    those of the one that is next come. In the forward residuals leave behind what is left of their layer. Two layers' residuals are in the device's memory at a
    time, and all others in the host's. On a CPU, whose memory is the host's, nothing moves, and the values are the same. Compile with `compiler_options`.

    The carry as each layer gets it is called "carry": with `policy({"carry": "offload"})` and nothing else, layers are recomputed from inputs that lie on the
    host. Without a choice for it, it is kept, as by `jax.checkpoint`.

    Args:
      body: (carry, x) -> (carry, y), with the carry's types unchanged; may use arrays from around it, and has their gradients.
      init, xs: as of `jax.lax.scan`; xs has at least one array, and at least one layer.
      policy: of body's named values.

    Returns:
      (carry, ys) as of `jax.lax.scan`. Differentiable in reverse mode, once.

    Raises:
      ValueError: xs without arrays, or with leading axes that differ or are zero. When it is differentiated: a policy with a name that none of body's values
        has, nor any that jaxops names (a policy may serve layers that differ).
      TypeError: body returns a carry of other types; policy is no `Policy`.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a {type(policy).__name__}; pass a jaxops.offload.Policy.")
    _check_layers(xs)
    carry_leaves, carry_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, init))
    x_leaves, x_tree = jax.tree.flatten(xs)

    def named(carry: Arrays, x: Arrays) -> tuple[Any, Any]:
        carry = [checkpoint_name(c, CARRY) for c in carry]
        return body(jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(x_tree, x))

    closed, out = jax.make_jaxpr(named, return_shape=True)(carry_leaves, [x[0] for x in x_leaves])
    _check_carry(out[0], carry_tree, [jax.typeof(c) for c in carry_leaves], [v.aval for v in closed.jaxpr.outvars])
    carry, ys = _run(
        _Layer(without_casts(closed, len(carry_leaves)), len(carry_leaves), policy),
        closed.consts,
        carry_leaves,
        x_leaves,
    )
    return jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(jax.tree.structure(out[1]), ys)


def _check_layers(xs: Any) -> None:
    lengths = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or not all(lengths):
        raise ValueError(
            f"xs has the leading axes {sorted(map(str, lengths))}; all its arrays must have one leading axis, the layers, of at least 1."
        )


def _check_carry(out: Any, tree: Any, before: list[Any], after: list[Any]) -> None:
    if jax.tree.structure(out) != tree:
        raise TypeError(f"body returns a carry of the structure {jax.tree.structure(out)}; it gets one of {tree}.")
    for b, a in zip(before, after, strict=False):
        if (b.shape, b.dtype) != (a.shape, a.dtype):
            raise TypeError(
                f"body returns {a.str_short()} where its carry has {b.str_short()}; a carry must keep its types."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """body as a function of flat lists: the arrays around it, the carry, one layer's x in the types that `cast` gives it."""

    closed: core.ClosedJaxpr
    carries: int
    policy: Policy

    def cast(self, x: Arrays) -> Arrays:
        wanted: list[Any] = self.closed.in_avals[self.carries :]
        return [v if v.dtype == aval.dtype else v.astype(aval.dtype) for v, aval in zip(x, wanted, strict=True)]

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = core.jaxpr_as_fun(self.closed.replace(consts=consts))(*carry, *x)
        return out[: self.carries], out[self.carries :]

    def vjp(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Any]:
        """(carry, y, vjp): vjp is of the smooth ones alone."""

        def smooth(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
            # What is to be offloaded is kept first: `_forward` moves it. prevent_cse's barriers would only hinder: forward and backward are two loops.
            carry, y = jax.checkpoint(self, policy=self.policy.on_device(), prevent_cse=False)(consts, carry, x)
            return ([c for c in carry if _smooth(c)], [v for v in y if _smooth(v)]), (carry, y)

        _, vjp, (carry, y) = jax.vjp(smooth, consts, carry, x, has_aux=True)
        return carry, y, vjp


def _smooth(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """Where a layer's backward finds what it needs.

    Attributes:
      tree: of the function that `jax.vjp` gives.
      sources: of each of its leaves: ("const", i) or ("x", i), which are there anyway, or ("own", i), which a layer keeps.
      away: of each of its own, whether it goes to the host.
    """

    tree: Any
    sources: tuple[tuple[str, int], ...]
    away: tuple[bool, ...]

    def vjp(self, consts: Arrays, x: Arrays, own: Arrays) -> Any:
        arrays = {"const": consts, "x": x, "own": own}
        return jax.tree.unflatten(self.tree, [arrays[kind][i] for kind, i in self.sources])

    def split(self, own: list[Any]) -> tuple[list[Any], list[Any]]:
        """Those that go, and those that stay."""
        pairs = list(zip(own, self.away, strict=True))
        return [r for r, away in pairs if away], [r for r, away in pairs if not away]

    def join(self, gone: Arrays, stayed: Arrays) -> Arrays:
        back, here = iter(gone), iter(stayed)
        return [next(back) if away else next(here) for away in self.away]


def _trace(layer: _Layer, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[core.ClosedJaxpr, _Residuals]:
    """The forward of one layer as a function of consts, carry and x to carry, y and its own residuals, each of them once: what goes into a `jax.checkpoint` in
    body comes out of it a second time, weights among it."""
    closed, (_, y, vjp) = jax.make_jaxpr(layer.vjp, return_shape=True)(consts, carry, x)
    results = len(carry) + len(y)
    given = {var: ("const", i) for i, var in enumerate(closed.jaxpr.invars[: len(consts)])}
    given |= {var: ("x", i) for i, var in enumerate(closed.jaxpr.invars[len(consts) + len(carry) :])}
    sources, away, own = [], [], {}
    for var in closed.jaxpr.outvars[results:]:
        place, name = origin(closed.jaxpr, var)
        if place in given:
            sources.append(given[place])
            continue
        if place not in own:
            own[place] = len(own), var
            away.append(name is not None and layer.policy.choice(name) == "offload")
        sources.append(("own", own[place][0]))
    outvars = [*closed.jaxpr.outvars[:results], *(var for _, var in own.values())]
    debug_info = closed.jaxpr.debug_info._replace(result_paths=None)
    return closed.replace(jaxpr=closed.jaxpr.replace(outvars=outvars, debug_info=debug_info)), _Residuals(
        jax.tree.structure(vjp), tuple(sources), tuple(away)
    )


def _check_names(layer: _Layer, seen: dict[str, int], *args: Arrays) -> None:
    """`seen` is what the policy left in the forward. Only where a name is not among them the layer is traced once more, without the policy."""
    names = layer.policy.keep + layer.policy.offload
    if unknown(names, seen):
        check_known(names, residual_bytes(layer, *args), "body")


def _run(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
    @jax.custom_vjp
    def run(consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return jax.lax.scan(lambda carry, x: layer(consts, carry, layer.cast(x)), init, xs)

    run.defvjp(lambda *args: _forward(layer, *args), functools.partial(_backward, layer))
    return run(consts, init, xs)


def _forward(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
    """A layer's residuals begin to leave where they are made, and are gone when the layer is done. A layer's time more would be of no use: they would have to
    make room, or be copied, before the next layer's are made. The last layer's stay as well: they are the first that the backward needs."""
    layers = xs[0].shape[0]
    x = layer.cast([x[0] for x in xs])
    forward, residuals = _trace(layer, consts, init, x)
    _check_names(layer, count_names(forward.jaxpr), consts, init, x)
    results = len(forward.out_avals) - len(residuals.away)

    def step(
        state: tuple[jax.Array, Arrays, Arrays, Arrays], x: Arrays
    ) -> tuple[tuple[jax.Array, Arrays, Arrays, Arrays], Any]:
        i, carry, _, host = state
        out = core.jaxpr_as_fun(forward)(*consts, *carry, *layer.cast(x))
        own, stayed = residuals.split(out[results:])
        # In another type than the counter's: as i + 1 it would be the loop's next counter, which is made in the place of i, once all that read i are done.
        place = i.astype(jnp.uint32) + 1
        host = [_put(h, jax.device_put(r, HOST), place) for h, r in zip(host, own, strict=True)]
        return (i + 1, out[: len(carry)], own, host), (out[len(carry) : results], stayed)

    going, _ = residuals.split(list(forward.out_avals[results:]))
    host = [jax.device_put(_filled(number, (layers + 1, *aval.shape), aval), HOST) for number, aval in enumerate(going)]
    here = [_filled(0, aval.shape, aval) for aval in going]
    (_, carry, last, host), (ys, stayed) = jax.lax.scan(step, (jnp.int32(0), init, here, host), xs)
    return (carry, ys), (residuals, consts, xs, last, host, stayed)


def _backward(
    layer: _Layer, saved: Any, cotangents: tuple[list[Any], list[Any]]
) -> tuple[list[Any], list[Any], list[Any]]:
    """While a layer is computed, the residuals of the one before it come. They stand one place further than their layer, so that the first layer, before which
    there is none, brings what nobody reads instead of what is not there. A place is the loop's counter, times and plus a constant: anything else XLA would ask
    the device for, and wait."""
    residuals, consts, xs, last, host, stayed = saved
    ct_carry, ct_ys = ([ct for ct in cts if _smooth(ct)] for cts in cotangents)
    totals = [jnp.zeros_like(c) for c in consts if _smooth(c)]

    def step(
        state: tuple[jax.Array, Arrays, Arrays, Arrays], per: Any
    ) -> tuple[tuple[jax.Array, Arrays, Arrays, Arrays], Arrays]:
        i, ct_carry, here, totals = state
        x, ct_y, stayed = per
        coming = [jax.device_put(_take(h, i), DEVICE) for h in host]
        vjp = residuals.vjp(consts, layer.cast(x), residuals.join(here, stayed))
        ct_consts, ct_carry, ct_x = ([ct for ct in cts if _smooth(ct)] for cts in vjp((ct_carry, ct_y)))
        # Gradients are copied into their stacks once all has come. XLA takes each copy to be as long as five products, whatever its size, and counts what hides
        # it from the round's end: there the stacks' copies are, and a copy that came behind those alone would be waited for.
        if coming:
            ct_x, coming = barrier((ct_x, coming))
        return (i - 1, ct_carry, coming, [t + ct for t, ct in zip(totals, ct_consts, strict=True)]), ct_x

    state = (jnp.int32(xs[0].shape[0] - 1), ct_carry, last, totals)
    (_, ct_carry, _, totals), ct_xs = jax.lax.scan(step, state, (xs, ct_ys, stayed), reverse=True)
    return _spread(consts, totals), _spread(cotangents[0], ct_carry), _spread(xs, ct_xs)


def _filled(number: int, shape: tuple[int, ...], aval: Any) -> jax.Array:
    """Room on the host is filled with a number that no other has, which XLA never writes: of two that are equal it makes one, and copies it there."""
    return vary_as(aval, jnp.full(shape, number, aval.dtype))


def _put(host: jax.Array, x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(host, x, i, 0, allow_negative_indices=False)


def _take(host: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(host, i, 0, keepdims=False, allow_negative_indices=False)


def _spread(primals: list[Any], cotangents: Arrays) -> list[Any]:
    """One for each primal, in its type: None where it has none."""
    left = iter(cotangents)
    return [next(left).astype(p.dtype) if _smooth(p) else None for p in primals]
