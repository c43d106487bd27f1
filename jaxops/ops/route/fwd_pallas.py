"""Routing forward: choose, count, place. Three Pallas kernels lowered through Triton, and nothing between them."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.manual_axes import out_struct
from jaxops.ops.route.columns_pallas import Columns, Scores, each, load_column, rows_of
from jaxops.ops.route.keys import GONE, keys_of
from jaxops.ops.route.plan import TINY, Spec, Tile, power_of_2
from jaxops.ops.route.routing import Routing

# The sums over tiles: few columns a program are many programs, and 8 of 4 bytes are a sector of the L2; 1024 tiles of them are one step for 32,768 tokens.
_COLUMNS, _TILES = 8, 1024


def _largest(keys: jax.Array) -> jax.Array:
    """Where each row's largest key stands, the first of equal ones: [rows, 1]."""
    return lax.argmax(keys, 1, jnp.int32)[:, None]


def _take(keys: jax.Array, column: jax.Array) -> jax.Array:
    """keys without each row's `column`."""
    return jnp.where(jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :] == column, GONE, keys)


def _best_groups(values: jax.Array, columns: Columns, top_groups: int) -> jax.Array:
    """[rows, width]: which columns are in the top_groups groups with the largest sum of their two best values [rows, width]."""
    rows, (groups, size) = values.shape[0], columns.shape
    values = jnp.where(columns.inside & (values == values), values, -jnp.inf).reshape(rows, groups, size)
    sums = jnp.max(values, axis=2)
    if columns.size > 1:
        first = lax.argmax(keys_of(values), 2, jnp.int32)[:, :, None]
        sums = sums + jnp.max(jnp.where(jnp.arange(size, dtype=jnp.int32)[None, None, :] == first, -jnp.inf, values), axis=2)
    keys = jnp.where(jnp.arange(groups, dtype=jnp.int32)[None, :] < columns.groups, keys_of(sums), GONE)
    left = lax.fori_loop(0, top_groups, lambda _, left: _take(left, _largest(left)), keys)
    return jnp.broadcast_to((left != keys)[:, :, None], (rows, groups, size)).reshape(rows, groups * size)


def _choose_kernel(*refs, names: tuple[str, ...], spec: Spec, rows: int):
    """A program's tokens: their experts and weights, and of each expert how many tokens chose it and the sum of its shares."""
    ref = dict(zip(names, refs, strict=True))
    (T, E), k, pid = ref["logits"].shape, spec.k, pl.program_id(0)
    columns = Columns(E, spec.num_groups)
    experts, inside = columns.experts, columns.inside
    row, row_in = rows_of(pid, rows, T)
    logits = columns.load(ref["logits"], row, row_in)
    found = Scores.of(logits, spec)

    biased, keys = found.scores, keys_of(logits)
    if "bias" in ref:
        biased = biased + plgpu.load(ref["bias"].at[experts], mask=inside, other=0.0)
        keys = keys_of(biased)
    allowed = jnp.broadcast_to(inside, keys.shape)
    if spec.num_groups > 1:
        allowed = allowed & _best_groups(biased, columns, spec.top_groups)
    keys = jnp.where(allowed, keys, GONE)
    places = jnp.arange(power_of_2(k), dtype=jnp.int32)[None, :]

    def choose(j, carry):
        left, chosen = carry
        column = _largest(left)
        return _take(left, column), jnp.where(places == j, columns.expert(column), chosen)

    left, chosen = lax.fori_loop(0, k, choose, (keys, jnp.zeros((rows, power_of_2(k)), jnp.int32)))

    mask = row_in & (places < k)
    weights = jnp.where(mask, found.score_of(plgpu.load(ref["logits"].at[row, chosen], mask=mask, other=0.0).astype(jnp.float32), spec), 0.0)
    if spec.normalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + TINY)
    plgpu.store(ref["experts"].at[row, places], chosen, mask=mask)
    plgpu.store(ref["weights"].at[row, places], weights * spec.scale, mask=mask)

    tile = jnp.broadcast_to(pid, (1, 1))
    count = jnp.sum(((left != keys) & row_in).astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32)
    share = jnp.sum(jnp.where(row_in, found.share, 0.0), axis=0, keepdims=True)
    z = jnp.sum(jnp.where(row_in, found.logsumexp * found.logsumexp, 0.0), axis=0, keepdims=True)
    plgpu.store(ref["counts"].at[jnp.broadcast_to(tile, inside.shape), experts], count, mask=inside)
    plgpu.store(ref["sums"].at[jnp.broadcast_to(tile, inside.shape), experts], share, mask=inside)
    plgpu.store(ref["sums"].at[tile, jnp.full((1, 1), E, jnp.int32)], z)


def _count_kernel(counts_ref, sums_ref, before_ref, load_ref, totals_ref, *, step: int):
    """A program's columns, over all tiles in order: how many tokens chose an expert in the tiles before each, and in all; the sums of what is summed."""
    tiles, E = counts_ref.shape
    column = (pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32))[None, :]

    def add(i, carry):
        count, total = carry
        tile = (i * step + jnp.arange(step, dtype=jnp.int32))[:, None]
        mask = (tile < tiles) & (column < E)
        counts = plgpu.load(counts_ref.at[tile, column], mask=mask, other=0)
        plgpu.store(before_ref.at[tile, column], count + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts, mask=mask)
        sums = plgpu.load(sums_ref.at[tile, column], mask=(tile < tiles) & (column <= E), other=0.0)
        return count + jnp.sum(counts, axis=0, keepdims=True, dtype=jnp.int32), total + jnp.sum(sums, axis=0, keepdims=True)

    zeros = (jnp.zeros((1, _COLUMNS), jnp.int32), jnp.zeros((1, _COLUMNS), jnp.float32))
    count, total = lax.fori_loop(0, pl.cdiv(tiles, step), add, zeros)
    plgpu.store(load_ref.at[column], count, mask=column < E)
    plgpu.store(totals_ref.at[column], total, mask=column <= E)


def _place_kernel(*refs, names: tuple[str, ...], spec: Spec, rows: int):
    """A program's tokens: the row of each choice, and each row's token."""
    ref = dict(zip(names, refs, strict=True))
    (T, k), E, pid = ref["experts"].shape, ref["load"].shape[0], pl.program_id(0)
    columns = Columns(E)
    expert, inside = columns.experts, columns.inside
    row, row_in = rows_of(pid, rows, T)
    shape = (rows, columns.width)

    load = plgpu.load(ref["load"].at[expert], mask=inside, other=0)
    kept = load if spec.capacity is None else jnp.minimum(load, spec.capacity)
    starts = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - kept
    end = jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32)

    def put(j, slot):
        return jnp.where(load_column(ref["experts"], row, row_in, j, -1) == expert, j, slot)

    slot = each(k, put, jnp.full(shape, -1, jnp.int32))  # which of its token's choices an expert is
    member = slot >= 0
    # What no mask lets through goes one past the end: a GPU never sees it, but Pallas' interpreter stores what was there before.
    slot, token = jnp.where(member, slot, k), jnp.broadcast_to(row, shape)
    before = plgpu.load(ref["before"].at[jnp.broadcast_to(pid, expert.shape), expert], mask=inside, other=0)
    rank = before + jnp.cumsum(member.astype(jnp.int32), axis=0, dtype=jnp.int32) - 1
    has_row = member if spec.capacity is None else member & (rank < spec.capacity)
    position = jnp.where(has_row, starts + rank, T * k)
    if spec.capacity is not None:
        dropped = member & (rank >= spec.capacity)
        plgpu.store(ref["weights"].at[token, jnp.where(dropped, slot, k)], jnp.zeros(shape, jnp.float32), mask=dropped)
        # The rows that belong to no expert: each program's share of all rows, as far as they lie behind the last one's.
        last = pid * rows * k + jnp.arange(power_of_2(rows * k), dtype=jnp.int32)[None, :]
        plgpu.store(ref["row_indices"].at[last], jnp.zeros_like(last), mask=(last >= end) & (last < jnp.minimum((pid + 1) * rows, T) * k))
    plgpu.store(ref["row_positions"].at[token, slot], position, mask=member)
    plgpu.store(ref["row_indices"].at[position], token, mask=has_row)

    @pl.when(pid == 0)
    def _():
        plgpu.store(ref["group_offsets"].at[expert], starts, mask=inside)
        plgpu.store(ref["group_offsets"].at[jnp.full((1, 1), E, jnp.int32)], end)
        shares = plgpu.load(ref["totals"].at[expert], mask=inside, other=0.0)
        z = plgpu.load(ref["totals"].at[jnp.full((1, 1), E, jnp.int32)])
        first = jnp.zeros((1, 1), jnp.int32)
        plgpu.store(ref["aux_loss"].at[first], (E / (T * T * k)) * jnp.sum(load.astype(jnp.float32) * shares, axis=1, keepdims=True))
        plgpu.store(ref["z_loss"].at[first], z * (1 / T))


def forward_pallas(spec: Spec, tile: Tile, logits: jax.Array, bias: jax.Array | None, *, interpret: bool) -> Routing:
    """T is not 0."""
    (T, E), k, rows = logits.shape, spec.k, tile.rows
    tiles = pl.cdiv(T, rows)
    i32, f32 = jnp.dtype("int32"), jnp.dtype("float32")

    def launch(kernel, name: str, programs: int, warps: int, operands: list, outs: list, aliases: dict[int, int]):
        return pl.pallas_call(
            kernel,
            out_shape=[out_struct(shape, dtype, like=logits) for shape, dtype in outs],
            grid=(programs,),
            input_output_aliases=aliases,
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*operands)

    given = {"logits": logits} | ({} if bias is None else {"bias": bias})
    outs = {"experts": ((T, k), i32), "weights": ((T, k), f32), "counts": ((tiles, E), i32), "sums": ((tiles, E + 1), f32)}
    choose = functools.partial(_choose_kernel, names=(*given, *outs), spec=spec, rows=rows)
    experts, weights, counts, sums = launch(choose, "route_choose", tiles, tile.warps, [*given.values()], [*outs.values()], {})

    step = max(16, min(_TILES, power_of_2(tiles)))
    count = functools.partial(_count_kernel, step=step)
    outs = [((tiles, E), i32), ((E,), i32), ((E + 1,), f32)]
    before, load, totals = launch(count, "route_count", pl.cdiv(E + 1, _COLUMNS), max(1, step // 128), [counts, sums], outs, {})

    given = {"experts": experts, "before": before, "load": load, "totals": totals}
    outs = {"row_positions": ((T, k), i32), "row_indices": ((T * k,), i32), "group_offsets": ((E + 1,), i32), "aux_loss": ((1,), f32), "z_loss": ((1,), f32)}
    names, aliases = (*given, *outs), {}
    if spec.capacity is not None:  # a dropped choice's weight becomes zero in place
        given["chosen_weights"], outs["weights"], names = weights, ((T, k), f32), (*given, "chosen_weights", *outs, "weights")
        aliases = {len(given) - 1: len(outs) - 1}
    place = functools.partial(_place_kernel, names=names, spec=spec, rows=rows)
    found = dict(zip(outs, launch(place, "route_place", tiles, tile.warps, [*given.values()], [*outs.values()], aliases), strict=True))
    losses = {name: found[name].reshape(()) for name in ("aux_loss", "z_loss")}
    return Routing(**{"weights": weights, "experts": experts, "load": load} | found | losses)
