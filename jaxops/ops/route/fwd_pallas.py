"""Routing forward in three Pallas kernels lowered through Triton: choose experts, count over tiles if there are
several, assign rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.costs import bytes_of
from jaxops._lib.launch_pallas import launch_named
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.powers import power_of_2
from jaxops._lib.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, each_choice, each_step, load_column
from jaxops.ops.route.keys import GONE, keys_of
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Routing

# Of the count kernel. 8 columns of 4 bytes are an L2 sector, and few columns per program make many programs; 1,024
# tiles are one step for 32,768 tokens.
_COLUMNS, _TILES = 8, 1024
_INT32_MAX = 2**31 - 1


def _largest(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """[rows, 1]: the number [1, width] of the column with each row's largest key [rows, width]; the least on ties."""
    top = jnp.max(keys, axis=1, keepdims=True)
    return jnp.min(jnp.where(keys == top, numbers, _INT32_MAX), axis=1, keepdims=True)


def _best_groups(scores: jax.Array, columns: Columns, top_groups: int) -> jax.Array:
    """[rows, width]: which columns are in the top_groups groups with the largest sums of their two best scores."""

    def of_groups(reduce, values):
        return reduce(reduce(values, axis=1, keepdims=True), axis=3, keepdims=True)

    rows, shape = scores.shape[0], (scores.shape[0], *columns.shape)
    values = columns.by_group(jnp.where(columns.inside & (scores == scores), scores, -jnp.inf))
    sums = best = of_groups(jnp.max, values)
    if columns.size > 1:
        experts = columns.by_group(columns.experts)
        first = of_groups(jnp.min, jnp.where(values == best, experts, _INT32_MAX))
        sums = best + of_groups(jnp.max, jnp.where(experts == first, -jnp.inf, values))
    numbers = jnp.arange(shape[2], dtype=jnp.int32)[None, :]
    keys = keys_of(sums.reshape(rows, shape[2]))  # groups of padding, -inf, come last: on ties the first group wins
    left = lax.fori_loop(0, top_groups, lambda _, left: jnp.where(numbers == _largest(left, numbers), GONE, left), keys)
    return jnp.broadcast_to((left == GONE).reshape(rows, 1, shape[2], 1), shape).reshape(rows, columns.width)


def _choose_kernel(ref: dict, *, spec: Spec, tile: Tiles):
    """A program's tokens: their experts and weights; how many of them chose each expert, and the sum of its shares."""
    (T, E), k, pid = ref["logits"].shape, spec.k, pl.program_id(0)
    columns = Columns(E, spec.expert_groups)
    experts = columns.experts
    choice = jnp.arange(power_of_2(k), dtype=jnp.int32)[None, :]
    bias = columns.load_vector(ref["selection_bias"], 0.0) if "selection_bias" in ref else None

    def body(row, row_in, sums):
        logits = columns.load(ref["logits"], row, row_in)
        found = Scores.of(logits, spec)
        biased = found.scores if bias is None else found.scores + bias
        keys = keys_of(logits if bias is None else biased)
        if not columns.full:
            keys = jnp.where(columns.inside, keys, GONE)
        if spec.expert_groups > 1:
            keys = jnp.where(_best_groups(biased, columns, spec.top_expert_groups), keys, GONE)

        def choose(j, carry):
            left, chosen = carry
            best = _largest(left, experts)
            return jnp.where(experts == best, GONE, left), jnp.where(choice == j, best, chosen)

        left, chosen = lax.fori_loop(0, k, choose, (keys, jnp.zeros((row.shape[0], power_of_2(k)), jnp.int32)))
        mask = row_in & (choice < k)
        chosen_logits = plgpu.load(ref["logits"].at[row, chosen], mask=mask, other=0.0).astype(jnp.float32)
        weights = jnp.where(mask, found.score_of(chosen_logits, spec), 0.0)
        if spec.normalize:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + TINY)
        plgpu.store(ref["experts"].at[row, choice], chosen, mask=mask)
        plgpu.store(ref["weights"].at[row, choice], weights * spec.weight_scale, mask=mask)

        # Not left != keys: XLA, in Pallas' interpreter, may compute the keys twice and round them differently.
        chose = (row_in & (keys != GONE) & (left == GONE)).astype(jnp.int32)
        counts, shares, z = sums
        counts = counts + jnp.sum(chose, axis=0, keepdims=True, dtype=jnp.int32)
        shares = shares + jnp.sum(jnp.where(row_in, found.share, 0.0), axis=0, keepdims=True)
        z = z + jnp.sum(jnp.where(row_in, found.logsumexp * found.logsumexp, 0.0), axis=0, keepdims=True)
        return counts, shares, z

    shape = (1, columns.width)
    zeros = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((1, 1), jnp.float32))
    counts, shares, z = each_step(pid, tile, T, body, zeros)
    own, inside = jnp.broadcast_to(pid, (1, 1)), jnp.full((1, 1), True)
    columns.store(ref["counts"], own, inside, counts)
    columns.store(ref["sums"], own, inside, shares)
    plgpu.store(ref["sums"].at[own, jnp.full((1, 1), E, jnp.int32)], z)


def _count_kernel(ref: dict, *, step: int):
    """A program's experts: how many tokens of the tiles before each tile chose them, and of all tiles; total sums."""
    tiles, E = ref["counts"].shape
    column = (pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32))[None, :]

    def add(i, carry):
        count, total = carry
        tile = (i * step + jnp.arange(step, dtype=jnp.int32))[:, None]
        mask = (tile < tiles) & (column < E)
        counts = plgpu.load(ref["counts"].at[tile, column], mask=mask, other=0)
        before = count + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
        plgpu.store(ref["before"].at[tile, column], before, mask=mask)
        sums = plgpu.load(ref["sums"].at[tile, column], mask=(tile < tiles) & (column <= E), other=0.0)
        count = count + jnp.sum(counts, axis=0, keepdims=True, dtype=jnp.int32)
        return count, total + jnp.sum(sums, axis=0, keepdims=True)

    zeros = (jnp.zeros((1, _COLUMNS), jnp.int32), jnp.zeros((1, _COLUMNS), jnp.float32))
    count, total = lax.fori_loop(0, pl.cdiv(tiles, step), add, zeros)
    plgpu.store(ref["load"].at[column], count, mask=column < E)
    plgpu.store(ref["totals"].at[column], total, mask=column <= E)


def _assign_kernel(ref: dict, *, spec: Spec, tile: Tiles):
    """A program's tokens: the row of each choice, and each row's token. The first program writes offsets, losses."""
    (T, k), E, pid = ref["experts"].shape, ref["load"].shape[0], pl.program_id(0)
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    one = jnp.zeros((1, 1), jnp.int32)

    load = columns.load_vector(ref["load"], 0)
    kept = load if spec.capacity is None else jnp.minimum(load, spec.capacity)
    starts = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - kept
    end = jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32)
    at, mask = columns.at(ref["before"], one + pid, one == 0)

    def body(row, row_in, before):
        def find(j, choice):
            return jnp.where(load_column(ref["experts"], row, row_in, j, -1) == experts, j, choice)

        choice = each_choice(k, find, jnp.full(shape, k, jnp.int32))  # its number in each expert's column, or k
        member, token = choice < k, jnp.broadcast_to(row, shape)
        upto = jnp.cumsum(member.astype(jnp.int32), axis=0, dtype=jnp.int32)
        rank = before + upto - 1
        has_row = member if spec.capacity is None else member & (rank < spec.capacity)
        # Masked elements index one past the end: a GPU ignores them, but Pallas' interpreter stores the old value
        # there.
        position = jnp.where(has_row, starts + rank, T * k)
        plgpu.store(ref["row_positions"].at[token, choice], position, mask=member)
        plgpu.store(ref["row_indices"].at[position], token, mask=has_row)
        if spec.capacity is not None:
            dropped = member & (rank >= spec.capacity)
            at = ref["weights"].at[token, jnp.where(dropped, choice, k)]
            plgpu.store(at, jnp.zeros(shape, jnp.float32), mask=dropped)
        return before + jnp.sum(member.astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32)

    each_step(pid, tile, T, body, plgpu.load(at, mask=mask, other=0))
    if spec.capacity is not None:
        # Zeros in the row_indices behind the last expert's rows. Every program looks at an equal part of all rows.
        first = pid * tile.rows * k
        last = first + jnp.arange(power_of_2(tile.rows * k), dtype=jnp.int32)[None, :]
        outside = (last >= end) & (last < jnp.minimum(first + tile.rows * k, T * k))
        plgpu.store(ref["row_indices"].at[last], jnp.zeros_like(last), mask=outside)

    @pl.when(pid == 0)
    def _():
        plgpu.store(ref["group_offsets"].at[experts], starts, mask=columns.inside)
        plgpu.store(ref["group_offsets"].at[one + E], end)
        shares = columns.load_vector(ref["totals"], 0.0)
        aux_loss = (E / (T * T * k)) * jnp.sum(load.astype(jnp.float32) * shares, axis=1, keepdims=True)
        plgpu.store(ref["aux_loss"].at[one], aux_loss)
        plgpu.store(ref["z_loss"].at[one], plgpu.load(ref["totals"].at[one + E]) * (1 / T))


@traced_once("spec", "tile", "interpret")
def forward_pallas(
    spec: Spec, tile: Tiles, logits: jax.Array, selection_bias: jax.Array | None, *, interpret: bool
) -> Routing:
    """T > 0."""
    (T, E), k = logits.shape, spec.k
    tiles, step = pl.cdiv(T, tile.rows), max(16, min(_TILES, power_of_2(pl.cdiv(T, tile.rows))))

    def array(*shape: int, dtype="int32") -> jax.ShapeDtypeStruct:
        return out_struct(shape, jnp.dtype(dtype), like=logits)

    def run(name: str, kernel, operands: dict, out: dict, *, flops, programs=tiles, warps=tile.warps, **how) -> dict:
        how |= {"grid": (programs,), "warps": warps, "interpret": interpret, "name": f"route_{name}", "flops": flops}
        return launch_named(kernel, operands, out, **how)

    static = {"spec": spec, "tile": tile}
    weights, scalar = array(T, k, dtype="float32"), array(1, dtype="float32")
    out = {"experts": array(T, k), "weights": weights, "counts": array(tiles, E)}
    out["sums"] = array(tiles, E + 1, dtype="float32")
    operands: dict = {"logits": logits, "selection_bias": selection_bias}
    # A logit: about 8 for its scores and the losses' sums; in each choice it is compared twice, by key and by number.
    chosen = run("choose", functools.partial(_choose_kernel, **static), operands, out, flops=T * E * (8 + 2 * k))

    if tiles == 1:  # it has counted all tokens, as those of a decode step
        before = jnp.asarray(np.zeros((1, E), np.int32))  # a constant: jnp.zeros would be a launch of its own
        counted = {"before": before, "load": chosen["counts"].reshape(E), "totals": chosen["sums"].reshape(E + 1)}
    else:
        out = {"before": array(tiles, E), "load": array(E), "totals": array(E + 1, dtype="float32")}
        operands = {"counts": chosen["counts"], "sums": chosen["sums"]}
        programs, kernel = pl.cdiv(E + 1, _COLUMNS), functools.partial(_count_kernel, step=step)
        # A tile's count is added to the running one and to the total, its sums to the total ones.
        warps, flops = max(1, step // 128), 3 * tiles * E
        counted = run("count", kernel, operands, out, programs=programs, warps=warps, flops=flops)

    out = {"row_positions": array(T, k), "row_indices": array(T * k), "group_offsets": array(E + 1)}
    out |= {"aux_loss": scalar, "z_loss": scalar}
    operands, aliases = {"experts": chosen["experts"], **counted}, {}
    if spec.capacity is not None:  # dropped choices' weights become 0, in place
        operands["chosen_weights"], out["weights"], aliases = chosen["weights"], weights, {"chosen_weights": "weights"}
    # A token and expert: compared with each choice, counted, summed, and placed. chosen_weights are not read.
    how: dict[str, Any] = {"flops": T * E * (k + 3), "aliases": aliases}
    how["bytes_accessed"] = bytes_of(chosen["experts"], *counted.values(), *out.values())
    assigned = run("place", functools.partial(_assign_kernel, **static), operands, out, **how)

    losses = {name: assigned[name].reshape(()) for name in ("aux_loss", "z_loss")}
    parts = {"weights": chosen["weights"], "experts": chosen["experts"], "load": counted["load"]}
    return Routing(**parts | assigned | losses)
