"""Routing forward as Pallas kernels lowered through Triton. With several tiles of tokens they are three: choose
experts, count over tiles, assign rows. One tile, as of a decode step, is one launch: its program counts all tokens.
Of choices that are given, the first kernel only counts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.route.columns_pallas import Columns, Scores, counted, each_choice, each_step, load_column
from jaxops.ops.route.plan import TINY, Spec, Tiles
from jaxops.ops.route.routing import Routing, partial_routing
from jaxops.ops.route.scores import GONE, keys_of, loss_factors

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


def _choose(ref: dict, spec: Spec, tile: Tiles, columns: Columns) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stores experts and weights of a program's tokens.

    Returns:
      [1, width] how many of them chose each expert, [1, width] the sum of its shares, [1, 1] the sum of the squared
      logsumexp.
    """
    T, k = ref["logits"].shape[0], spec.k
    experts = columns.experts
    choice = jnp.arange(power_of_2(k), dtype=jnp.int32)[None, :]
    bias = columns.load_vector(ref["selection_bias"], 0.0) if "selection_bias" in ref else None

    def body(row, exists, sums):
        row_in = counted(ref, row, exists)
        logits = columns.load(ref["logits"], row, row_in)
        row_scores = Scores.of(logits, spec)
        biased = row_scores.values if bias is None else row_scores.scores + bias
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
        mask, stored = row_in & (choice < k), exists & (choice < k)
        chosen_logits = plgpu.load(ref["logits"].at[row, chosen], mask=mask, other=0.0).astype(jnp.float32)
        weights = jnp.where(mask, row_scores.score_of(chosen_logits, spec), 0.0)
        if spec.normalize:
            values, small = row_scores.summable(weights, jnp.where(mask, chosen_logits, -jnp.inf), spec)
            weights = values if small is None else jnp.where(mask, values, 0.0)
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + TINY)
        chosen = jnp.where(row_in, chosen, choice) if "mask" in ref else chosen
        plgpu.store(ref["experts"].at[row, choice], chosen, mask=stored)
        plgpu.store(ref["weights"].at[row, choice], weights * spec.weight_scale, mask=stored)

        # Not left != keys: XLA, in Pallas' interpreter, may compute the keys twice and round them differently.
        chose = (row_in & (keys != GONE) & (left == GONE)).astype(jnp.int32)
        counts, shares, z = sums
        counts = counts + jnp.sum(chose, axis=0, keepdims=True, dtype=jnp.int32)
        shares = shares + jnp.sum(jnp.where(row_in, row_scores.share, 0.0), axis=0, keepdims=True)
        z = z + jnp.sum(jnp.where(row_in, row_scores.logsumexp * row_scores.logsumexp, 0.0), axis=0, keepdims=True)
        return counts, shares, z

    shape = (1, columns.width)
    zeros = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((1, 1), jnp.float32))
    return each_step(pl.program_id(0), tile, T, body, zeros)


def _choose_kernel(ref: dict, *, spec: Spec, tile: Tiles):
    """A program's tokens: their experts and weights, and its own counts and sums."""
    E, pid = ref["logits"].shape[1], pl.program_id(0)
    columns = Columns(E, spec.expert_groups)
    counts, shares, z = _choose(ref, spec, tile, columns)
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
        count = count + jnp.sum(counts, axis=0, keepdims=True, dtype=jnp.int32)
        if "sums" in ref:
            sums = plgpu.load(ref["sums"].at[tile, column], mask=(tile < tiles) & (column <= E), other=0.0)
            total = total + jnp.sum(sums, axis=0, keepdims=True)
        return count, total

    zeros = (jnp.zeros((1, _COLUMNS), jnp.int32), jnp.zeros((1, _COLUMNS), jnp.float32))
    count, total = lax.fori_loop(0, pl.cdiv(tiles, step), add, zeros)
    plgpu.store(ref["load"].at[column], count, mask=column < E)
    if "sums" in ref:
        plgpu.store(ref["totals"].at[column], total, mask=column <= E)


def _assign(ref: dict, capacity: int | None, tile: Tiles, before: jax.Array, load: jax.Array) -> None:
    """Stores the row of each choice of a program's tokens, and each row's token. The first program stores offsets.

    Args:
      before: [1, width], the tokens of the programs before this one that chose each expert.
      load: [1, width], all tokens that did.
    """
    (T, k), E, pid = ref["experts"].shape, ref["load"].shape[0], pl.program_id(0)
    columns = Columns(E)
    experts, shape = columns.experts, (tile.step, columns.width)
    kept = load if capacity is None else jnp.minimum(load, capacity)
    starts = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - kept
    end = jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32)

    def body(row, exists, before):
        row_in = counted(ref, row, exists)

        def find(j, choice):
            return jnp.where(load_column(ref["experts"], row, row_in, j, -1) == experts, j, choice)

        choice = each_choice(k, find, jnp.full(shape, k, jnp.int32))  # its number in each expert's column, or k
        member, token = choice < k, jnp.broadcast_to(row, shape)
        upto = jnp.cumsum(member.astype(jnp.int32), axis=0, dtype=jnp.int32)
        rank = before + upto - 1
        has_row = member if capacity is None else member & (rank < capacity)
        # Masked elements index one past the end: a GPU ignores them, but Pallas' interpreter stores the old value
        # there.
        position = jnp.where(has_row, starts + rank, T * k)
        plgpu.store(ref["row_positions"].at[token, choice], position, mask=member)
        plgpu.store(ref["row_indices"].at[position], token, mask=has_row)
        if capacity is not None:
            dropped = member & (rank >= capacity)
            at = ref["weights"].at[token, jnp.where(dropped, choice, k)]
            plgpu.store(at, jnp.zeros(shape, jnp.float32), mask=dropped)
        if "mask" in ref:  # no choice of a token that does not count has a row
            j = jnp.arange(power_of_2(k), dtype=jnp.int32)[None, :]
            none = jnp.full((tile.step, power_of_2(k)), T * k, jnp.int32)
            plgpu.store(ref["row_positions"].at[row, j], none, mask=exists & ~row_in & (j < k))
        return before + jnp.sum(member.astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32)

    each_step(pid, tile, T, body, before)
    if capacity is not None or "mask" in ref:
        # Zeros in the row_indices behind the last expert's rows. Every program looks at an equal part of all rows.
        first = pid * tile.rows * k
        last = first + jnp.arange(power_of_2(tile.rows * k), dtype=jnp.int32)[None, :]
        outside = (last >= end) & (last < jnp.minimum(first + tile.rows * k, T * k))
        plgpu.store(ref["row_indices"].at[last], jnp.zeros_like(last), mask=outside)

    @pl.when(pid == 0)
    def _():
        plgpu.store(ref["group_offsets"].at[experts], starts, mask=columns.inside)
        plgpu.store(ref["group_offsets"].at[jnp.full((1, 1), E, jnp.int32)], end)


def _store_losses(ref: dict, load: jax.Array, shares: jax.Array, z: jax.Array) -> None:
    """Stores both losses, from sums over all tokens as `_choose` returns them."""
    (T, k), E = ref["experts"].shape, ref["load"].shape[0]
    one = jnp.zeros((1, 1), jnp.int32)
    tokens = jnp.sum(load, axis=1, keepdims=True, dtype=jnp.int32) // k if "mask" in ref else None
    factor, of_z = loss_factors(T, E, k, tokens)
    aux_loss = factor * jnp.sum(load.astype(jnp.float32) * shares, axis=1, keepdims=True)
    plgpu.store(ref["aux_loss"].at[one], aux_loss)
    plgpu.store(ref["z_loss"].at[one], z * of_z)


def _assign_kernel(ref: dict, *, capacity: int | None, tile: Tiles):
    """A program's tokens: the row of each choice, and each row's token. The first program writes offsets, and losses
    if there are sums."""
    E, pid = ref["load"].shape[0], pl.program_id(0)
    columns, one = Columns(E), jnp.zeros((1, 1), jnp.int32)
    load = columns.load_vector(ref["load"], 0)
    at, mask = columns.at(ref["before"], one + pid, one == 0)
    _assign(ref, capacity, tile, plgpu.load(at, mask=mask, other=0), load)
    if "totals" not in ref:
        return

    @pl.when(pid == 0)
    def _():
        shares = columns.load_vector(ref["totals"], 0.0)
        _store_losses(ref, load, shares, plgpu.load(ref["totals"].at[one + E]))


def _one_tile_kernel(ref: dict, *, spec: Spec, tile: Tiles, interpret: bool):
    """All tokens in one program: `_choose`, then `_assign`, which reads what other threads of the program stored."""
    columns = Columns(ref["load"].shape[0], spec.expert_groups)
    load, shares, z = _choose(ref, spec, tile, columns)
    plgpu.store(ref["load"].at[columns.experts], load, mask=columns.inside)
    _store_losses(ref, load, shares, z)
    if not interpret:  # Pallas' interpreter has no rule for a barrier, nor threads
        plgpu.debug_barrier()
    ungrouped = Columns(columns.E)  # of other columns than `load`, if experts are in groups
    _assign(ref, spec.capacity, tile, jnp.zeros((1, ungrouped.width), jnp.int32), ungrouped.load_vector(ref["load"], 0))


def _count_choices(ref: dict, tile: Tiles, columns: Columns) -> jax.Array:
    """[1, width]: how many of a program's given choices [R, 1] are each expert."""

    def body(row, exists, counts):
        chosen = load_column(ref["experts"], row, exists, jnp.int32(0), -1) == columns.experts
        return counts + jnp.sum(chosen.astype(jnp.int32), axis=0, keepdims=True, dtype=jnp.int32)

    zeros = jnp.zeros((1, columns.width), jnp.int32)
    return each_step(pl.program_id(0), tile, ref["experts"].shape[0], body, zeros)


def _count_choices_kernel(ref: dict, *, tile: Tiles):
    columns, own = Columns(ref["counts"].shape[1]), jnp.broadcast_to(pl.program_id(0), (1, 1))
    columns.store(ref["counts"], own, jnp.full((1, 1), True), _count_choices(ref, tile, columns))


def _one_tile_of_choices_kernel(ref: dict, *, tile: Tiles):
    columns = Columns(ref["load"].shape[0])
    load = _count_choices(ref, tile, columns)
    plgpu.store(ref["load"].at[columns.experts], load, mask=columns.inside)
    _assign(ref, None, tile, jnp.zeros((1, columns.width), jnp.int32), load)


@dataclasses.dataclass(frozen=True)
class _Launches:
    """Launches over T tokens of E experts, whose results vary over the mesh axes that `like` varies over."""

    T: int
    E: int
    tile: Tiles
    like: jax.Array
    interpret: bool

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.T, self.tile.rows)

    def array(self, *shape: int, dtype="int32") -> jax.ShapeDtypeStruct:
        return out_struct(shape, jnp.dtype(dtype), like=self.like)

    def rows(self, k: int) -> dict[str, jax.ShapeDtypeStruct]:
        T, E = self.T, self.E
        return {"row_positions": self.array(T, k), "row_indices": self.array(T * k), "group_offsets": self.array(E + 1)}

    def run(self, name: str, kernel, operands: dict, out: dict, *, programs=0, warps=0, **options) -> dict:
        options |= {"grid": (programs or self.tiles,), "warps": warps or self.tile.warps, "name": f"route_{name}"}
        return launch_named(kernel, operands, out, interpret=self.interpret, **options)

    def count(self, chosen: dict) -> dict:
        """Adds up the counts, and the sums if there are some, over the tiles."""
        tiles, E, array = self.tiles, self.E, self.array
        step = max(16, min(_TILES, power_of_2(tiles)))
        operands = {name: chosen[name] for name in ("counts", "sums") if name in chosen}
        out = {"before": array(tiles, E), "load": array(E)}
        out |= {"totals": array(E + 1, dtype="float32")} if "sums" in chosen else {}
        programs, kernel = pl.cdiv(E + 1, _COLUMNS), functools.partial(_count_kernel, step=step)
        # A tile's count is added to the running one and to the total, its sums to the total ones.
        warps, flops = max(1, step // 128), 3 * tiles * E
        return self.run("count", kernel, operands, out, programs=programs, warps=warps, flops=flops)


@traced_once("E", "tile", "interpret")
def sort_choices_pallas(experts: jax.Array, *, E: int, tile: Tiles, interpret: bool) -> Routing:
    """`sort_choices` of [R, 1] single choices, R > 0. One that is -1 has no row."""
    each = _Launches(experts.shape[0], E, tile, experts, interpret)
    operands, rows, flops = {"experts": experts, "mask": experts[:, 0] >= 0}, each.rows(1), each.T * E
    if each.tiles == 1:
        kernel, load = functools.partial(_one_tile_of_choices_kernel, tile=tile), {"load": each.array(E)}
        return partial_routing(**each.run("choices", kernel, operands, load | rows, flops=6 * flops))
    counts, kernel = {"counts": each.array(each.tiles, E)}, functools.partial(_count_choices_kernel, tile=tile)
    summed = each.count(each.run("count_choices", kernel, {"experts": experts}, counts, flops=2 * flops))
    kernel = functools.partial(_assign_kernel, capacity=None, tile=tile)
    return partial_routing(load=summed["load"], **each.run("place", kernel, operands | summed, rows, flops=4 * flops))


@traced_once("spec", "tile", "interpret")
def forward_pallas(
    spec: Spec, tile: Tiles, logits: jax.Array, selection_bias: jax.Array | None, mask: jax.Array | None, *,
    interpret: bool,
) -> Routing:  # fmt: skip
    """T > 0."""
    (T, E), k = logits.shape, spec.k
    each = _Launches(T, E, tile, logits, interpret)
    array, run = each.array, each.run
    static: dict[str, Any] = {"spec": spec, "tile": tile}
    weights, scalar = array(T, k, dtype="float32"), array(1, dtype="float32")
    choices = {"experts": array(T, k), "weights": weights}
    rows = each.rows(k) | {"aux_loss": scalar, "z_loss": scalar}
    operands: dict = {"logits": logits, "selection_bias": selection_bias, "mask": mask}
    # A logit: about 8 for its scores and the losses' sums; in each choice it is compared twice, by key and by number.
    # Then a token and expert: compared with each choice, counted, summed, and placed.
    choosing, assigning = T * E * (8 + 2 * k), T * E * (k + 3)

    if each.tiles == 1:
        kernel = functools.partial(_one_tile_kernel, interpret=interpret, **static)
        fields = run("fwd", kernel, operands, choices | {"load": array(E)} | rows, flops=choosing + assigning)
    else:
        out = choices | {"counts": array(each.tiles, E), "sums": array(each.tiles, E + 1, dtype="float32")}
        chosen = run("choose", functools.partial(_choose_kernel, **static), operands, out, flops=choosing)
        summed = each.count(chosen)

        operands, aliases = {"experts": chosen["experts"], "mask": mask, **summed}, {}
        if spec.capacity is not None:  # dropped choices' weights become 0, in place
            operands["chosen_weights"], rows["weights"] = chosen["weights"], weights
            aliases = {"chosen_weights": "weights"}
        # chosen_weights are not read
        in_place = {"aliases": aliases, "bytes_accessed": bytes_of(chosen["experts"], *summed.values(), *rows.values())}
        kernel = functools.partial(_assign_kernel, capacity=spec.capacity, tile=tile)
        assigned = run("place", kernel, operands, rows, flops=assigning, **in_place)
        fields = {"weights": chosen["weights"], "experts": chosen["experts"], "load": summed["load"]} | assigned

    return Routing(**fields | {name: fields[name].reshape(()) for name in ("aux_loss", "z_loss")})
