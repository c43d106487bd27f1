"""The passes (Pallas on Triton), with an online softmax. In fwd and dq a program owns a block of query rows of one head
and loops over the blocks of keys that they see. In dkv a program owns a block of keys of one head and loops over the
blocks of queries, of all heads that share it, that see some of it: deterministic, without atomics."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import load, store
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.packed_attention.plan import Arrays, Spec, Tiles
from jaxops.ops.packed_attention.visible import blocks_that_see
from jaxops.ops.packed_attention.xla import exact_lse

LOG2_E = 1.4426950408889634  # the GPU has 2 ** x, not e ** x
NONE = float(jnp.finfo(jnp.float32).min)  # the largest score before the first one: with -inf, rows without keys are NaN


@dataclasses.dataclass(frozen=True)
class Queries:
    """A block of query rows.

    Attributes:
      rows: int32 [bq], and their runs of keys `first` to `end` - 1.
      inside: bool [bq]: the row is of a sequence. The others may hold NaN. (As a range: a mask that had to be loaded
        first would delay the loads of the rows.)
    """

    rows: jax.Array
    first: jax.Array
    end: jax.Array
    inside: jax.Array

    @property
    def sees(self) -> jax.Array:
        """bool [bq]: the row sees some key."""
        return self.first < self.end

    @classmethod
    def of(cls, ref: dict, inside: tuple[jax.Array, jax.Array], i: jax.Array, bq: int) -> "Queries":
        """Block i. inside: of `load_inside`."""
        rows = i * bq + jnp.arange(bq, dtype=jnp.int32)
        there = rows < ref["first"].shape[0]
        first, end = (plgpu.load(ref[name].at[rows], mask=there, other=0) for name in ("first", "end"))
        return cls(rows, first, end, (inside[0] <= rows) & (rows < inside[1]))

    def mask(self, keys: jax.Array) -> jax.Array:
        """Which keys count, by broadcasting; the rows are the other axis."""
        first, end = (x[:, None] if keys.shape[0] == 1 else x[None, :] for x in (self.first, self.end))
        return (first <= keys) & (keys < end)


def load_inside(ref: dict) -> tuple[jax.Array, jax.Array]:
    """[1], [1]: the rows between which sequences of queries lie."""
    start, stop = (plgpu.load(ref["inside"].at[pl.ds(n, 1)]) for n in range(2))
    return start, stop


def padded(ref) -> int:
    """Columns of a head in registers."""
    return max(16, power_of_2(ref.shape[2]))


def load_rows(ref, rows: jax.Array, head: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[rows, H padded to a power of two] of ref [T, heads, H]; zeros where the mask does not hold, and past H."""
    H = ref.shape[2]
    columns = jnp.arange(padded(ref), dtype=jnp.int32)[None, :]
    index = (rows[:, None], jnp.broadcast_to(head, (1, 1)), columns)
    mask = None if mask is None else mask[:, None]
    if columns.shape[1] > H:
        mask = columns < H if mask is None else mask & (columns < H)
    return load(ref, index, mask)


def store_rows(ref, rows: jax.Array, head: jax.Array, value: jax.Array) -> None:
    """value [rows, H padded] to rows of ref [T, heads, H] that are there."""
    columns = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
    mask = (rows < ref.shape[0])[:, None] & (columns < ref.shape[2])
    store(ref, (rows[:, None], jnp.broadcast_to(head, (1, 1)), columns), value, mask)


def load_of_head(ref, head: jax.Array, rows: jax.Array, mask: jax.Array) -> jax.Array:
    """[rows] of a float32 ref [heads, T]."""
    return load(ref, (jnp.broadcast_to(head, rows.shape), rows), mask)


def over_keys(queries: Queries, bk: int, S: int, step: Callable[..., Any], carry: Any) -> Any:
    """Folds `step(keys [bk], keys_in, mask [bq, bk], carry)` over the blocks of keys that some of the rows see.

    keys_in, mask: which keys may be read, and which count; None in blocks that all rows see whole.
    """
    least, most = jnp.min(jnp.where(queries.sees, queries.first, S)), jnp.max(queries.end)
    start, stop = least // bk, (most + bk - 1) // bk
    # Rows that see nothing do not count: zeros are stored for them.
    whole = (jnp.max(jnp.where(queries.sees, queries.first, 0)) + bk - 1) // bk
    whole = jnp.clip(whole, start, stop)
    whole_end = jnp.clip(jnp.min(jnp.where(queries.sees, queries.end, S)) // bk, whole, stop)

    def body(j, carry, masked: bool):
        keys = j * bk + jnp.arange(bk, dtype=jnp.int32)
        if not masked:
            return step(keys, None, None, carry)
        return step(keys, (least <= keys) & (keys < most), queries.mask(keys[None, :]), carry)

    for first, end, masked in ((start, whole, True), (whole, whole_end, False), (whole_end, stop, True)):
        carry = lax.fori_loop(first, end, functools.partial(body, masked=masked), carry)
    return carry


def own_queries(ref: dict, bq: int) -> tuple[Queries, jax.Array, jax.Array]:
    """The queries of a program of fwd or dq, their head, and that of their keys."""
    T, N, K = *ref["q"].shape[:2], ref["k"].shape[1]
    blocks = pl.cdiv(T, bq)
    i, head = pl.program_id(0) % blocks, pl.program_id(0) // blocks
    return Queries.of(ref, load_inside(ref), i, bq), head, head // (N // K)


def _scores(spec: Spec, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Base 2 logarithms of the exponentials of a @ b.T, and the slope of the cap."""
    scores, slope = spec.capped(plgpu.dot(a, b, trans_b=True, precision=spec.precision), LOG2_E)
    return scores, slope


def _fwd_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    T, S, bq = ref["q"].shape[0], ref["k"].shape[0], tiles.bq
    queries, head, kv_head = own_queries(ref, bq)
    q = load_rows(ref["q"], queries.rows, head, queries.inside)

    def step(keys, keys_in, mask, carry):
        mixed, top, total = carry
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores, _ = _scores(spec, q, k)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, before = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        mixed = before[:, None] * mixed + plgpu.dot(p.astype(v.dtype), v, precision=spec.precision)
        return mixed, new_top, before * total + jnp.sum(p, axis=1)

    none = jnp.zeros((bq, padded(ref["v"])), jnp.float32)
    before = none, jnp.full((bq,), NONE, jnp.float32), jnp.zeros((bq,), jnp.float32)
    if "sinks" in ref:  # each has an exponential and no value
        sink = LOG2_E * plgpu.load(ref["sinks"].at[jnp.broadcast_to(head, (bq,))])
        before = none, jnp.maximum(sink, NONE), jnp.ones((bq,), jnp.float32)
    mixed, top, total = over_keys(queries, tiles.bk, S, step, before)
    total = jnp.where(queries.sees, total, 1.0)
    store_rows(ref["out"], queries.rows, head, jnp.where(queries.sees[:, None], mixed / total[:, None], 0.0))
    if "lse" in ref:
        lse = jnp.where(queries.sees, exact_lse(top + jnp.log2(total), LOG2_E), 0.0)
        store(ref["lse"], (jnp.broadcast_to(head, (bq,)), queries.rows), lse, queries.rows < T)


def _dq_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    queries, head, kv_head = own_queries(ref, tiles.bq)
    q, dout = (load_rows(ref[name], queries.rows, head, queries.inside) for name in ("q", "dout"))
    lse, along = (load_of_head(ref[name], head, queries.rows, queries.inside) for name in ("lse", "along"))

    def step(keys, keys_in, mask, dq):
        k = load_rows(ref["k"], keys, kv_head, keys_in)
        scores, slope = _scores(spec, q, k)
        p = jnp.exp2(scores - lse[:, None])
        p = p if mask is None else jnp.where(mask, p, 0.0)
        v = load_rows(ref["v"], keys, kv_head, keys_in)
        ds = slope * p * (plgpu.dot(dout, v, trans_b=True, precision=spec.precision) - along[:, None])
        return dq + plgpu.dot(ds.astype(k.dtype), k, precision=spec.precision)

    dq = over_keys(queries, tiles.bk, ref["k"].shape[0], step, jnp.zeros(q.shape, jnp.float32))
    store_rows(ref["dq"], queries.rows, head, jnp.where(queries.sees[:, None], spec.scale * dq, 0.0))


def _dkv_kernel(ref: dict, *, spec: Spec, tiles: Tiles):
    (_, N, _), (S, K, _), bk = ref["q"].shape, ref["k"].shape, tiles.bk
    blocks, shared = pl.cdiv(S, bk), N // K
    j, kv_head = pl.program_id(0) % blocks, pl.program_id(0) // blocks
    keys = j * bk + jnp.arange(bk, dtype=jnp.int32)
    k, v = (load_rows(ref[name], keys, kv_head, keys < S) for name in ("k", "v"))
    first, end = (plgpu.load(ref["blocks"].at[n * blocks + j]) for n in range(2))

    inside = load_inside(ref)

    def step(n, carry):
        dk, dv = carry
        # Not % and //, whose corrections for signs do not lower for a loop's counter.
        head = kv_head * shared + lax.rem(n, jnp.int32(shared))
        queries = Queries.of(ref, inside, first + lax.div(n, jnp.int32(shared)), tiles.bq)
        q, dout = (load_rows(ref[name], queries.rows, head, queries.inside) for name in ("q", "dout"))
        lse, along = (load_of_head(ref[name], head, queries.rows, queries.inside) for name in ("lse", "along"))
        # Transposed, [bk, bq]: so the probabilities are the left operand as they are.
        scores, slope = _scores(spec, k, q)
        mask = queries.mask(keys[:, None])
        # Masked once more below: keys outside may be NaN, and so are their scores and their products with dout.
        p = jnp.where(mask, jnp.exp2(scores - lse[None, :]), 0.0)
        ds = slope * p * (plgpu.dot(v, dout, trans_b=True, precision=spec.precision) - along[None, :])
        ds = jnp.where(mask, ds, 0.0)
        return (
            dk + plgpu.dot(ds.astype(q.dtype), q, precision=spec.precision),
            dv + plgpu.dot(p.astype(dout.dtype), dout, precision=spec.precision),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk, dv = lax.fori_loop(0, jnp.maximum(end - first, 0) * shared, step, zeros)
    store_rows(ref["dk"], keys, kv_head, spec.scale * dk)
    store_rows(ref["dv"], keys, kv_head, dv)


def _launch(kernel: Callable, name: str, spec: Spec, tiles: Tiles, operands: dict, out: dict, **options: Any) -> Any:
    """options: blocks of rows of each head, of so many `heads`; the `products` of k's and of v's columns a pair takes;
    `interpret`."""
    widths = operands["k"].shape[2], operands["v"].shape[2]
    return launch_named(
        functools.partial(kernel, spec=spec, tiles=tiles),
        operands,
        out,
        grid=(options["blocks"] * options["heads"],),
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=options["interpret"],
        name=f"packed_attention_{name}",
        flops=2 * spec.pairs * operands["q"].shape[1] * sum(map(operator.mul, options["products"], widths)),
    )


@traced_once("spec", "tiles", "save", "interpret")
def forward_pallas(spec: Spec, tiles: Tiles, arrays: Arrays, *, save: bool, interpret: bool) -> tuple[jax.Array, ...]:
    """(out [T, N, V],), and with `save` lse float32 [N, T]: of each row, the base 2 logarithm of the sum of
    exponentials. No size is 0."""
    q = arrays.q
    T, N, _ = q.shape
    out = {"out": out_struct((T, N, arrays.v.shape[2]), q.dtype, like=q)}
    out |= {"lse": out_struct((N, T), jnp.dtype("float32"), like=q)} if save else {}
    options: dict[str, Any] = {"blocks": pl.cdiv(T, tiles.bq), "heads": N, "products": (1, 1), "interpret": interpret}
    return tuple(_launch(_fwd_kernel, "fwd", spec, tiles, arrays._asdict(), out, **options).values())


@traced_once("spec", "dq", "dkv", "interpret")
def backward_pallas(
    spec: Spec, dq: Tiles, dkv: Tiles, arrays: Arrays, out: jax.Array, lse: jax.Array, dout: jax.Array, *,
    interpret: bool,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k and v. out and lse are the forward's. No size is 0."""
    q, k, v = arrays[:3]
    (T, N, _), (S, K, _) = q.shape, k.shape
    sees = (arrays.first < arrays.end)[:, None, None]
    along = jnp.sum(jnp.where(sees, out.astype(jnp.float32) * dout.astype(jnp.float32), 0), axis=2).T
    operands, options = arrays._asdict() | {"dout": dout, "lse": lse, "along": along}, {"interpret": interpret}
    results = {"dq": out_struct(q.shape, q.dtype, like=q)}
    blocks = {"blocks": pl.cdiv(T, dq.bq), "heads": N, "products": (2, 1)}
    gradients = _launch(_dq_kernel, "dq", spec, dq, operands, results, **blocks, **options)
    seen = blocks_that_see(arrays.first, arrays.end, S=S, bq=dkv.bq, bk=dkv.bk)
    results = {name: out_struct(x.shape, x.dtype, like=x) for name, x in (("dk", k), ("dv", v))}
    blocks = {"blocks": pl.cdiv(S, dkv.bk), "heads": K, "products": (2, 2)}
    operands |= {"blocks": seen.ravel()}
    gradients |= _launch(_dkv_kernel, "dkv", spec, dkv, operands, results, **blocks, **options)
    return gradients["dq"], gradients["dk"], gradients["dv"]
