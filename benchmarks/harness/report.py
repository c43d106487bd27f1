"""Tables from the rows of the benchmarks: `python -m benchmarks.harness.report [FOLDER ...]`.

By default every folder of benchmarks/results. Of a case that was measured more than once, the newest row counts.
"""

import json
import math
import pathlib
from collections.abc import Iterable

import typer

from benchmarks.harness import ROOT

PEERS = (
    *("xla", "jaxops_xla", "xla_bf16", "jaxops_bf16", "cublas", "cublaslt", "ragged_dot", "masked_loop", "tuned"),
    *("tokamax_mosaic", "tokamax_triton", "torch_grouped_mm", "torch_compile", "gemm", "alone", "xla_own_rows"),
    *("mosaic_example", "torch_symmetric", "torch_nccl", "torch_loss", "chunks"),
)
_LIMITS = (1.0, 0.97, 0.952, 0.909)  # of ratios: the last two are 1.05 and 1.1 times the peer's time
_CASE = ("op", "pass", "name", "dtype", "dist", "recipe")
_VARIANT = ("scaling", "layouts", "cast", "mesh", "options")  # entries that distinguish rows of some ops, if texts


def read_rows(folder: pathlib.Path) -> list[dict]:
    """The newest row of each case and backend, in the order in which the cases were first measured."""
    newest = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            if line.strip() and "us_p50" in (row := json.loads(line)):  # tables of errors have no times
                recipe = row.get("recipe") if is_own(row) else None  # a peer's says how it was called this time
                named = (*(row[key] for key in _CASE[:-1]), recipe, *_texts(row, _VARIANT))
                newest[named, json.dumps(row["shape"], sort_keys=True), row["backend"]] = row
    return list(newest.values())


def is_own(row: dict) -> bool:
    """Whether a row is jaxops': it is compared with peers, or no peer has its backend's name."""
    return bool(row["vs"]) or (row["backend"] not in PEERS and row["op"] not in ("copy", "matmul"))


def _texts(row: dict, keys: Iterable[str]) -> list[str | None]:
    """`scaling` of a step over several devices is a number, and distinguishes nothing."""
    return [value if isinstance(value := row.get(key), str) else None for key in keys]


def variant(row: dict) -> list[str]:
    """Marks the cast, before or inside the product, that the plan chooses."""
    chosen = ["(chosen)"] if row.get("chosen") else []
    return list(filter(None, _texts(row, _VARIANT))) + chosen


def speed(row: dict) -> str:
    if row.get("tflops") is not None:
        return f"{row['tflops']:,.4g} TFLOP/s"
    return f"{row['gbps']:,.0f} GB/s" if row.get("gbps") is not None else "-"


def markdown(rows: list[dict]) -> str:
    """Where and with what; each op and pass with one line a case; the worst ratio against each peer."""
    if not rows:
        return "No rows.\n"
    parts = [
        "; ".join(
            f"{key} {', '.join(sorted({str(row[key]) for row in rows}))}"
            for key in ("device", "driver", "jax", "triton", "commit", "date")
        )
    ]
    ceilings = [row for row in rows if row["op"] in ("copy", "matmul")]
    if ceilings:
        table = [
            [row["op"], _dims(row), row["dtype"], row["backend"], f"{row['us_p50']:,.1f}", speed(row)]
            for row in ceilings
        ]
        parts += ["## Ceilings", _table(["op", "shape", "dtype", "by", "us", "speed"], table)]
    own = [row for row in rows if is_own(row)]
    for op, pass_name in dict.fromkeys((row["op"], row["pass"]) for row in own):
        mine = [row for row in own if (row["op"], row["pass"]) == (op, pass_name)]
        peers = list(dict.fromkeys(peer for row in mine for peer in row["vs"]))
        floors = any("of_floor" in row for row in mine)
        table = []
        for row in mine:
            of_ceiling = "-" if row["of_ceiling"] is None else f"{100 * row['of_ceiling']:.0f} %"
            name = " ".join(filter(None, (row["name"], row.get("recipe"), *variant(row))))
            what = [name, row["dist"], row["dtype"], row["backend"]]
            times = [f"{row['us_p50']:,.1f} ({row['us_p20']:,.1f} to {row['us_p80']:,.1f})", speed(row), of_ceiling]
            if floors:
                times.append(f"{100 * row['of_floor']:.0f} %" if "of_floor" in row else "-")
            table.append([*what, *times, *(f"{row['vs'][peer]:.2f}" if peer in row["vs"] else "-" for peer in peers)])
        head = ["workload", "rows", "dtype", "backend", "us (p20 to p80)", "speed", "of ceiling"]
        head += ["of floor"] * floors + [f"vs {peer}" for peer in peers]
        parts += [f"## {op}, {pass_name}", _table(head, table)]
    if worst := worst_ratios(own):
        parts += [
            "## Against each peer (above 1: jaxops is faster)",
            _table(["op", "pass", "peer", "worst", "where", "geometric mean", "cases", f"below {_LIMITS}"], worst),
        ]
    return "\n\n".join(parts) + "\n"


def worst_ratios(own: Iterable[dict]) -> list[list[str]]:
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in own:
        for peer, ratio in row["vs"].items():
            found.setdefault((row["op"], row["pass"], peer), []).append((ratio, f"{row['name']} {row['dist']}"))
    table = []
    for case, ratios in found.items():
        worst, where = min(ratios)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        below = [sum(ratio < limit for ratio, _ in ratios) for limit in _LIMITS]
        table.append([*case, f"{worst:.3f}", where, f"{mean:.3f}", str(len(ratios)), ", ".join(map(str, below))])
    return table


def main(
    folders: list[str] | None = typer.Argument(  # noqa: B008
        None, help="Folders of rows; every folder of benchmarks/results by default."
    ),
) -> None:
    """Prints markdown."""
    results = ROOT / "benchmarks" / "results"
    for folder in map(pathlib.Path, folders or sorted(path for path in results.glob("*") if path.is_dir())):
        print(f"# {folder.name}\n\n{markdown(read_rows(folder))}")


def _dims(row: dict) -> str:
    return ", ".join(f"{key} {size:,}" for key, size in row["shape"].items())


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


if __name__ == "__main__":
    typer.run(main)
