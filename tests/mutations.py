"""Breaks the kernels one line at a time and expects the suite to turn red: `python tests/mutations.py`. A mutation that survives is a hole in the tests.

Each is (file in jaxops/, a line's text, what stands there instead, the tests that must see it).
"""

import pathlib
import subprocess
import sys

JAXOPS = pathlib.Path(__file__).parents[1] / "jaxops"
GROUPED, ADALN, QUANTIZE = "ops/grouped_matmul", "ops/adaln", "ops/quantize"
VALUES = "tests/ops/grouped_matmul/test_values.py"
ROUTINGS, STEPS, PATTERNS = f"{VALUES}::test_float32", f"{VALUES}::test_wgrad_steps", f"{VALUES}::test_every_pattern_of_empty_groups"
ROWS = "tests/ops/adaln/test_values.py"
LAYOUTS, VARIANTS, SEARCH, MANY = (
    f"{ROWS}::test_layouts",
    f"{ROWS}::test_variants",
    f"{ROWS}::test_every_row_finds_its_sequence",
    f"{ROWS}::test_sequences_of_many_tiles",
)
FP8_MATMUL, GEMM = "ops/fp8_matmul", "tests/ops/fp8_matmul/test_gemm.py"
GEMM_DENSE, GEMM_ROWS, GEMM_CONTRACTION = f"{GEMM}::test_dense", f"{GEMM}::test_rows", f"{GEMM}::test_contraction"
TENSORS = "tests/ops/quantize/test_values.py"
DENSE, SHAPES, TILES, STACKS = (f"{TENSORS}::test_{name}" for name in ("bfloat16", "shapes", "tiles", "stack"))
ROUTE, ROUTED = "ops/route", "tests/ops/route/test_values.py"
ROUTES, TIES, BAD = (f"{ROUTED}::test_{name}" for name in ("variants", "ties", "bad_logits"))
PERMUTE, PERMUTED = "ops/permute", "tests/ops/permute/test_values.py"
COPIES, WILD = f"{PERMUTED}::test_variants", f"{PERMUTED}::test_wild_positions_and_offsets"
GLU = "ops/grouped_glu"
UNITS, OUTSIDE, GELU, RELU, SIGMOID, TANH = (
    f"tests/ops/grouped_glu/test_values.py::test_{name}"
    for name in (
        "routings",
        "what_stands_outside_is_not_read",
        "activations[gelu-interpret]",
        "activations[relu-interpret]",
        "activations[sigmoid-interpret]",
        "activations[gelu_tanh-interpret]",
    )
)
MLP, MLP_VALUES = "ops/moe_mlp", "tests/ops/moe_mlp/test_values.py"
MLPS, WILD_MLP = (f"{MLP_VALUES}::test_{name}" for name in ("variants", "wild_positions_indices_and_offsets"))
MODALITY = "ops/modality_grouped_matmul"
MODALITIES, CHAIN, NAN_ROW, DEAD = (
    f"tests/ops/modality_grouped_matmul/test_values.py::test_{name}"
    for name in ("float32", "a_chain_of_two_needs_nothing_in_between", "a_row_that_is_nan_stays_in_its_group_and_columns", "modalities_of_size_zero")
)
MODAL_TILES, MODAL_PLAN = "tests/ops/modality_grouped_matmul/test_triton.py", "tests/ops/modality_grouped_matmul/test_plan.py"
CASTS = "tests/offload/test_scan.py::test_gradients_of_what_is_cast_once_are_stacked_in_the_narrower_type"
SCAN, CHOICE, WHERE = "tests/offload/test_scan.py", "tests/offload/test_scan.py::test_every_choice", "tests/offload/test_scan.py::test_where_residuals_lie"
LAUNCHES = "tests/_lib/test_launch_pallas.py"
GROUPS, RANDOM = "tests/ops/quantize/test_ragged.py::test_layouts", "tests/ops/quantize/test_stochastic.py::test_values"

# fmt: off
MUTATIONS = {
    "offload index: a layer's residuals stand in its own place": (
        "offload/scanning.py", "i.astype(jnp.uint32) + 1", "i.astype(jnp.uint32)", CHOICE),
    "offload index: the same residuals come for every layer": (
        "offload/scanning.py", "return (i - 1, ct_carry, coming", "return (i, ct_carry, coming", CHOICE),
    "offload order: gradients are stacked before the next residuals have come": (
        "offload/scanning.py", "ct_x, coming = barrier((ct_x, coming))", "ct_x = barrier(ct_x)",
        f"{SCAN}::test_gradients_are_stacked_once_all_has_come"),
    "offload sum: the last layer's gradient of what stands around": (
        "offload/scanning.py", "[t + ct for t, ct in", "[0 * t + ct for t, ct in", f"{SCAN}::test_as_lax_scan"),
    "offload casts: of two casts' gradients one counts": (
        "offload/casts.py", "if len(users[var]) == 1 and", "if users[var] and", CASTS),
    "offload casts: gradients stay as wide as their parameters": (
        "offload/casts.py", "and after.itemsize < before.itemsize", "and after.itemsize > before.itemsize", CASTS),
    "offload: nothing goes to the host": (
        "offload/scanning.py", 'layer.policy.choice(name) == "offload")', 'layer.policy.choice(name) == "")', WHERE),
    "offload: what goes through a checkpoint is moved twice": (
        "offload/residuals.py", "var = eqn.invars[inner.invars.index(place)]", "return var, name",
        "tests/offload/test_residuals.py::test_what_goes_through_a_checkpoint_is_kept_once"),
    "offload: a result has no name": (
        "offload/residuals.py", "return jax.tree.map(lambda x: once[id(x)], (out, vjp))", "return out, jax.tree.map(lambda x: once[id(x)], vjp)",
        "tests/offload/test_residuals.py::test_everything_that_the_backward_needs"),
    "offload: a name stands for all that begin like it": (
        "offload/policies.py", 'name.startswith(known + ".")', "name.startswith(known)", "tests/offload/test_policies.py"),
    "offload: a copy's beginning is forgotten": (
        "offload/reports.py", "(*_moved(opcode, result), len(work))", "(*_moved(opcode, result), 0)", "tests/offload/test_reports.py"),
    "offload: any copy is proposed": (
        "offload/proposals.py", "elif r.copy_us <= copying:", "elif r.copy_us <= copying or r:", "tests/offload/test_proposals.py"),
    "mask: a modality's columns of zeros are multiplied": (
        f"{MODALITY}/fwd_pallas.py", "(j < pl.cdiv(width, bn))", "(j < pl.cdiv(N, bn))", MODALITIES),
    "mask: a modality's last tile of columns is not cut": (
        f"{MODALITY}/fwd_pallas.py", "if width % bn and width < N:", "if width % bn and width > N:", NAN_ROW),
    "mask: zeros are not stored": (
        f"{MODALITY}/fwd_pallas.py", "pl.when(~product)", "pl.when(product & ~product)", MODALITIES),
    "mask: a modality stores past its groups' ends": (
        f"{MODALITY}/fwd_pallas.py", "jnp.arange(height, dtype=jnp.int32) < end)[:, None]", "jnp.arange(height, dtype=jnp.int32) < M)[:, None]", MODALITIES),
    "mask: K is the widest modality's": (
        "_lib/grouped_gemm_pallas.py", "jnp.arange(bk, dtype=jnp.int32) < K)", "jnp.arange(bk, dtype=jnp.int32) < lhs_ref.shape[1])", MODALITIES),
    "index: a modality's groups are counted from the first of all": (
        f"{MODALITY}/fwd_pallas.py", "jnp.clip(group - first, 0,", "jnp.clip(group, 0,", MODALITIES),
    "index: a modality has its neighbour's group, too": (
        f"{MODALITY}/fwd_pallas.py", "(group < last)", "(group <= last)", MODALITIES),
    "index: a matrix's gradient lands in its neighbour's": (
        f"{MODALITY}/wgrad_pallas.py", "jnp.clip(group - first, 0, G - 1)", "jnp.clip(group, 0, G - 1)", MODALITIES),
    "index: wgrad looks up the ranks of the first modality": (
        f"{MODALITY}/wgrad_pallas.py", "rank = first + number", "rank = number", MODALITIES),
    "index: wgrad's tiles all are the first modality's": (
        f"{MODALITY}/wgrad_pallas.py", "before += count", "before -= count", MODALITIES),
    "index: the work list forgets which runs are a launch's": (
        "_lib/schedule_pallas.py", "hi = jnp.where(mine, hi, lo)", "hi = jnp.where(mine, hi, hi)", "tests/_lib/test_schedule.py"),
    "offset: where a launch's modalities end": (
        "_lib/schedule_pallas.py", "jnp.where(r < end, count, 0)", "jnp.where(r <= end, count, 0)", "tests/_lib/test_schedule.py"),
    "bound: more tiles than the work list has": (
        "_lib/schedule_pallas.py", "total = jnp.minimum(total, tile_bound(M, G, bm))", "total = jnp.minimum(total, M * M)", "tests/_lib/test_schedule.py"),
    "index: the largest group of all comes first": (
        "_lib/schedule_pallas.py", "& ~((h >= first)[None, :] & (g < first)[:, None])", "", "tests/_lib/test_schedule.py"),
    "index: rows between modalities are nobody's": (
        f"{MODALITY}/parts.py", "*(1 + firsts[i] for i in found[1:])", "*(2 + firsts[i] for i in found[1:])", DEAD),
    "index: rows behind all groups are nobody's": (
        f"{MODALITY}/parts.py", "firsts[-1] + 2]", "firsts[-1] + 1]", MODALITIES),
    "launch: all launches write results of their own": (
        f"{MODALITY}/api.py", "for part in parts), offsets, result", "for part in parts), offsets, None", MODALITIES),
    "xla: a modality's columns are the widest's": (
        f"{MODALITY}/xla.py", "k, n = w.shape[1:][::-1] if transpose_rhs else w.shape[1:]", "k, n = w.shape[1:]",
        "tests/ops/modality_grouped_matmul/test_values.py::test_transposed"),
    "gradient: dgrad with the forward's tiles": (
        f"{MODALITY}/api.py", "plan = dataclasses.replace(plan, fwd=plan.dgrad, dgrad=plan.fwd)", "plan = dataclasses.replace(plan, fwd=plan.fwd)",
        "tests/ops/modality_grouped_matmul/test_contracts.py::test_dgrad_has_tiles_of_its_own"),
    "gradient: of a wgrad, the operands change places": (
        f"{MODALITY}/api.py", "return dlhs, ddout, None", "return ddout, dlhs, None",
        "tests/ops/modality_grouped_matmul/test_contracts.py::test_second_order[xla]"),
    "index: a Hopper tile's first row tile": (
        f"{MODALITY}/gemm_triton.py", "first = gl.where(here, start, first)", "first = gl.where(here, 0, first)", MODAL_TILES),
    "index: a Hopper tile of zeros starts at the first column": (
        f"{MODALITY}/gemm_triton.py", "return first + i, (left + j) * BN, part", "return first + i, j * BN, part", MODAL_TILES),
    "index: a Hopper wgrad's rank": (
        f"{MODALITY}/gemm_triton.py", "first = gl.where(here, sizes[p][0], first)", "first = 0", MODAL_TILES),
    "plan: tiles of one size stay apart": (
        f"{MODALITY}/plan.py", "return tuple(found[_size(own)] for own in tiles)", "return tiles", MODAL_PLAN),
    "plan: the smallest matrices decide": (
        f"{MODALITY}/plan.py", "key=lambda i: -problem.shapes[i][1]", "key=lambda i: problem.shapes[i][1]", MODAL_PLAN),
    "plan: a launch of five": (
        f"{MODALITY}/parts.py", "MOST = 4", "MOST = 5", MODAL_PLAN),
    "mask: wgrad reads its neighbour's rows": (
        "_lib/grouped_gemm_pallas.py", "* bk + jnp.arange(bk, dtype=jnp.int32) < end)", "* bk + jnp.arange(bk, dtype=jnp.int32) < M)", STEPS),
    "mask: fwd stores past its group's end": (
        f"{GROUPED}/fwd_pallas.py", "stored = start + jnp.arange(height, dtype=jnp.int32) < end", "stored = start + jnp.arange(height, dtype=jnp.int32) < M",
        ROUTINGS),
    "mask: fwd multiplies past K": (
        "_lib/grouped_gemm_pallas.py", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K)", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K + 1)", ROUTINGS),
    "mask: rows outside the groups are multiplied": (
        f"{GROUPED}/fwd_pallas.py", "inside = group < G", "inside = group <= G", ROUTINGS),
    "index: every group takes the first matrix": (
        f"{GROUPED}/fwd_pallas.py", "jnp.clip(group, 0, G - 1)", "jnp.clip(group, 0, 0)", ROUTINGS),
    "index: tile columns": (
        "_lib/tiling.py", "return first + inside % height, inside // height", "return first + inside % panel, inside // panel", ROUTINGS),
    "index: wgrad's groups keep their order": (
        "_lib/schedule_pallas.py", "(h[None, :] < g[:, None])", "(h[None, :] <= g[:, None])", ROUTINGS),
    "offset: a tile's first row": (
        "_lib/tiling.py", "(t[:, None] - first[None, :]) * bm)", "(t[:, None] - first[None, :]) * (bm - 1))", ROUTINGS),
    "offset: runs start a group late": (
        "_lib/ragged.py", "offsets_at(jnp.clip(r - 1, 0, G))", "offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: the run behind the groups is forgotten": (
        "_lib/ragged.py", "hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)", "hi = offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: one tile too few": (
        "_lib/tiling.py", "return -(-M // bm) + G + 1", "return -(-M // bm)", PATTERNS),
    "adaln mask: a tile's rows go on past its end": (
        f"{ADALN}/rows_pallas.py", "return rows, rows < tile.end", "return rows, rows < tile.end + 1", LAYOUTS),
    "adaln mask: columns past D": (
        f"{ADALN}/rows_pallas.py", "else columns < self.D", "else columns <= self.D", VARIANTS),
    "adaln mask: the mean leaves zeros past D": (
        f"{ADALN}/rows_pallas.py", "x = self.inside([value - ", "x = ([value - ", VARIANTS),
    "adaln mask: rows outside are normalised": (
        f"{ADALN}/fwd_pallas.py", "inside = (tile.sequence >= 0) & (tile.sequence < B)", "inside = tile.sequence < B", LAYOUTS),
    "adaln mask: rows outside are read": (
        f"{ADALN}/bwd_pallas.py", "rows, rows_in & inside) for name in (\"x\"", "rows, rows_in) for name in (\"x\"", VARIANTS),
    "adaln mask: a bad scale reaches rows outside": (
        f"{ADALN}/bwd_pallas.py", "jnp.where(inside, d * stats[\"rstd\"], 0.0)", "d * stats[\"rstd\"]", f"{ROWS}::test_a_bad_row_stays_in_its_sequence"),
    "adaln mask: rows that are not there, with eps 0": (
        f"{ADALN}/bwd_pallas.py", "spec, saved or None, rows_in & inside)", "spec, saved or None)", f"{ROWS}::test_no_eps"),
    "adaln mask: every tile is a whole sequence": (
        f"{ADALN}/bwd_pallas.py", "whole = (tile.start == tile.lo) & (tile.end == tile.hi) & inside", "whole = (tile.start == tile.lo) & inside", LAYOUTS),
    "adaln mask: an empty head is one of the parts": (
        f"{ADALN}/sums_pallas.py", "has_head = (first * rows > lo)", "has_head = (first * rows >= lo)", LAYOUTS),
    "adaln mask: the sums' last step": (
        f"{ADALN}/sums_pallas.py", "row < tiles) for b", "row <= tiles) for b", LAYOUTS),
    "adaln index: sums are found through another multiple": (
        f"{ADALN}/sums_pallas.py", "inside & (first == program)", "inside & (first != program)", LAYOUTS),
    "adaln index: every sequence takes the first scale": (
        f"{ADALN}/fwd_pallas.py", "jnp.clip(tile.sequence, 0, B - 1)", "jnp.clip(tile.sequence, 0, 0)", LAYOUTS),
    "adaln index: the search's second step": (
        f"{ADALN}/rows_pallas.py", "first + stride * jnp.maximum(found - 1, 0), stride", "first + stride * jnp.maximum(found, 0), stride", SEARCH),
    "adaln offset: the search starts a run early": (
        f"{ADALN}/rows_pallas.py", "<= row) & (i < count)", "< row) & (i < count)", LAYOUTS),
    "adaln offset: a head ends a row early": (
        f"{ADALN}/rows_pallas.py", "jnp.where(is_head, first, start + rows)", "jnp.where(is_head, first - 1, start + rows)", LAYOUTS),
    "adaln offset: one tile too few": (
        f"{ADALN}/rows_pallas.py", "return pl.cdiv(T, rows) + B + 1", "return pl.cdiv(T, rows) + B - 1", LAYOUTS),
    "adaln offset: the last steps of the sums": (
        f"{ADALN}/sums_pallas.py", "pl.cdiv(tiles - whole * _MANY, _FEW), sums)", "(tiles - whole * _MANY) // _FEW, sums)", MANY),
    "adaln offset: the sums' whole steps": (
        f"{ADALN}/sums_pallas.py", "row = begin + i * height + ", "row = begin + i * _FEW + ", MANY),
    "adaln offset: the parts' first tile": (
        f"{ADALN}/sums_pallas.py", "load(ref, first + row, row < tiles)", "load(ref, first + row + 1, row < tiles)", LAYOUTS),
    "fp8_matmul mask: numbers past K": (
        f"{FP8_MATMUL}/gemm_pallas.py", "jnp.arange(BLOCK, dtype=jnp.int32) < K)", "jnp.arange(BLOCK, dtype=jnp.int32) < K + 1)", GEMM_DENSE),
    "fp8_matmul mask: rows past the group's end are stored": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(rows < end)[:, None]", "(rows < M)[:, None]", GEMM_ROWS),
    "fp8_matmul mask: rows outside the groups are multiplied": (
        f"{FP8_MATMUL}/gemm_pallas.py", "inside = group < G", "inside = group <= G", GEMM_ROWS),
    "fp8_matmul mask: bad scales of rows outside": (
        f"{FP8_MATMUL}/gemm_pallas.py", "out = jnp.where(inside, acc, 0.0)", "out = acc", GEMM_ROWS),
    "fp8_matmul mask: the contraction's last rows": (
        f"{FP8_MATMUL}/gemm_pallas.py", "mask = (rows < M)[:, None]", "mask = (rows < M - 1)[:, None]", GEMM_CONTRACTION),
    "fp8_matmul index: every group takes the first matrix": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(jnp.clip(group, 0, G - 1),)", "(jnp.clip(group, 0, 0),)", GEMM_ROWS),
    "fp8_matmul index: 1x128 scales of the first step": (
        f"{FP8_MATMUL}/gemm_pallas.py", "lambda: (k, self.rows)", "lambda: (0 * k, self.rows)", GEMM_DENSE),
    "fp8_matmul index: 128x128 scales of the first rows": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(self.rows // BLOCK, k)", "(self.rows // (2 * BLOCK), k)", GEMM_DENSE),
    "fp8_matmul offset: a group's padded columns": (
        f"{FP8_MATMUL}/gemm_pallas.py", "_multiply(a, b, first, ", "_multiply(a, b, first + 1, ", GEMM_CONTRACTION),
    "fp8_matmul offset: a group's last step": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(end - start + BLOCK - 1) // BLOCK)", "(end - start) // BLOCK)", GEMM_CONTRACTION),
    "fp8_matmul offset: the last step of K": (
        f"{FP8_MATMUL}/gemm_pallas.py", "if K % BLOCK:", "if K < BLOCK:", GEMM_DENSE),
    "fp8_matmul offset: groups are counted by a stack that has more rows": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(M, N), K = out_ref.shape, a_ref.shape[1]", "(M, N), K, G = out_ref.shape, a_ref.shape[1], b_ref.shape[0]",
        f"{GEMM}::test_rows_that_int32_does_not_reach"),
    "launch offset: FP8 arrays of over 2^31 numbers get no more rows": (
        "_lib/launch_pallas.py", "<= _MOST_BYTES", "< _MOST_INT32", f"{LAUNCHES}::test_an_array_in_the_window_gets_more_rows"),
    "launch offset: one row too few for int64": (
        "_lib/launch_pallas.py", "_MOST_BYTES // math.prod(x.shape[1:]) + 1", "_MOST_BYTES // math.prod(x.shape[1:])", f"{LAUNCHES}::test_the_windows_ends"),
    "launch offset: a result keeps the rows that were added": (
        "_lib/launch_pallas.py", "x[: like.shape[0]] if _overflows(like) else x", "x", f"{LAUNCHES}::test_an_array_in_the_window_gets_more_rows"),
    "launch vmap: a batch whose arrays overflow is one launch": (
        "_lib/launch_pallas.py", "if any(map(_overflows, [*moving, *results])):", "if False:", f"{LAUNCHES}::test_batches"),
    "launch vmap: only operands are looked at": (
        "_lib/launch_pallas.py", "[*moving, *results]", "moving", f"{LAUNCHES}::test_batched_operands_beside_unbatched_ones"),
    "launch vmap: a batch of batches is as JAX batches it": (
        "_lib/launch_pallas.py", "found = _batched_within_reach(every)(*operands)", "found = every(*operands)", f"{LAUNCHES}::test_batches"),
    "quantize cast: an infinity saturates": (
        "_lib/fp8.py", "jnp.where(jnp.abs(x) < jnp.inf, x, jnp.nan)", "x", DENSE),
    "quantize scale: an infinity is the largest magnitude": (
        "_lib/fp8.py", "jnp.where(size < jnp.inf, size, 0.0)", "without_nan(size)", "tests/ops/adaln/test_fp8.py::test_what_is_not_finite"),
    "quantize mask: a tile's rows go on past M": (
        f"{QUANTIZE}/cast_pallas.py", "else rows < M", "else rows < M + 1", STACKS),
    "quantize mask: the last column is left out": (
        f"{QUANTIZE}/cast_pallas.py", "(columns < K, blocks", "(columns < K - 1, blocks", DENSE),
    "quantize mask: a group's last tile reads its neighbour": (
        f"{QUANTIZE}/cast_pallas.py", "rows_in = rows < end", "rows_in = rows < M", GROUPS),
    "quantize mask: rows outside the groups are written to columns": (
        f"{QUANTIZE}/cast_pallas.py", "rows_t_in = (block >= 0) & (", "rows_t_in = (block >= -1) & (", GROUPS),
    "quantize mask: infinities are not saturated": (
        "_lib/fp8.py", "jnp.where(values == values, jnp.minimum(jnp.maximum(values, -most), most), values)", "values", DENSE),
    "quantize mask: rows outside reach the tensor's scale": (
        f"{QUANTIZE}/amax_pallas.py", "(rows < M) & _inside(refs[1], rows)", "(rows < M) | _inside(refs[1], rows)", GROUPS),
    "quantize mask: rows behind the groups reach a column's scale": (
        f"{QUANTIZE}/amax_pallas.py", "(rows >= first) & (rows < end)", "(rows >= first) & (rows < end + 1)", GROUPS),
    "quantize index: a padded group starts where it started": (
        f"{QUANTIZE}/cast_pallas.py", "jnp.maximum(block, 0) * BLOCK + grid.rows", "rows", GROUPS),
    "quantize index: a block's scale goes to its neighbour": (
        f"{QUANTIZE}/cast_pallas.py", "j * (tile.cols // grid.width) + grid.blocks", "j + grid.blocks", TILES),
    "quantize index: every tensor of a stack is the first": (
        f"{QUANTIZE}/cast_pallas.py", "g = pid // (down * across)", "g = pid // (down * across * G)", STACKS),
    "quantize index: patches lie one row apart": (
        f"{QUANTIZE}/tiles_pallas.py", "self._along(5)) * self.tile.patch", "self._along(5)) * 1", DENSE),
    "quantize index: rows and columns of the hash change places": (
        f"{QUANTIZE}/cast_pallas.py", "random_bits(p.g * M + p.rows, p.columns, (row_word", "random_bits(p.g * M + p.columns, p.rows, (row_word", RANDOM),
    "quantize offset: the amax pass leaves out the last tiles": (
        f"{QUANTIZE}/amax_pallas.py", "lax.fori_loop(0, pl.cdiv(tiles, programs)", "lax.fori_loop(0, tiles // programs", TILES),
    "quantize offset: 128 columns more than a scale has": (
        f"{QUANTIZE}/tiles_pallas.py", "width = min(BLOCK, tile.cols) if by_blocks", "width = min(2 * BLOCK, tile.cols) if by_blocks", DENSE),
    "quantize offset: a matrix's rows are counted from its own first": (
        f"{QUANTIZE}/cast_pallas.py", "random_bits(p.g * M +", "random_bits(0 * M +", f"{TENSORS}::test_more_than_int32_reaches"),
    "glu mask: rows outside are read": (
        f"{GLU}/halves_pallas.py", "mask=self.inside, other=0.0", "mask=self.there, other=0.0", OUTSIDE),
    "glu mask: a row more than the groups have": (
        f"{GLU}/halves_pallas.py", "(rows < end), shape)", "(rows <= end), shape)", OUTSIDE),
    "glu mask: columns past F are stored": (
        f"{GLU}/halves_pallas.py", "there & jnp.broadcast_to(columns < F, shape)", "there & jnp.broadcast_to(columns <= F, shape)", UNITS),
    "glu mask: rows outside are not written": (
        f"{GLU}/halves_pallas.py", "astype(ref.dtype), mask=self.there)", "astype(ref.dtype), mask=self.inside)", OUTSIDE),
    "glu index: up is read where gate lies": (
        f"{GLU}/halves_pallas.py", "(refs[-1], F if len(refs) == 1 else 0)", "(refs[-1], 0)", UNITS),
    "glu index: a block's rows and columns change places": (
        f"{GLU}/halves_pallas.py", "program // across * block.rows", "program % across * block.rows", UNITS),
    "glu offset: the last columns are left out": (
        f"{GLU}/halves_pallas.py", "* pl.cdiv(F, block.columns)", "* (F // block.columns)", UNITS),
    "glu sum: the slope of silu": (
        "_lib/activations.py", "s * (1 + u * (1 - s))", "s * (1 + u * s)", UNITS),
    "glu sum: the slope of gelu": (
        "_lib/activations.py", "jnp.exp(-0.5 * u * u)", "jnp.exp(-u * u)", GELU),
    "glu sum: the slope of gelu_tanh": (
        "_lib/activations.py", "(1 + 3 * 0.044715 * u * u)", "(1 + 2 * 0.044715 * u * u)", TANH),
    "glu sum: the slope of relu": (
        "_lib/activations.py", "jnp.where(u > 0, 1.0, 0.0)", "jnp.where(u > 0, 1.0, 0.1)", RELU),
    "glu sum: the slope of sigmoid": (
        "_lib/activations.py", "return s, s * (1 - s)", "return s, s", SIGMOID),
    "glu sum: the gradients of gate and up change places": (
        "_lib/activations.py", "return dh * up.astype(jnp.float32) * slope, dh * value", "return dh * value, dh * up.astype(jnp.float32) * slope", UNITS),
    "glu sum: the gradients of x are rounded before they are added": (
        f"{GROUPED}/api.py", "wide = out if len(lhs) == 1 else jnp.float32", "wide = jnp.dtype(lhs[0].dtype)",
        "tests/ops/grouped_glu/test_values.py::test_compute_dtype"),
    "glu sum: the gradients of x are rounded to its own dtype before they are added": (
        f"{GROUPED}/api.py", "wide = out if len(lhs) == 1 else jnp.float32", "wide = out", "tests/ops/grouped_glu/test_values.py::test_compute_dtype"),
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
}
# fmt: on


def survives(file: str, old: str, new: str, tests: str) -> bool:
    path = JAXOPS / file
    source = path.read_text()
    if source.count(old) != 1:
        raise SystemExit(f"{file} has {source.count(old)} places that read {old!r}: bring tests/mutations.py up to date.")
    try:
        path.write_text(source.replace(old, new))
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-k", "not gpu", tests], capture_output=True, text=True)
    finally:
        path.write_text(source)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.returncode == 0


if __name__ == "__main__":
    holes = []
    for name, mutation in MUTATIONS.items():
        alive = survives(*mutation)
        print(f"{'SURVIVED' if alive else 'caught':9}{name}", flush=True)
        holes += [name] * alive
    sys.exit(f"{len(holes)} mutations survived: the tests cannot see them." if holes else 0)
