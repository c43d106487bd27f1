"""Routing forward: choose, count, place. Three Pallas kernels lowered through Triton, and nothing between them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.powers import power_of_2
from jaxops._lib.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, each, load_column, steps_of
from jaxops.ops.route.keys import GONE, keys_of
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Routing

# The sums over tiles: few columns a program are many programs, and 8 of 4 bytes are a sector of the L2; 1024 tiles of them are one step for 32,768 tokens.
_COLUMNS, _TILES = 8, 1024
_MOST = 2**31 - 1


def _largest(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """[rows, 1]: the number [1, width] of the column where each row's largest key [rows, width] stands, the least one of equal ones."""
    top = jnp.max(keys, axis=1, keepdims=True)
    return jnp.min(jnp.where(keys == top, numbers, _MOST), axis=1, keepdims=True)


def _best_groups(scores: jax.Array, columns: Columns, top_expert_groups: int) -> jax.Array:
    """[rows, width]: which columns are in the top_expert_groups groups with the largest sum of their two best scores [rows, width]."""

    def of_groups(reduce, values):
        return reduce(reduce(values, axis=1, keepdims=True), axis=3, keepdims=True)

    rows, shape = scores.shape[0], (scores.shape[0], *columns.shape)
    values = columns.by_group(jnp.where(columns.inside & (scores == scores), scores, -jnp.inf))
    sums = best = of_groups(jnp.max, values)
    if columns.size > 1:
        experts = columns.by_group(columns.experts)
        first = of_groups(jnp.min, jnp.where(values == best, experts, _MOST))
        sums = best + of_groups(jnp.max, jnp.where(experts == first, -jnp.inf, values))
    numbers = jnp.arange(shape[2], dtype=jnp.int32)[None, :]
    keys = keys_of(
        sums.reshape(rows, shape[2])
    )  # what only fills up comes last: nothing is less than its -inf, and of equal ones the first wins
    left = lax.fori_loop(
        0, top_expert_groups, lambda _, left: jnp.where(numbers == _largest(left, numbers), GONE, left), keys
    )
    return jnp.broadcast_to((left == GONE).reshape(rows, 1, shape[2], 1), shape).reshape(rows, columns.width)


def _choose_kernel(*refs, names: tuple[str, ...], spec: Spec, tile: Tiles):
    """A program's tokens: their experts and weights, and of each expert how many tokens chose it and the sum of its shares."""
    ref = dict(zip(names, refs, strict=True))
    (T, E), k, pid = ref["logits"].shape, spec.k, pl.program_id(0)
    columns = Columns(E, spec.expert_groups)
    experts = columns.experts
    places = jnp.arange(power_of_2(k), dtype=jnp.int32)[None, :]
    selection_bias = columns.load_vector(ref["selection_bias"], 0.0) if "selection_bias" in ref else None

    def body(row, row_in, sums):
        logits = columns.load(ref["logits"], row, row_in)
        found = Scores.of(logits, spec)
        biased = found.scores if selection_bias is None else found.scores + selection_bias
        keys = keys_of(logits if selection_bias is None else biased)
        if not columns.full:
            keys = jnp.where(columns.inside, keys, GONE)
        if spec.expert_groups > 1:
            keys = jnp.where(_best_groups(biased, columns, spec.top_expert_groups), keys, GONE)

        def choose(j, carry):
            left, chosen = carry
            best = _largest(left, experts)
            return jnp.where(experts == best, GONE, left), jnp.where(places == j, best, chosen)

        left, chosen = lax.fori_loop(0, k, choose, (keys, jnp.zeros((row.shape[0], power_of_2(k)), jnp.int32)))
        mask = row_in & (places < k)
        chosen_logits = plgpu.load(ref["logits"].at[row, chosen], mask=mask, other=0.0).astype(jnp.float32)
        weights = jnp.where(mask, found.score_of(chosen_logits, spec), 0.0)
        if spec.normalize:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + TINY)
        plgpu.store(ref["experts"].at[row, places], chosen, mask=mask)
        plgpu.store(ref["weights"].at[row, places], weights * spec.weight_scale, mask=mask)

        # Not left != keys: where a compiler finds the keys twice, as XLA does for Pallas' interpreter, two roundings would differ.
        counts, shares, z = sums
        counts = counts + jnp.sum(
            (row_in & (keys != GONE) & (left == GONE)).astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32
        )
        shares = shares + jnp.sum(jnp.where(row_in, found.share, 0.0), axis=0, keepdims=True)
        return (
            counts,
            shares,
            z + jnp.sum(jnp.where(row_in, found.logsumexp * found.logsumexp, 0.0), axis=0, keepdims=True),
        )

    shape = (1, columns.width)
    zeros = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((1, 1), jnp.float32))
    counts, shares, z = steps_of(pid, tile, T, body, zeros)
    own, there = jnp.broadcast_to(pid, (1, 1)), jnp.full((1, 1), True)
    columns.store(ref["counts"], own, there, counts)
    columns.store(ref["sums"], own, there, shares)
    plgpu.store(ref["sums"].at[own, jnp.full((1, 1), E, jnp.int32)], z)


def _count_kernel(counts_ref, sums_ref, before_ref, load_ref, totals_ref, *, step: int):
    """A program's columns, over all tiles in order: how many tokens chose an expert in the tiles before each, and in all; the sums of what is summed."""
    tiles, E = counts_ref.shape
    column = (pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32))[None, :]

    def add(i, carry):
        count, total = carry
        tile = (i * step + jnp.arange(step, dtype=jnp.int32))[:, None]
        mask = (tile < tiles) & (column < E)
        counts = plgpu.load(counts_ref.at[tile, column], mask=mask, other=0)
        plgpu.store(
            before_ref.at[tile, column], count + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts, mask=mask
        )
        sums = plgpu.load(sums_ref.at[tile, column], mask=(tile < tiles) & (column <= E), other=0.0)
        return count + jnp.sum(counts, axis=0, keepdims=True, dtype=jnp.int32), total + jnp.sum(
            sums, axis=0, keepdims=True
        )

    zeros = (jnp.zeros((1, _COLUMNS), jnp.int32), jnp.zeros((1, _COLUMNS), jnp.float32))
    count, total = lax.fori_loop(0, pl.cdiv(tiles, step), add, zeros)
    plgpu.store(load_ref.at[column], count, mask=column < E)
    plgpu.store(totals_ref.at[column], total, mask=column <= E)


def _place_kernel(*refs, names: tuple[str, ...], spec: Spec, tile: Tiles):
    """A program's tokens: the row of each choice, and each row's token."""
    ref = dict(zip(names, refs, strict=True))
    (T, k), E, pid = ref["experts"].shape, ref["load"].shape[0], pl.program_id(0)
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    one = jnp.zeros((1, 1), jnp.int32)

    load = columns.load_vector(ref["load"], 0)
    kept = load if spec.capacity is None else jnp.minimum(load, spec.capacity)
    starts = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - kept
    end = jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32)
    at, there = columns.at(ref["before"], one + pid, one == 0)

    def body(row, row_in, before):
        def put(j, slot):
            return jnp.where(load_column(ref["experts"], row, row_in, j, -1) == experts, j, slot)

        slot = each(k, put, jnp.full(shape, k, jnp.int32))  # which of its token's choices an expert is
        member, token = slot < k, jnp.broadcast_to(row, shape)
        upto = jnp.cumsum(member.astype(jnp.int32), axis=0, dtype=jnp.int32)
        rank = before + upto - 1
        has_row = member if spec.capacity is None else member & (rank < spec.capacity)
        # What no mask lets through goes one past the end: a GPU never sees it, but Pallas' interpreter stores what was there before.
        position = jnp.where(has_row, starts + rank, T * k)
        plgpu.store(ref["row_positions"].at[token, slot], position, mask=member)
        plgpu.store(ref["row_indices"].at[position], token, mask=has_row)
        if spec.capacity is not None:
            dropped = member & (rank >= spec.capacity)
            plgpu.store(
                ref["weights"].at[token, jnp.where(dropped, slot, k)], jnp.zeros(shape, jnp.float32), mask=dropped
            )
        return before + jnp.sum(member.astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32)

    steps_of(pid, tile, T, body, plgpu.load(at, mask=there, other=0))
    if spec.capacity is not None:
        # The rows that belong to no expert: each program's share of all rows, as far as they lie behind the last expert's.
        first = pid * tile.rows * k
        last = first + jnp.arange(power_of_2(tile.rows * k), dtype=jnp.int32)[None, :]
        plgpu.store(
            ref["row_indices"].at[last],
            jnp.zeros_like(last),
            mask=(last >= end) & (last < jnp.minimum(first + tile.rows * k, T * k)),
        )

    @pl.when(pid == 0)
    def _():
        plgpu.store(ref["group_offsets"].at[experts], starts, mask=columns.inside)
        plgpu.store(ref["group_offsets"].at[one + E], end)
        shares = columns.load_vector(ref["totals"], 0.0)
        plgpu.store(
            ref["aux_loss"].at[one],
            (E / (T * T * k)) * jnp.sum(load.astype(jnp.float32) * shares, axis=1, keepdims=True),
        )
        plgpu.store(ref["z_loss"].at[one], plgpu.load(ref["totals"].at[one + E]) * (1 / T))


@traced_once("spec", "tile", "interpret")
def forward_pallas(
    spec: Spec, tile: Tiles, logits: jax.Array, selection_bias: jax.Array | None, *, interpret: bool
) -> Routing:
    """T is not 0."""
    (T, E), k = logits.shape, spec.k
    tiles = pl.cdiv(T, tile.rows)
    i32, f32 = jnp.dtype("int32"), jnp.dtype("float32")

    def run(kernel, name: str, programs: int, warps: int, operands: list, outs: list, aliases: dict[int, int]):
        return launch(
            kernel,
            *operands,
            out=[out_struct(shape, dtype, like=logits) for shape, dtype in outs],
            grid=(programs,),
            warps=warps,
            interpret=interpret,
            name=name,
            aliases=aliases,
        )

    given = {"logits": logits} | ({} if selection_bias is None else {"selection_bias": selection_bias})
    outs = {
        "experts": ((T, k), i32),
        "weights": ((T, k), f32),
        "counts": ((tiles, E), i32),
        "sums": ((tiles, E + 1), f32),
    }
    choose = functools.partial(_choose_kernel, names=(*given, *outs), spec=spec, tile=tile)
    experts, weights, counts, sums = run(
        choose, "route_choose", tiles, tile.warps, [*given.values()], [*outs.values()], {}
    )

    step = max(16, min(_TILES, power_of_2(tiles)))
    count = functools.partial(_count_kernel, step=step)
    outs = [((tiles, E), i32), ((E,), i32), ((E + 1,), f32)]
    before, load, totals = run(
        count, "route_count", pl.cdiv(E + 1, _COLUMNS), max(1, step // 128), [counts, sums], outs, {}
    )

    given = {"experts": experts, "before": before, "load": load, "totals": totals}
    outs = {
        "row_positions": ((T, k), i32),
        "row_indices": ((T * k,), i32),
        "group_offsets": ((E + 1,), i32),
        "aux_loss": ((1,), f32),
        "z_loss": ((1,), f32),
    }
    names, aliases = (*given, *outs), {}
    if spec.capacity is not None:  # a dropped choice's weight becomes zero in place
        given["chosen_weights"], outs["weights"], names = (
            weights,
            ((T, k), f32),
            (*given, "chosen_weights", *outs, "weights"),
        )
        aliases = {len(given) - 1: len(outs) - 1}
    place = functools.partial(_place_kernel, names=names, spec=spec, tile=tile)
    found = dict(
        zip(
            outs,
            run(place, "route_place", tiles, tile.warps, [*given.values()], [*outs.values()], aliases),
            strict=True,
        )
    )
    losses = {name: found[name].reshape(()) for name in ("aux_loss", "z_loss")}
    return Routing(**{"weights": weights, "experts": experts, "load": load} | found | losses)
