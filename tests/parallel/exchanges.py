"""What tests of exchanges of tokens share: who sends to whom, what arrives, and the kernel's way without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.parallel import collect, dispatch, ragged_exchange
from jaxops.parallel.plan import ExchangePlan
from tests.parallel.cases import mesh_of

T, D, K, OWN = 3, 5, 2, 2  # tokens and experts of a device


def in_kernel(axes, R, operands, mine, got):
    """What the kernel does, with all devices' operands. Rows that nobody sends, and results with sizes that disagree,
    are NaN."""
    me, row = lax.axis_index(axes), jnp.arange(R)

    def sent(operand):
        everything, output = lax.all_gather((operand, mine), axes), jnp.full((R, operand.shape[1]), jnp.nan)
        for source in range(mine.at.shape[0]):
            theirs, runs = jax.tree.map(lambda array, source=source: array[source], everything)
            at = row - runs.theirs[me]
            rows = theirs[jnp.clip(runs.at[me] + at, 0, operand.shape[0] - 1)]
            output = jnp.where(((at >= 0) & (at < runs.sizes[me]))[:, None], rows, output)
            output = jnp.where(runs.sizes[me] == got.sizes[source], output, jnp.nan)
        return output.astype(operand.dtype)

    return tuple(map(sent, operands))


def use_kernel(patch) -> None:
    """Without a GPU: the kernel's way, with `in_kernel`."""
    patch.setattr(ragged_exchange, "make_exchange_plan", lambda *_, **__: ExchangePlan())
    patch.setattr(ragged_exchange, "_in_kernel", in_kernel)


def layer(given, axis, rows, devices, way="auto"):
    """Each token times the sum of its weights times (expert + 1), and what arrived."""
    x, experts, weights = given
    routing = jaxops.route_choices(experts, weights, max(OWN * devices, K))
    how: dict[str, Any] = {"backend": way}
    received = dispatch(x, routing, axis, rows=rows, **how)
    there = jnp.arange(received.x.shape[0])[:, None] < received.there.sizes.sum()
    first = OWN * lax.axis_index(axis) + 1
    of_experts = jnp.where(received.routing.experts >= 0, received.routing.experts + first, 0)
    factor = jnp.sum(received.routing.weights * of_experts.astype(jnp.float32), axis=1, keepdims=True)
    y = received.x * factor.astype(x.dtype)
    arrived = jnp.where(there, received.x, 0), received.dropped, there.sum()[None], received.routing.load[:OWN]
    return collect(y, received, **how), arrived


@functools.cache
def compiled(mesh_shape: tuple[int, ...], axis, rows: int | None, way: str, check_vma: bool = True):
    """(result, what arrived, dx, dweights) of x [P, n * T, D], experts, weights [P, n * T, K], dout, for each of P."""
    names, devices = ("i", "j")[: len(mesh_shape)], int(np.prod(mesh_shape))

    def one(given):
        x, experts, weights, dout = given
        f = lambda x, weights: layer((x, experts, weights), axis, rows, devices, way)
        out, vjp, arrived = jax.vjp(f, x, weights, has_aux=True)
        return out, *arrived, *vjp(dout)

    local = lambda *given: lax.map(one, given)
    split = P(None, axis)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh_of(*mesh_shape, names=names), in_specs=split, out_specs=split, check_vma=check_vma
        )
    )


def operands(experts: np.ndarray, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Small whole numbers, whose sums are exact. A token without an expert is NaN."""
    rng = np.random.default_rng(seed)
    shape = experts.shape[:2]
    x, dout = (rng.integers(-3, 4, size=(*shape, D)).astype(np.float32) for _ in range(2))
    x[(experts < 0).all(axis=2)] = np.nan
    return x, experts, rng.integers(1, 4, size=experts.shape).astype(np.float32), dout


def wanted(given, devices: int, rows: int | None = None):
    """Token by token, for one pattern: as of `compiled`."""
    x, experts, weights, dout = given
    R, n = min(rows or devices * T, devices * T), len(x)
    arrived = np.zeros((devices, devices * T if rows is None else R, D), np.float32)
    counts, kept = np.zeros(devices, np.int64), np.zeros(experts.shape, bool)
    for t in range(n):  # sources in order, and their tokens
        for device in {int(e) // OWN for e in experts[t] if e >= 0}:
            if counts[device] < R:
                arrived[device, counts[device]] = x[t]
                counts[device] += 1
                kept[t] |= (experts[t] >= 0) & (experts[t] // OWN == device)
    factor = np.where(kept, weights * (experts + 1), 0).sum(axis=1, keepdims=True)
    clean = np.where(np.isnan(x), 0, x)
    dweights = np.where(kept, (experts + 1) * (clean * dout).sum(axis=1, keepdims=True), 0)
    dropped = (experts >= 0) & ~kept
    load = np.bincount(experts[kept], minlength=OWN * devices)
    return clean * factor, arrived.reshape(-1, D), dropped, counts, load, factor * dout, dweights


def patterns(sends: np.ndarray) -> np.ndarray:
    """Experts [P, n * T, K] of tokens: each source's go to its targets, sends [P, n, n], in turn."""
    count, n, _ = sends.shape
    experts = np.full((count, n, T, K), -1, np.int32)
    for pattern, source in np.ndindex(count, n):
        if len(targets := np.flatnonzero(sends[pattern, source])):
            for token, j in np.ndindex(T, K):
                experts[pattern, source, token, j] = OWN * targets[(token + j) % len(targets)] + (token + j) % OWN
    return experts.reshape(count, n * T, K)
