"""FP8: quantize and fp8_matmul, and how arrays of many FP8 numbers are launched."""

FP8_MATMUL, QUANTIZE = "ops/fp8_matmul", "ops/quantize"
GEMM, TENSORS = "tests/ops/fp8_matmul/test_gemm.py", "tests/ops/quantize/test_values.py"
GEMM_DENSE, GEMM_ROWS, GEMM_CONTRACTION = f"{GEMM}::test_dense", f"{GEMM}::test_rows", f"{GEMM}::test_contraction"
DENSE, SHAPES, TILES, STACKS = (f"{TENSORS}::test_{name}" for name in ("bfloat16", "shapes", "tiles", "stack"))
LAUNCHES = "tests/_lib/test_launch_pallas.py"
GROUPS, RANDOM = "tests/ops/quantize/test_ragged.py::test_layouts", "tests/ops/quantize/test_stochastic.py::test_values"

# fmt: off
MUTATIONS = {
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
    "fp8_matmul offset: groups are counted by a stack that has more rows": (
        f"{FP8_MATMUL}/gemm_pallas.py", "(M, N), K = out_ref.shape, a_ref.shape[1]", "(M, N), K, G = out_ref.shape, a_ref.shape[1], b_ref.shape[0]",
        f"{GEMM}::test_rows_that_int32_does_not_reach"),
    "fp8_matmul offset: the last step of K": (
        f"{FP8_MATMUL}/gemm_pallas.py", "if K % BLOCK:", "if K < BLOCK:", GEMM_DENSE),
    "quantize mask: a tile's rows go on past M": (
        f"{QUANTIZE}/cast_pallas.py", "else rows < M", "else rows < M + 1", STACKS),
    "quantize mask: the last column is left out": (
        f"{QUANTIZE}/cast_pallas.py", "(columns < K, blocks", "(columns < K - 1, blocks", DENSE),
    "quantize mask: a group's last tile reads its neighbour": (
        f"{QUANTIZE}/cast_pallas.py", "rows_in = rows < end", "rows_in = rows < M", GROUPS),
    "quantize mask: rows outside the groups are written to columns": (
        f"{QUANTIZE}/cast_pallas.py", "rows_t_in = (block >= 0) & (", "rows_t_in = (block >= -1) & (", GROUPS),
    "quantize mask: what is too large does not saturate": (
        "_lib/fp8.py", "jnp.where(values == values, jnp.minimum(jnp.maximum(values, -most), most), values)", "values", f"{TENSORS}::test_given_amax"),
    "quantize mask: an infinity saturates": (
        "_lib/fp8.py", "(x * 0.0 + x)", "x", DENSE),
    "quantize mask: an infinity is the largest magnitude": (
        "_lib/fp8.py", "jnp.where(size < jnp.inf, size, 0.0)", "without_nan(size)", "tests/ops/adaln/test_fp8.py::test_what_is_not_finite"),
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
        f"{QUANTIZE}/cast_pallas.py", "random_bits(p.g * M + p.rows, p.columns,", "random_bits(p.g * M + p.columns, p.rows,", RANDOM),
    "quantize offset: a matrix's rows are counted from its own first": (
        f"{QUANTIZE}/cast_pallas.py", "random_bits(p.g * M +", "random_bits(0 * M +", f"{TENSORS}::test_more_than_int32_reaches"),
    "quantize offset: the amax pass leaves out the last tiles": (
        f"{QUANTIZE}/amax_pallas.py", "lax.fori_loop(0, pl.cdiv(tiles, programs)", "lax.fori_loop(0, tiles // programs", TILES),
    "quantize offset: 128 columns more than a scale has": (
        f"{QUANTIZE}/tiles_pallas.py", "width = min(BLOCK, tile.cols) if by_blocks", "width = min(2 * BLOCK, tile.cols) if by_blocks", DENSE),
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
}
# fmt: on
