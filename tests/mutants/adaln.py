"""AdaLN: kernels and layers."""

ADALN, ROWS = "ops/adaln", "tests/ops/adaln/test_values.py"
LAYOUTS, VARIANTS, SEARCH, MANY = (
    f"{ROWS}::test_layouts",
    f"{ROWS}::test_variants",
    f"{ROWS}::test_every_row_finds_its_sequence",
    f"{ROWS}::test_sequences_of_many_tiles",
)
X64 = "tests/contracts/test_x64.py::test_x64[gated_residual_adaln-interpret]"

# fmt: off
MUTATIONS = {
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
    "adaln mask: rows that are not there, with epsilon 0": (
        f"{ADALN}/bwd_pallas.py", "spec, saved or None, rows_in & inside)", "spec, saved or None)", f"{ROWS}::test_zero_epsilon"),
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
        f"{ADALN}/sums_pallas.py", "ceil_div(tiles - whole * _MANY, _FEW), sums)", "(tiles - whole * _MANY) // _FEW, sums)", MANY),
    "adaln offset: the sums' whole steps": (
        f"{ADALN}/sums_pallas.py", "row = begin + i * height + ", "row = begin + i * _FEW + ", MANY),
    "adaln offset: the parts' first tile": (
        f"{ADALN}/sums_pallas.py", "load(ref, first + row, row < tiles)", "load(ref, first + row + 1, row < tiles)", LAYOUTS),
    "adaln index: per is not asked where B = T": (
        f"{ADALN}/api.py", "return per == \"row\" or (", "return (", f"{ROWS}::test_as_many_sequences_as_rows"),
    "adaln x64: the search's sum is int64": (
        f"{ADALN}/rows_pallas.py", "jnp.sum(passed, dtype=jnp.int32)", "jnp.sum(passed)", X64),
    "adaln x64: an array of int64": (
        f"{ADALN}/rows_pallas.py", "lax.full_like(count, size)", "lax.full_like(count, size, dtype=int)", X64),
    "adaln block: the first epsilon twice": (
        "nn/adaln.py", "epsilon=before_mlp", "epsilon=before_mixer", "tests/nn/test_diffusers.py::test_dit"),
    "adaln block: a table is not added": (
        "nn/adaln.py", "made = cond.astype(dtype) + ", "made = cond.astype(dtype) + 0 * ", "tests/nn/test_diffusers.py::test_latte_block"),
}
# fmt: on
