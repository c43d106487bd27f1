"""Breaks the kernels one line at a time and expects the suite to turn red: `python tests/mutations.py`. A mutation that survives is a hole in the tests.

Each is (file in jaxops/, a line's text, what stands there instead, the tests that must see it).
"""

import pathlib
import subprocess
import sys

JAXOPS = pathlib.Path(__file__).parents[1] / "jaxops"
GROUPED, ADALN = "ops/grouped_matmul", "ops/adaln"
VALUES = "tests/ops/grouped_matmul/test_values.py"
ROUTINGS, STEPS, PATTERNS = f"{VALUES}::test_float32", f"{VALUES}::test_wgrad_steps", f"{VALUES}::test_every_pattern_of_empty_groups"
ROWS = "tests/ops/adaln/test_values.py"
LAYOUTS, VARIANTS, SEARCH, MANY = (
    f"{ROWS}::test_layouts",
    f"{ROWS}::test_variants",
    f"{ROWS}::test_every_row_finds_its_sequence",
    f"{ROWS}::test_sequences_of_many_tiles",
)

# fmt: off
MUTATIONS = {
    "mask: wgrad reads its neighbour's rows": (
        f"{GROUPED}/wgrad_pallas.py", "* bk + jnp.arange(bk, dtype=jnp.int32) < end)", "* bk + jnp.arange(bk, dtype=jnp.int32) < M)", STEPS),
    "mask: fwd stores past its group's end": (
        f"{GROUPED}/fwd_pallas.py", "stored = start + jnp.arange(height, dtype=jnp.int32) < end", "stored = start + jnp.arange(height, dtype=jnp.int32) < M",
        ROUTINGS),
    "mask: fwd multiplies past K": (
        f"{GROUPED}/fwd_pallas.py", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K)", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K + 1)", ROUTINGS),
    "mask: rows outside the groups are multiplied": (
        f"{GROUPED}/fwd_pallas.py", "inside = group < G", "inside = group <= G", ROUTINGS),
    "index: every group takes the first matrix": (
        f"{GROUPED}/fwd_pallas.py", "jnp.clip(group, 0, G - 1)", "jnp.clip(group, 0, 0)", ROUTINGS),
    "index: tile columns": (
        "jaxops/_lib/tiling.py", "return first + inside % height, inside // height", "return first + inside % panel, inside // panel", ROUTINGS),
    "index: wgrad's groups keep their order": (
        "jaxops/_lib/schedule_pallas.py", "(h[None, :] < g[:, None])", "(h[None, :] <= g[:, None])", ROUTINGS),
    "offset: a tile's first row": (
        "jaxops/_lib/tiling.py", "(t[:, None] - first[None, :]) * bm)", "(t[:, None] - first[None, :]) * (bm - 1))", ROUTINGS),
    "offset: runs start a group late": (
        "_lib/ragged.py", "offsets_at(jnp.clip(r - 1, 0, G))", "offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: the run behind the groups is forgotten": (
        "_lib/ragged.py", "hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)", "hi = offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: one tile too few": (
        "jaxops/_lib/tiling.py", "return -(-M // bm) + G + 1", "return -(-M // bm)", PATTERNS),
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
}
# fmt: on


def survives(file: str, old: str, new: str, tests: str) -> bool:
    path = JAXOPS / file
    source = path.read_text()
    if source.count(old) != 1:
        raise SystemExit(f"{file} has {source.count(old)} places that read {old!r}: bring tests/mutations.py up to date.")
    try:
        path.write_text(source.replace(old, new))
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-k", "interpret", tests], capture_output=True, text=True)
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
