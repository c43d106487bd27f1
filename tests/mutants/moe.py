"""Mixtures of experts: route, permute, combine, moe_mlp, the layer."""

ROUTE, PERMUTE, MLP = "ops/route", "ops/permute", "ops/moe_mlp"
ROUTED, PERMUTED, MLP_VALUES = (f"tests/ops/{op}/test_values.py" for op in ("route", "permute", "moe_mlp"))
ROUTES, TIES, BAD = (f"{ROUTED}::test_{name}" for name in ("variants", "ties", "bad_logits"))
COPIES, WILD = f"{PERMUTED}::test_variants", f"{PERMUTED}::test_wild_positions_and_offsets"
MLPS, WILD_MLP = (f"{MLP_VALUES}::test_{name}" for name in ("variants", "wild_positions_indices_and_offsets"))
NO_TF32 = "tests/nn/test_moe.py::test_logits_and_token_gate_are_no_tf32"

# fmt: off
MUTATIONS = {
    "moe_mlp mask: rows outside have weights": (
        f"{MLP}/xla.py", "& ((row >= first) & (row < end))[:, None]", "& (row >= 0)[:, None]", f"{MLP_VALUES}::test_rows_outside_have_no_weight"),
    "moe_mlp mask: choices without a row have gradients": (
        f"{MLP}/xla.py", "has_row = (routing.row_positions >= first) & (routing.row_positions < end)", "has_row = routing.row_positions >= first", WILD_MLP),
    "moe_mlp mask: choices before the groups have gradients": (
        f"{MLP}/xla.py", "has_row = (routing.row_positions >= first) & (", "has_row = (", WILD_MLP),
    "moe_mlp index: each row has its token's first weight": (
        f"{MLP}/xla.py", "jnp.where(mine, routing.weights[token], 0)", "jnp.where(mine, routing.weights[token][:, :1], 0)", MLPS),
    "moe_mlp index: a choice's gradient is its neighbour's": (
        f"{MLP}/xla.py", "jnp.clip(routing.row_positions, 0, rows.shape[1] - 1)", "jnp.clip(routing.row_positions + 1, 0, rows.shape[1] - 1)", MLPS),
    "moe_mlp offset: bounds are not clipped": (
        "_lib/ragged.py", "lo = jnp.clip(first, 0, R)", "lo = first", WILD_MLP),
    "moe_mlp sum: the gradients of gate and up change places": (
        f"{MLP}/xla.py", "dgate, dup = unit_gradients(activation, gate, up, weights * dh)", "dup, dgate = unit_gradients(activation, gate, up, weights * dh)",
        MLPS),
    "moe_mlp sum: the gradients of gate and up are without the weights": (
        f"{MLP}/xla.py", "unit_gradients(activation, gate, up, weights * dh)", "unit_gradients(activation, gate, up, dh)", MLPS),
    "moe_mlp sum: the down projection's gradient is without the weights": (
        f"{MLP}/xla.py", "(weights * h).astype(dtype)", "h.astype(dtype)", MLPS),
    "moe_mlp sum: the weights' gradient is with them": (
        f"{MLP}/xla.py", "jnp.sum(dh * h, axis=1)[None]", "jnp.sum(weights * dh * h, axis=1)[None]", f"{MLP_VALUES}::test_weights_of_zero"),
    "moe_mlp sum: the weights' gradient is of the activation alone": (
        f"{MLP}/xla.py", "h = value * up.astype(jnp.float32)", "h = value", MLPS),
    "moe_mlp sum: the experts' gradients are rounded": (
        f"{MLP}/api.py", "_gradients(spec, w_kind.dtype, x,", "_gradients(spec, x.dtype, x,", f"{MLP_VALUES}::test_compute_dtype"),
    "moe sum: rounded before it is added over the devices": (
        "nn/moe.py", "out_dtype = dtype if self.expert_axis is None else jnp.float32", "out_dtype = dtype",
        "tests/nn/test_moe.py::test_a_sum_over_devices_is_rounded_once"),
    "route mask: tokens that are not there are counted": (
        f"{ROUTE}/columns_pallas.py", "return body(row, row < T, carry)", "return body(row, row < T + 1, carry)", ROUTES),
    "route mask: experts that are not there can be chosen": (
        f"{ROUTE}/columns_pallas.py", "mask if self.full else mask & jnp.broadcast_to(self.inside, shape)", "mask", TIES),
    "route mask: a group's third best score counts": (
        f"{ROUTE}/fwd_pallas.py", "jnp.where(experts == first, -jnp.inf, values)", "values", ROUTES),
    "route mask: a choice is made twice": (
        f"{ROUTE}/fwd_pallas.py", "jnp.where(experts == best, GONE, left)", "jnp.where((experts == best) & (j != 1), GONE, left)", ROUTES),
    "route mask: a row more than the capacity": (
        f"{ROUTE}/fwd_pallas.py", "member & (rank < spec.capacity)", "member & (rank <= spec.capacity)", ROUTES),
    "route mask: a dropped choice keeps its weight": (
        f"{ROUTE}/fwd_pallas.py", "dropped = member & (rank >= spec.capacity)", "dropped = member & (rank > spec.capacity)", ROUTES),
    "route mask: a dropped choice keeps its gradient": (
        f"{ROUTE}/bwd_pallas.py", "j, T * k) < T * k, dweight, 0.0)", "j, T * k) <= T * k, dweight, 0.0)", ROUTES),
    "route mask: the rows of no expert are not written": (
        f"{ROUTE}/fwd_pallas.py", "mask=(last >= end) & (", "mask=(last > end) & (", ROUTES),
    "route index: the higher number wins": (
        f"{ROUTE}/fwd_pallas.py", "jnp.min(jnp.where(keys == top, numbers, _MOST)", "jnp.max(jnp.where(keys == top, numbers, -1)", TIES),
    "route index: negative zero is less than zero": (
        f"{ROUTE}/keys.py", "-(bits & 0x7FFFFFFF)", "-(bits & 0x7FFFFFFF) - 1", TIES),
    "route index: NaN is the largest": (
        f"{ROUTE}/keys.py", "jnp.where(x == x, x, -jnp.inf)", "x", BAD),
    "route index: a group's parts change places": (
        f"{ROUTE}/columns_pallas.py", "column // (groups * places) * places + column % places", "column // (groups * places) + column % places * 2",
        ROUTES),
    "route offset: ranks start at one": (
        f"{ROUTE}/fwd_pallas.py", "rank = before + upto - 1", "rank = before + upto", ROUTES),
    "route offset: a step forgets the steps before": (
        f"{ROUTE}/fwd_pallas.py", "return before + jnp.sum(member", "return jnp.sum(member", ROUTES),
    "route offset: a tile counts itself among those before": (
        f"{ROUTE}/fwd_pallas.py", "jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts", "jnp.cumsum(counts, axis=0, dtype=jnp.int32)", ROUTES),
    "route offset: the last tiles are not counted": (
        f"{ROUTE}/fwd_pallas.py", "lax.fori_loop(0, pl.cdiv(tiles, step), add", "lax.fori_loop(0, tiles // step, add",
        f"{ROUTED}::test_more_tiles_than_one_step_counts"),
    "route sum: a dropped choice is not in the sum": (
        f"{ROUTE}/bwd_pallas.py", "jnp.sum(jnp.where(member, found.scores, 0.0)", "jnp.sum(jnp.where(dweights != 0, found.scores, 0.0)", ROUTES),
    "route sum: the bias counts against an expert": (
        f"{ROUTE}/fwd_pallas.py", "else found.scores + bias", "else found.scores - bias", ROUTES),
    "route sum: tokens that are not there have shares": (
        f"{ROUTE}/fwd_pallas.py", "jnp.where(row_in, found.share, 0.0)", "found.share", ROUTES),
    "permute mask: columns that are not there": (
        f"{PERMUTE}/choices_pallas.py", "None if D % block == 0 else number < D", "None", COPIES),
    "permute mask: the last token is left out": (
        f"{PERMUTE}/choices_pallas.py", "return cls(tile, positions_ref, token, token < T,", "return cls(tile, positions_ref, token, token < T - 1,", COPIES),
    "permute mask: choices that are not there": (
        f"{PERMUTE}/choices_pallas.py", "jnp.broadcast_to(choice < k, there.shape)", "jnp.broadcast_to(choice < k + 1, there.shape)", COPIES),
    "permute mask: rows before the groups are read": (
        f"{PERMUTE}/choices_pallas.py", "there & (position >= self.lo) &", "there &", COPIES),
    "permute mask: rows behind the groups are read": (
        f"{PERMUTE}/choices_pallas.py", "& (position < self.hi)", "& (position <= self.hi)", COPIES),
    "permute mask: the first row behind the groups is not cleared": (
        f"{PERMUTE}/choices_pallas.py", "| (row >= self.hi)", "| (row > self.hi)", COPIES),
    "permute mask: rows are cleared where some lie behind the groups only": (
        f"{PERMUTE}/choices_pallas.py", "@pl.when((self.lo > 0) | (self.hi < R))", "@pl.when(self.hi < R)", COPIES),
    "permute mask: a choice without a row has a gradient": (
        f"{PERMUTE}/combine_bwd_pallas.py", "jnp.where(choices.has_row, jnp.sum(dots, axis=2, keepdims=True), 0.0)", "jnp.sum(dots, axis=2, keepdims=True)",
        f"{PERMUTED}::test_a_dropped_choice_of_a_bad_token"),
    "permute mask: the weight of a choice without a row": (
        f"{PERMUTE}/combine_pallas.py", "choices.load(weights_ref, choices.has_row)", "choices.load(weights_ref, choices.there)", COPIES),
    "permute index: every program has the first columns": (
        f"{PERMUTE}/permute_pallas.py", "pl.program_id(0) % chunks, D", "pl.program_id(0) % 1, D", COPIES),
    "permute index: row t * k + j is cleared by another": (
        f"{PERMUTE}/choices_pallas.py", "choices.token * self.positions_ref.shape[1] + choices.choice", "choices.token + choices.choice", COPIES),
    "permute offset: the last choices": (
        f"{PERMUTE}/choices_pallas.py", "lax.fori_loop(0, pl.cdiv(k, size)", "lax.fori_loop(0, k // size", COPIES),
    "permute offset: the last columns": (
        f"{PERMUTE}/choices_pallas.py", "lax.fori_loop(0, pl.cdiv(D, block)", "lax.fori_loop(0, D // block", COPIES),
    "permute offset: a program too few": (
        f"{PERMUTE}/combine_pallas.py", "grid=(pl.cdiv(T, tile.rows) *", "grid=(T // tile.rows *", COPIES),
    "permute offset: bounds are not clipped": (
        "_lib/ragged.py", "return lo, jnp.clip(end, lo, R)", "return lo, end", WILD),
    "permute sum: only the last choices": (
        f"{PERMUTE}/combine_pallas.py", "return total + jnp.sum(", "return 0 * total + jnp.sum(", COPIES),
    "permute sum: only the last columns": (
        f"{PERMUTE}/combine_bwd_pallas.py", "dots = dots + jnp.sum(", "dots = 0 * dots + jnp.sum(", COPIES),
    "router: logits in TF32": (
        "ops/route/logits.py", "precision=lax.Precision.HIGHEST)", "precision=None)", NO_TF32),
    "router: the kernel's third part is left out": (
        "ops/route/logits.py", "return large + (middle + small)", "return large + middle", "tests/ops/route/test_logits.py"),
    "router: the gradient of x has only the first part of each": (
        "ops/route/logits.py", "(k[0], k[1], k[0])", "(k[0], 0 * k[1], 0 * k[0])", "tests/ops/route/test_logits.py"),
    "moe: the token gate in TF32": (
        "nn/moe.py", "precision=lax.Precision.HIGHEST)", "precision=None)", NO_TF32),
    "moe: the router is made with a key of its own": (
        "nn/moe.py", "make_part(router, in_features, num_experts, rngs=rngs)", "make_part(router, in_features, num_experts, rngs=nnx.Rngs(0))",
        "tests/nn/test_linen.py::test_moe"),
}
# fmt: on
