"""Tables and bars from the rows of the benchmarks: `python -m benchmarks.harness.report [FOLDER ...]`.

By default every folder of benchmarks/results. Of a case that was measured more than once, the newest row counts.
"""

import json
import math
import pathlib
from collections.abc import Iterable

import typer

from benchmarks.harness import ROOT
from benchmarks.harness.traces import draw_trace

PEERS = (
    "xla",
    "jaxops_xla",
    "xla_bf16",
    "jaxops_bf16",
    "cublas",
    "cublaslt",
    "ragged_dot",
    "masked_loop",
    "tokamax_mosaic",
    "tokamax_triton",
    "torch_grouped_mm",
    "torch_compile",
    "gemm",
    "alone",
    "xla_own_rows",
    "mosaic_example",
    "torch_symmetric",
    "torch_nccl",
)
_CASE = ("op", "pass", "name", "dtype", "dist", "recipe")
_VARIANT = ("scaling", "layouts", "cast", "mesh", "options")  # entries that distinguish rows of some ops, if texts


def read_rows(folder: pathlib.Path) -> list[dict]:
    """The newest row of each case and backend, in the order in which the cases were first measured."""
    newest = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            if line.strip() and "us_p50" in (row := json.loads(line)):  # tables of errors have no times
                recipe = (
                    row.get("recipe") if is_own(row) else None
                )  # of a peer, recipe says how it was called this time
                case = (
                    *(row[key] for key in _CASE[:-1]),
                    recipe,
                    *_texts(row, _VARIANT),
                    json.dumps(row["shape"], sort_keys=True),
                )
                newest[case, row["backend"]] = row
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


def series(row: dict) -> str:
    """What has its own colour in a picture: a backend, for jaxops with its recipe."""
    return " ".join([row["backend"], *filter(None, [row.get("recipe") if is_own(row) else None, row.get("cast")])])


def case_name(row: dict) -> tuple[str, ...]:
    return (row["name"], *filter(None, (row["dist"], *_texts(row, ("scaling", "layouts", "mesh")))))


def speed(row: dict) -> str:
    return (
        f"{row['tflops']:,.4g} TFLOP/s"
        if row.get("tflops") is not None
        else f"{row['gbps']:,.0f} GB/s"
        if row.get("gbps") is not None
        else "-"
    )


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
            what = [
                " ".join(filter(None, (row["name"], row.get("recipe"), *variant(row)))),
                row["dist"],
                row["dtype"],
                row["backend"],
            ]
            times = [f"{row['us_p50']:,.1f} ({row['us_p20']:,.1f} to {row['us_p80']:,.1f})", speed(row), of_ceiling]
            if floors:
                times.append(f"{100 * row['of_floor']:.0f} %" if "of_floor" in row else "-")
            table.append([*what, *times, *(f"{row['vs'][peer]:.2f}" if peer in row["vs"] else "-" for peer in peers)])
        head = [
            "workload",
            "rows",
            "dtype",
            "backend",
            "us (p20 to p80)",
            "speed",
            "of ceiling",
            *(["of floor"] * floors),
            *(f"vs {peer}" for peer in peers),
        ]
        parts += [f"## {op}, {pass_name}", _table(head, table)]
    if worst := worst_ratios(own):
        parts += [
            "## Against each peer (above 1: jaxops is faster)",
            _table(["op", "pass", "peer", "worst", "where", "geometric mean", "cases"], worst),
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
        table.append([*case, f"{worst:.2f}", where, f"{mean:.2f}", str(len(ratios))])
    return table


def plot(rows: list[dict], folder: pathlib.Path) -> list[pathlib.Path]:
    """One picture an op: a panel a pass, a cluster of bars a case, a bar a backend.

    Needs matplotlib (extra `bench`).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = []
    drawn = [
        row
        for row in rows
        if row["op"] not in ("copy", "matmul") and (row.get("tflops") is not None or row.get("gbps") is not None)
    ]
    for op in dict.fromkeys(row["op"] for row in drawn):
        mine = [row for row in drawn if row["op"] == op]
        passes = list(dict.fromkeys(row["pass"] for row in mine))
        backends = list(dict.fromkeys(series(row) for row in mine))
        cases = list(dict.fromkeys(case_name(row) for row in mine))
        figure, axes = plt.subplots(
            len(passes),
            1,
            figsize=(max(6, 1.1 * len(cases)), 3.2 * len(passes)),
            squeeze=False,
            sharex=True,
            layout="constrained",
        )
        for axis, pass_name in zip(axes[:, 0], passes, strict=True):
            for i, backend in enumerate(backends):
                of_backend = [row for row in mine if (row["pass"], series(row)) == (pass_name, backend)]
                x = [
                    cases.index(case_name(row)) + (i - (len(backends) - 1) / 2) * 0.85 / len(backends)
                    for row in of_backend
                ]
                axis.bar(
                    x,
                    [row.get("tflops") or row.get("gbps") for row in of_backend],
                    0.85 / len(backends),
                    label=backend,
                    color=f"C{i}",
                )
            axis.set_ylabel(f"{pass_name}, {'TFLOP/s' if any(row.get('tflops') for row in mine) else 'GB/s'}")
            axis.grid(axis="y", alpha=0.3)
        axes[-1, 0].set_xticks(range(len(cases)), ["\n".join(case) for case in cases], fontsize=7)
        axes[0, 0].legend(fontsize=7, ncols=len(backends), loc="lower left", bbox_to_anchor=(0, 1))
        files.append(folder / f"{op}.png")
        figure.savefig(files[-1], dpi=130)
        plt.close(figure)
    return files


def main(
    folders: list[str] | None = typer.Argument(  # noqa: B008
        None, help="Folders of rows; every folder of benchmarks/results by default."
    ),
    plots: bool = typer.Option(True, help="Draw <folder>/<op>.png too, and a picture of each trace."),
) -> None:
    """Prints markdown."""
    results = ROOT / "benchmarks" / "results"
    for folder in [pathlib.Path(name) for name in folders or []] or sorted(
        path for path in results.glob("*") if path.is_dir()
    ):
        rows = read_rows(folder)
        print(f"# {folder.name}\n\n{markdown(rows)}")
        if plots and rows:
            for file in [*plot(rows, folder), *map(draw_trace, sorted(folder.glob("*.trace.json.gz")))]:
                print(f"![{file.stem}]({file})\n")


def _dims(row: dict) -> str:
    return ", ".join(f"{key} {size:,}" for key, size in row["shape"].items())


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


if __name__ == "__main__":
    typer.run(main)
