"""`jax.lax.scan` whose backward finds its residuals in the host's memory, moved there and back behind the layers' own work."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from jaxops._lib.manual_axes import vary_as
from jaxops.offload.policies import Policy

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Arrays = list[jax.Array]


def scan(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, policy: Policy) -> tuple[Any, Any]:
    """`jax.lax.scan(jax.checkpoint(body, policy=policy), init, xs)`, with the copies to the host and back hidden.

    As JAX writes that scan, a layer's backward begins by waiting for its own residuals, and its forward ends when they are gone. Here they are one layer
    behind: while a layer is computed, the residuals of the one before it leave, and in the backward those of the one that is next come. So two layers'
    residuals are in the device's memory at a time, and all others in the host's. The last layer's never leave. On a CPU, whose memory is the host's, nothing
    moves, and the values are the same.

    The carry as each layer gets it is called "carry": with `policy({"carry": "offload"})` and nothing else, layers are recomputed from inputs that lie on the
    host. Without a choice for it, it is kept, as by `jax.checkpoint`.

    Args:
      body: (carry, x) -> (carry, y), with the carry's types unchanged; may use arrays from around it, and has their gradients.
      init, xs: as of `jax.lax.scan`; xs has at least one array, and at least one layer.
      policy: of body's named values.

    Returns:
      (carry, ys) as of `jax.lax.scan`. Differentiable in reverse mode, once.

    Raises:
      ValueError: xs without arrays, or with leading axes that differ or are zero.
      TypeError: body returns a carry of other types.
    """
    layers = _layers(xs)
    carry_leaves, carry_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, init))
    x_leaves, x_tree = jax.tree.flatten(xs)

    def named(carry: Arrays, x: Arrays) -> tuple[Any, Any]:
        carry = [checkpoint_name(c, "carry") for c in carry]
        return body(jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(x_tree, x))

    first = [x[0] for x in x_leaves]
    closed, out = jax.make_jaxpr(named, return_shape=True)(carry_leaves, first)
    _check_carry(out[0], carry_tree, [jax.typeof(c) for c in carry_leaves], [v.aval for v in closed.jaxpr.outvars])
    layer = _Layer(closed, len(carry_leaves), policy)
    carry, ys = _run(layer, closed.consts, carry_leaves, x_leaves)
    assert all(y.shape[0] == layers for y in ys)
    return jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(jax.tree.structure(out[1]), ys)


def _layers(xs: Any) -> int:
    lengths = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or not all(lengths):
        raise ValueError(f"xs has the leading axes {sorted(map(str, lengths))}; all its arrays must have one leading axis, the layers, of at least 1.")
    return int(lengths.pop() or 0)


def _check_carry(out: Any, tree: Any, before: list[Any], after: list[Any]) -> None:
    if jax.tree.structure(out) != tree:
        raise TypeError(f"body returns a carry of the structure {jax.tree.structure(out)}; it gets one of {tree}.")
    for b, a in zip(before, after, strict=False):
        if (b.shape, b.dtype) != (a.shape, a.dtype):
            raise TypeError(f"body returns {a.str_short()} where its carry has {b.str_short()}; a carry must keep its types.")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """body as a function of flat lists: the arrays around it, the carry, one layer's x."""

    closed: Any
    carries: int
    policy: Policy

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = jaxpr_as_fun(self.closed.replace(consts=consts))(*carry, *x)
        return out[: self.carries], out[self.carries :]

    def vjp(self, policy: Policy, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
        """((carry, y), vjp): vjp is of the inexact ones alone, and has as opaque_residuals what policy keeps."""

        def inexact(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
            # prevent_cse's barriers would only hinder: between forward and backward stand two loops.
            carry, y = jax.checkpoint(self, policy=policy, prevent_cse=False)(consts, carry, x)
            return ([c for c in carry if _smooth(c)], [v for v in y if _smooth(v)]), (carry, y)

        _, vjp, out = jax.vjp(inexact, consts, carry, x, has_aux=True)
        return out, vjp


def _smooth(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _residuals(layer: _Layer, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[list[Any], list[bool]]:
    """The types of what a layer keeps, and which of them go to the host."""

    def of(policy: Policy) -> list[Any]:
        return list(jax.make_jaxpr(lambda *args: layer.vjp(policy, *args)[1].opaque_residuals)(consts, carry, x).out_avals)

    here, there = of(layer.policy.on_device()), of(layer.policy)
    assert [(a.shape, a.dtype) for a in here] == [(a.shape, a.dtype) for a in there]
    return here, [a.memory_space == HOST for a in there]


def _run(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
    @jax.custom_vjp
    def run(consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        return jax.lax.scan(lambda carry, x: layer(consts, carry, x), init, xs)

    run.defvjp(lambda *args: _forward(layer, *args), _backward)
    return run(consts, init, xs)


def _forward(layer: _Layer, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
    kept, leaves = _residuals(layer, consts, init, [x[0] for x in xs])
    nothing = [vary_as(aval, jnp.zeros(aval.shape, aval.dtype)) for aval, away in zip(kept, leaves, strict=True) if away]

    def step(state: tuple[Arrays, Arrays, Arrays], x: Arrays) -> tuple[tuple[Arrays, Arrays, Arrays], Any]:
        consts, carry, before = state  # consts are carried so that `jax.vjp` knows them as its arguments: it would call an outer trace's arrays residuals
        gone = [jax.device_put(b, HOST) for b in before]
        (after, y), vjp = layer.vjp(layer.policy.on_device(), consts, carry, x)
        own = [r for r, away in zip(vjp.opaque_residuals, leaves, strict=True) if away]
        stay = [r for r, away in zip(vjp.opaque_residuals, leaves, strict=True) if not away]
        # Of a layer's arguments only the carry has to be kept, if it is needed: consts and x are there in the backward, too.
        rest = dataclasses.replace(vjp, args_res=[None, vjp.args_res[1], None], opaque_residuals=stay)
        return (consts, after, own), (y, gone, rest)

    (_, carry, last), (ys, gone, rest) = jax.lax.scan(step, (consts, init, nothing), xs)
    return (carry, ys), (consts, xs, last, gone, _Static(tuple(leaves)), rest)


def _backward(residuals: Any, cotangents: tuple[Arrays, Arrays]) -> tuple[list[Any], list[Any], list[Any]]:
    consts, xs, last, gone, leaves, rest = residuals
    ct_carry, ct_ys = ([ct for ct in cts if _is_cotangent(ct)] for cts in cotangents)
    totals = [jnp.zeros_like(c) for c in consts if _smooth(c)]

    def step(state: tuple[Arrays, Arrays, Arrays], layer: Any) -> tuple[tuple[Arrays, Arrays, Arrays], Arrays]:
        ct_carry, here, totals = state
        x, ct_y, before, rest = layer
        coming = [jax.device_put(b, DEVICE) for b in before]
        fetched, stayed = iter(here), iter(rest.opaque_residuals)
        opaque = [next(fetched) if away else next(stayed) for away in leaves.value]
        vjp = dataclasses.replace(rest, args_res=[consts, rest.args_res[1], x], opaque_residuals=opaque)
        ct_consts, ct_carry, ct_x = ([ct for ct in cts if _is_cotangent(ct)] for cts in vjp((ct_carry, ct_y)))
        return (ct_carry, coming, [t + ct for t, ct in zip(totals, ct_consts, strict=True)]), ct_x

    # The forward's round i stored what layer i - 1 keeps, so here it brings what the next round needs; what it brings in round 0 is nobody's.
    (ct_carry, _, totals), ct_xs = jax.lax.scan(step, (ct_carry, last, totals), (xs, ct_ys, gone, rest), reverse=True)
    return _spread(consts, totals), _spread(cotangents[0], ct_carry), _spread(xs, ct_xs)


def _is_cotangent(ct: Any) -> bool:
    return ct.dtype != jax.dtypes.float0


def _spread(primals: list[Any], cotangents: Arrays) -> list[Any]:
    """One for each primal: None where it has none."""
    left = iter(cotangents)
    return [next(left) if _smooth(p) else None for p in primals]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: tuple[bool, ...]
