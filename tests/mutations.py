"""Breaks the kernels one line at a time and expects the suite to turn red: `python tests/mutations.py`. A mutation that survives is a hole in the tests.

Each is (file, a line's text, what stands there instead, the tests that must see it).
"""

import pathlib
import subprocess
import sys

OP = pathlib.Path(__file__).parents[1] / "jaxops" / "ops" / "grouped_matmul"
VALUES = "tests/ops/grouped_matmul/test_values.py"
ROUTINGS, STEPS, PATTERNS = f"{VALUES}::test_float32", f"{VALUES}::test_wgrad_steps", f"{VALUES}::test_every_pattern_of_empty_groups"

# fmt: off
MUTATIONS = {
    "mask: wgrad reads its neighbour's rows": (
        "wgrad_pallas.py", "* bk + jnp.arange(bk, dtype=jnp.int32) < end)", "* bk + jnp.arange(bk, dtype=jnp.int32) < M)", STEPS),
    "mask: fwd stores past its group's end": (
        "fwd_pallas.py", "stored = start + jnp.arange(bm, dtype=jnp.int32) < end", "stored = start + jnp.arange(bm, dtype=jnp.int32) < M", ROUTINGS),
    "mask: fwd multiplies past K": (
        "fwd_pallas.py", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K)", "k * bk + jnp.arange(bk, dtype=jnp.int32) < K + 1)", ROUTINGS),
    "mask: rows outside the groups are multiplied": (
        "fwd_pallas.py", "inside = group < G", "inside = group <= G", ROUTINGS),
    "index: every group takes the first matrix": (
        "fwd_pallas.py", "jnp.clip(group, 0, G - 1)", "jnp.clip(group, 0, 0)", ROUTINGS),
    "index: tile columns": (
        "tiling.py", "return first + inside % height, inside // height", "return first + inside % panel, inside // panel", ROUTINGS),
    "index: wgrad's groups keep their order": (
        "schedule_pallas.py", "(h[None, :] < g[:, None])", "(h[None, :] <= g[:, None])", ROUTINGS),
    "offset: a tile's first row": (
        "tiling.py", "(t[:, None] - first[None, :]) * bm)", "(t[:, None] - first[None, :]) * (bm - 1))", ROUTINGS),
    "offset: runs start a group late": (
        "tiling.py", "offsets_at(jnp.clip(r - 1, 0, G))", "offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: the run behind the groups is forgotten": (
        "tiling.py", "hi = jnp.where(r <= G, offsets_at(jnp.clip(r, 0, G)), M)", "hi = offsets_at(jnp.clip(r, 0, G))", ROUTINGS),
    "offset: one tile too few": (
        "tiling.py", "return -(-M // bm) + G + 1", "return -(-M // bm)", PATTERNS),
}
# fmt: on


def survives(file: str, old: str, new: str, tests: str) -> bool:
    path = OP / file
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
