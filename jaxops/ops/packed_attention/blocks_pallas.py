"""What the passes share (Pallas on Triton): blocks of queries and of keys, their masks and scores, and the launch."""

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

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import load, store
from jaxops.ops.packed_attention.plan import Spec, Tiles

LOG2_E = 1.4426950408889634  # the GPU has 2 ** x, not e ** x


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


def scores_of(spec: Spec, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Base 2 logarithms of the exponentials of a @ b.T, and the slope of the cap."""
    scores, slope = spec.capped(plgpu.dot(a, b, trans_b=True, precision=spec.precision), LOG2_E)
    return scores, slope


def launch(kernel: Callable, name: str, spec: Spec, tiles: Tiles, operands: dict, out: dict, **options: Any) -> Any:
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
