"""Random problems for every Hopper kernel, in small whole numbers: all sums are exact, so a kernel has the reference's
bits, on the card and in the simulator (tests/gluon_simulator).

Sizes are no multiples of a tile. There are empty groups, rows outside the groups, with NaN in them, and more tiles than
the simulated card has programs.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxops
from jaxops._lib.numerics import activations
from jaxops._lib.planning.device import Device, current_device
from jaxops.ops.grouped_matmul import Plan, Tiles, grouped_matmul_sum
from tests.arrays import put

H200 = Device("NVIDIA H200", "gpu")


@dataclasses.dataclass(frozen=True)
class Problem:
    """run(*arrays) calls the kernel, want() is what it must return.

    close: of `compare`.
    """

    run: Callable[..., Any]
    arrays: tuple
    want: Callable[[], tuple[np.ndarray, ...]]
    close: int = 0

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.run)(*self.arrays))]


def compare(found, wanted, close: int) -> None:
    """Equal; or where an activation is not exact within so many roundings to bfloat16, and of FP8 numbers one in 10,000
    may be its neighbour."""
    assert len(found) == len(wanted)
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape, f"result {i}"
        assert np.isnan(y.astype(np.float32)).mean() < 0.5, "nothing to compare"
        itemsize, y = x.dtype.itemsize, y.astype(x.dtype).astype(np.float32)
        x = x.astype(np.float32)
        different = np.abs(x - y) > (close * 2.0**-8 * np.abs(y) + (1e-3 if close else 0))
        if close and itemsize == 1 and different.mean() < 1e-4:
            different = np.abs(x - y) > np.abs(y) / 8
        different |= np.isnan(x) != np.isnan(y)
        assert not different.any(), f"result {i}: {different.sum()} of {x.size} differ, at {np.argwhere(different)[0]}"


KINDS: dict[str, Callable[[np.random.Generator], Problem]] = {}


def problem_of(name: str, seed: int) -> Problem:
    return KINDS[name](np.random.default_rng([seed, zlib.crc32(name.encode())]))


def kind(name: str, *variants: str):
    """Registers a function of a generator; with variants one problem for each."""

    def register(function):
        for variant in variants or ("",):
            call = functools.partial(function, variant) if variants else function
            KINDS[f"{name}-{variant}" if variant else name] = call
        return function

    return register


def whole(rng, *shape: int, most: int = 3, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return rng.integers(-most, most + 1, shape).astype(dtype)


def offsets_of(rng, M: int, G: int) -> np.ndarray:
    """G groups in M rows: one is empty, one has one row, one 64; some rows are before and some behind all groups."""
    cuts = np.sort(rng.integers(73, M - 3, G - 4))
    return np.array([5, 5, 6, 70, *cuts, M - 3], np.int32)


def spoiled(rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """With NaN outside the groups."""
    rows = rows.copy()
    rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    return rows


def inside_of(offsets: np.ndarray, M: int) -> np.ndarray:
    row = np.arange(M)
    return (row >= offsets[0]) & (row < offsets[-1])


def wild_indices(rng: np.random.Generator, tokens: int, rows: int) -> np.ndarray:
    """Tokens repeated and left out, in no order; a tenth are no tokens."""
    some = rng.integers(0, tokens, rows)
    return np.where(rng.random(rows) < 0.1, rng.choice([-1, tokens, -(2**31), 2**31 - 1], rows), some)


def groups(offsets: np.ndarray):
    return [(g, slice(lo, hi)) for g, (lo, hi) in enumerate(itertools.pairwise(offsets))]


def product(lhs, rhs, offsets, bias=None) -> np.ndarray:
    """Each group's rows times its matrix, in float32; zeros outside."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.float32)
    for g, rows in groups(offsets):
        out[rows] = lhs[rows].astype(np.float32) @ rhs[g].astype(np.float32)
        if bias is not None:
            out[rows] += bias[g].astype(np.float32)
    return out


def gradient(lhs, dout, offsets) -> np.ndarray:
    return np.stack([lhs[r].astype(np.float32).T @ dout[r].astype(np.float32) for _, r in groups(offsets)])


# grouped_matmul, one array of weights or one a modality

_HOPPER = functools.partial(Tiles, kernel="triton")
TILES = {
    "ping-pong": _HOPPER(128, 128, 64, 8, 5, 3, ping_pong=True),
    "ping-pong-halves": _HOPPER(128, 128, 64, 8, 6, 2, ping_pong=True),
    "256x128": _HOPPER(256, 128, 64, 8, 3, 2),
    "256x128-halves": _HOPPER(256, 128, 64, 8, 4, 3),
    "128x256": _HOPPER(128, 256, 64, 8, 3, 2),
    "128x256-halves": _HOPPER(128, 256, 64, 8, 4, 2),
    "cluster": _HOPPER(256, 256, 64, 8, 3, 2),
    "cluster-halves": _HOPPER(256, 256, 64, 8, 4, 1),
}


def _grouped(rng, M=435, K=136, N=264, G=5, offsets=None):
    """N: rows of results are no whole sectors, and stored by threads; K: or by TMA if N is a multiple of 16."""
    offsets = offsets_of(rng, M, G) if offsets is None else np.array(offsets, np.int32)
    lhs, dout = (spoiled(whole(rng, M, n), offsets) for n in (K, N))
    return lhs, whole(rng, G, K, N), whole(rng, G, N), dout, offsets


@kind("grouped_matmul", *sorted(TILES.keys() - {"256x128-halves", "128x256"}))
def _three_passes(name: str, rng) -> Problem:
    lhs, rhs, bias, dout, offsets = _grouped(
        rng, K=144 if "halves" in name else 136, N=264 if "halves" in name else 272
    )
    rhs[-1, 0, 0] = np.nan  # next in memory to another group's matrix, whose rows stay numbers
    plan = Plan("triton", *[TILES[name]] * 3)

    def run(lhs, rhs, dout, offsets):
        out, vjp = jax.vjp(lambda a, b: jaxops.grouped_matmul(a, b, offsets, bias=put(bias), plan=plan), lhs, rhs)
        return out, *vjp(dout)

    def want():
        dlhs = product(dout, rhs.swapaxes(1, 2), offsets)
        return product(lhs, rhs, offsets, bias), dlhs, gradient(lhs, dout, offsets)

    return Problem(run, (lhs, rhs, dout, offsets), want)


@kind("grouped_wgrad", *sorted(TILES.keys() - {"ping-pong", "128x256-halves"}))
def _split_and_added(name: str, rng) -> Problem:
    """Sums that are cut into parts, and added to what the result holds; a group without rows stays as it is."""
    N = 264 if TILES[name].bm == 256 else 272
    # As many parts as there may be, of one group or of two; or of most rows.
    offsets = [0, 0, 1_024, 1_024, 1_024, 1_024] if "halves" in name else [0, 0, 512, 512, 1_024, 1_024]
    if name == "256x128":
        offsets = [5, 5, 6, 70, 960, 1_020]
    split = 4 if offsets[2] == 512 else int(rng.integers(5, 9))  # groups of just two parts
    lhs, rhs, _, dout, offsets = _grouped(rng, M=1_024, K=72 if "128x" in name else 200, N=N, offsets=offsets)
    plan = Plan("triton", wgrad=dataclasses.replace(TILES[name], split=split))
    before = rhs.astype(np.float32)
    before[0, 0, 0] = -0.0
    run = lambda lhs, dout, offsets, sums: (
        jaxops.grouped_wgrad(lhs, dout, offsets, plan=plan),
        jaxops.grouped_wgrad(lhs, dout, offsets, plan=plan, accumulate_into=sums),
    )
    want = lambda: (gradient(lhs, dout, offsets), before + gradient(lhs, dout, offsets))
    return Problem(run, (lhs, dout, offsets, before), want)


@kind("grouped_wgrad_added", "ping-pong", "128x256-halves", "cluster")
def _added(name: str, rng) -> Problem:
    """Whole sums that are added to what the result holds, and NaN that stays where it is. The second launch adds
    to the first one's result. Few: TMA would add group 0's tiles to rows of group 1, too."""
    few = name == "128x256-halves"
    offsets, empty = ([5, 6, 70, 70, 150, 432], 2) if few else (None, 0)
    lhs, rhs, _, dout, offsets = _grouped(rng, K=40 if few else 200, N=328, offsets=offsets)
    plan = Plan("triton", wgrad=TILES[name])
    before = rhs.astype(np.float32)
    before[empty, 0, 0], before[empty, -1], before[3, 1, 1] = -0.0, np.nan, np.nan

    def run(lhs, dout, offsets, sums):
        once = jaxops.grouped_wgrad(lhs, dout, offsets, plan=plan, accumulate_into=sums)
        return once, jaxops.grouped_wgrad(lhs, dout, offsets, plan=plan, accumulate_into=once)

    added = gradient(lhs, dout, offsets)
    return Problem(run, (lhs, dout, offsets, before), lambda: (before + added, before + 2 * added))


def _forward_and_wgrad(name: str, lhs, rhs, dout, offsets) -> Problem:
    plan = Plan("triton", *[TILES[name]] * 3)
    run = lambda lhs, rhs, dout, offsets: (
        jaxops.grouped_matmul(lhs, rhs, offsets, plan=plan),
        jaxops.grouped_wgrad(lhs, dout, offsets, plan=plan),
    )
    want = lambda: (product(lhs, rhs, offsets), gradient(lhs, dout, offsets))
    return Problem(run, (lhs, rhs, dout, offsets), want)


@kind("grouped_matmul_empty", "ping-pong", "cluster", "cluster-halves")
def _tiles_without_steps(name: str, rng) -> Problem:
    """Most groups are empty, most rows in none: one tile without steps after another. A cluster's second program has
    no rows of the weight gradients."""
    M, K, N, G = 3_000, 72, 272, 30
    sizes = np.where(rng.random(G) < 0.1, rng.integers(1, 90, G), 0)
    offsets = np.cumsum([M // 3, *sizes]).astype(np.int32)
    (lhs, dout), rhs = (spoiled(whole(rng, M, n), offsets) for n in (K, N)), whole(rng, G, K, N)
    return _forward_and_wgrad(name, lhs, rhs, dout, offsets)


@kind("grouped_matmul_few", "128x256", "cluster-halves")
def _few_rows(name: str, rng) -> Problem:
    """Fewer rows than a store has, and widths of one step and one tile."""
    offsets = np.array([2, 9, 9, 20, 21], np.int32)
    lhs, dout, rhs = spoiled(whole(rng, 23, 64), offsets), spoiled(whole(rng, 23, 32), offsets), whole(rng, 4, 64, 32)
    return _forward_and_wgrad(name, lhs, rhs, dout, offsets)


@kind("grouped_matmul_sum", "128x256", "ping-pong", "cluster")
def _two_products(name: str, rng) -> Problem:
    lhs, rhs, _, _, offsets = _grouped(rng)
    other, other_rhs = spoiled(whole(rng, *lhs.shape), offsets), whole(rng, *rhs.shape)
    plan = Plan("triton", fwd=TILES[name], device=H200)

    def run(a, b, c, d, offsets):
        how = {"plan": plan, "out_dtype": jnp.float32}
        turned = tuple(jnp.swapaxes(w, 1, 2) for w in (c, d))
        return (
            grouped_matmul_sum((a, b), (c, d), offsets, **how),
            grouped_matmul_sum((a, b), turned, offsets, **how, transpose_rhs=True),
        )

    want = lambda: (product(lhs, rhs, offsets) + product(other, other_rhs, offsets),) * 2
    return Problem(run, (lhs, other, rhs, other_rhs, offsets), want)


@kind("modality_grouped_matmul", "128x256", "ping-pong", "cluster")
def _modalities(name: str, rng) -> Problem:
    """Of three modalities the middle one has the most rows, others the most columns; NaN past a modality's own K."""
    M, shapes = 400, ((2, 72, 200), (3, 136, 72), (1, 16, 264))
    offsets = offsets_of(rng, M, 6)
    lhs, dout = (spoiled(whole(rng, M, n), offsets) for n in (136, 264))
    firsts = np.cumsum([0, *(g for g, _, _ in shapes)])
    for (_, K, N), lo, hi in zip(shapes, firsts[:-1], firsts[1:], strict=True):
        lhs[offsets[lo] : offsets[hi], K:], dout[offsets[lo] : offsets[hi], N:] = np.nan, np.nan
    lhs[5, 2] = np.nan  # reaches no column past its modality's own
    rhs = tuple(whole(rng, *shape) for shape in shapes)
    rhs[1][-1, 0, 0] = np.nan  # next in memory to another group's matrix, whose rows stay numbers
    plan = Plan("triton", *[TILES[name]] * 3)

    def run(lhs, rhs, dout, offsets):
        out, vjp = jax.vjp(lambda a, b: jaxops.modality_grouped_matmul(a, b, offsets, plan=plan), lhs, rhs)
        return out, *vjp(dout)

    def want():
        out, dlhs, drhs = np.zeros((M, 264), np.float32), np.zeros((M, 136), np.float32), []
        for w, lo, hi in zip(rhs, firsts[:-1], firsts[1:], strict=True):
            K, N, own = *w.shape[1:], offsets[lo : hi + 1]
            rows = slice(own[0], own[-1])
            out[rows, :N] = product(lhs[:, :K], w, own)[rows]
            dlhs[rows, :K] = product(dout[:, :N], w.swapaxes(1, 2), own)[rows]
            drhs.append(gradient(lhs[:, :K], dout[:, :N], own))
        return out, dlhs, *drhs

    return Problem(run, (lhs, rhs, dout, offsets), want)


# The gated unit, and the backward of the layer around it


def unit_of(gate, up, activation: str) -> np.ndarray:
    """In float32, from pre-activations that are rounded to bfloat16."""
    gate, up = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (gate, up))
    return np.asarray(activations.unit(activation, put(gate), put(up)))


ACTIVATIONS = sorted(activations.ACTIVATIONS)
UNITS = (
    *("gelu", "sigmoid", "silu", "silu-gathered", "relu-gathered", "swiglu_oai-biased", "silu-joined"),
    "swiglu_oai-gathered-joined-biased",
)


@kind("grouped_glu", *UNITS)  # moe_mlp_bwd has them all
def _unit(name: str, rng) -> Problem:
    """With what is saved; rows in place or where wild indices say; weights in two arrays or in one."""
    activation, *options = name.split("-")
    gathered, joined, biased = (option in options for option in ("gathered", "joined", "biased"))
    M, K, F, G, T = 420, 128 if gathered else 136, 264 if gathered else 272, 5, 530
    offsets = offsets_of(rng, M, G)
    if gathered and not joined:  # no index is read behind the last one
        offsets[-1] = M
    x = whole(rng, T if gathered else M, K, most=1)
    # Of "swiglu_oai" a third is clamped.
    weights = tuple(whole(rng, G, K, F, most=1) / (1 if activation == "swiglu_oai" else 4) for _ in range(2))
    bias = whole(rng, G, 2 * F, dtype=np.float32) if biased else np.zeros((G, 2 * F), np.float32)
    indices = wild_indices(rng, T, M)
    x[9, 3] = np.nan
    indices[8], indices[-7] = 9, T - 1
    rows = spoiled(x[np.clip(indices, 0, T - 1)] if gathered else x, offsets)
    stages, save = (3, True) if activation < "relu" else (4, bool(gathered) or activation == "silu")

    def run(x, gate, up, offsets, indices):
        from jaxops.ops.grouped_glu.fwd_triton import fwd_triton

        given = (indices.astype(jnp.int32),) if gathered else ()
        how = {"activation": activation, "save": save, "panel": 2, "stages": stages}
        weights = (jnp.concatenate([gate, up], axis=2),) if joined else (gate, up)
        given = (put(bias) if biased else None, offsets, *given)
        return fwd_triton(x, weights, *given, **how, cores=current_device().cores)

    def want():
        gate, up = (product(rows, w, offsets, b) for w, b in zip(weights, np.split(bias, 2, axis=1), strict=True))
        saved = (np.concatenate([gate, up], axis=1),) if joined else (gate, up)
        return (unit_of(gate, up, activation), *saved) if save else (unit_of(gate, up, activation),)

    return Problem(run, (x if gathered else rows, *weights, offsets, indices.astype(np.int32)), want, close=1)


@kind("moe_mlp_bwd", *ACTIVATIONS, "swiglu_oai", "sigmoid-joined", "swiglu_oai-joined")
def _unit_backward(name: str, rng) -> Problem:
    activation, _, joined = name.partition("-")
    R, D, F, G = 90 if activation == "sigmoid" else 700, 136, 200, 6  # few: less than a box
    offsets = offsets_of(rng, R, G)
    dy = spoiled(whole(rng, R, D, most=2) / 2, offsets)
    most = 20 if activation == "swiglu_oai" else 2
    gate, up = (np.where(inside_of(offsets, R)[:, None], whole(rng, R, F, most=most) / 2, 0) for _ in range(2))
    gate[7, 3] = np.nan
    w, weights = whole(rng, G, F, D, most=2) / 4, (1 + whole(rng, R, dtype=np.float32)) / 4

    def run(dy, w, gate, up, weights, offsets):
        from jaxops.ops.moe_mlp.bwd_triton import bwd_triton

        how = {"activation": activation, "panel": 2, "cores": current_device().cores}
        pre = (jnp.concatenate([gate, up], axis=1),) if joined else (gate, up)
        *dpre, h, dots = bwd_triton(dy, w, pre, weights, offsets, **how)
        return *(jnp.split(dpre[0], 2, axis=1) if joined else dpre), h, jnp.sum(dots, axis=0)

    def want():
        dh, weight = product(dy, w.swapaxes(1, 2), offsets), weights[:, None]
        pre = put(gate, jnp.float32), put(up, jnp.float32)
        h, dpre = (
            np.asarray(activations.unit(activation, *pre)),
            activations.unit_gradients(activation, *pre, dh * weight),
        )
        return *map(np.asarray, dpre), h * weight, (dh * h).sum(1)

    return Problem(run, (dy, w, gate.astype(dy.dtype), up.astype(dy.dtype), weights, offsets), want, close=3)


# The logits of the last layer, with each row's statistics


@kind(
    "linear_cross_entropy", "128x256", "ping-pong:cap", "cluster-halves:sum", "cluster:bias",
    "128x256-halves:cap:sum:bias",
)  # fmt: skip
def _logits_and_statistics(name: str, rng) -> Problem:
    """Rows and words are no whole tiles. A row is NaN; a tile's words may all have a bias of -inf."""
    tiles, *options = name.split(":")
    cap, total, biased = 4.0 if "cap" in options else None, "sum" in options, "bias" in options
    T, D, V = 333, 136, 392
    x, w, bias = whole(rng, T, D), whole(rng, D, V) / 8, whole(rng, V, dtype=np.float32)
    x[7] = np.nan
    if cap is None:
        bias[256:] = -np.inf

    def run(x, w, bias):
        from jaxops.ops.linear_cross_entropy.logits_triton import logits_triton

        how = {"soft_cap": cap, "total": total, "tiles": TILES[tiles], "cores": current_device().cores}
        given = (w.T, bias) if biased else (w, None)
        products, log_sums, *totals = logits_triton(x, *given, transpose_w=biased, **how)
        return products, jax.nn.logsumexp(log_sums, axis=0), *(jnp.sum(t, axis=0) for t in totals)

    def want():
        products = (x.astype(np.float32) @ w.astype(np.float32)).astype(x.dtype)
        logits = products.astype(np.float64) + (bias if biased else 0)
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        most = logits.max(axis=1)
        log_sums = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
        return (products, log_sums, *[logits.sum(axis=1)] * total)

    return Problem(run, (x, w.astype(x.dtype), bias), want, close=1)
