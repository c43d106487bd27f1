"""The README's picture, from the measured rows: `python -m benchmarks.harness.picture` writes docs/pictures/gain.svg.

Needs matplotlib (extra `bench`). A cluster's bars of jaxops are of one run, the newest that measured all of them. Its
peers are of the same run, or of the newest that measured them.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "nvidia_h200"
PICTURE = ROOT / "docs" / "pictures" / "gain.svg"
CUDNN = "9.19"  # of the machines that measured; rows before 2026-11-28 do not say it
OWN = ("jaxops", "triton", "pallas")  # how jaxops' backends begin
COLORS = ("#b8bec7", "#7d8793", "#3b7ddd", "#1b3f7a")  # peers in greys, jaxops in blues


class Panel(NamedTuple):
    """Bars of one benchmark: a cluster a case, a bar a backend."""

    title: str
    unit: str
    file: str
    select: dict[str, str]  # what all rows of the panel have
    cases: dict[str, str]  # name of the workload: label
    backends: dict[str, str]  # backend: label; jaxops' last
    value: str  # the row's entry that is drawn


PANELS = (
    Panel(
        "Grouped matmul, forward, uneven groups",
        "TFLOP/s",
        "grouped_matmul",
        {"op": "grouped_matmul", "pass": "fwd", "dist": "skewed"},
        {"mixtral_up": "Mixtral", "dsmoe16b": "DeepSeekMoE", "qwen3_30b": "Qwen3-30B", "dsv3": "DeepSeek-V3"},
        {"torch_grouped_mm": "torch._grouped_mm", "triton": "jaxops"},
        "tflops",
    ),
    Panel(
        "MoE layer, forward and backward",
        "TFLOP/s",
        "moe",
        {"op": "moe", "pass": "fwd+bwd", "dist": "router"},
        {
            "qwen3_30b_t4096": "Qwen3-30B, 4k tokens",
            "qwen3_30b_t32768": "Qwen3-30B, 32k tokens",
            "mixtral_t16384": "Mixtral, 16k tokens",
        },
        {"tokamax_triton": "tokamax + XLA", "jaxops": "jaxops"},
        "tflops",
    ),
    Panel(
        "AdaLN, forward and backward, packed sequences",
        "GB/s",
        "adaln",
        {"op": "adaln", "pass": "fwd+bwd", "dist": "unequal"},
        {"t65536_d1024": "D = 1024", "t65536_d3072": "D = 3072", "t65536_d4096": "D = 4096"},
        {"xla": "XLA", "torch_compile": "torch.compile", "pallas": "jaxops"},
        "gbps",
    ),
    Panel(
        "Whole training step, 1 GPU",
        "thousand tokens/s",
        "train_step",
        {"op": "train_step", "pass": "step"},
        {"moe_3b": "MoE, 3.1B parameters", "dit_1b": "DiT, 1.0B parameters"},
        {"xla": "XLA", "jaxops": "jaxops", "jaxops_fp8_tensorwise": "jaxops, FP8"},
        "tokens_per_s",
    ),
)


def newest_rows(rows: list[dict], backends: Iterable[str]) -> dict[str, dict]:
    """A row of each backend: jaxops' of the last run (commit) with all of them, a peer's of that run or its newest."""
    own = {backend for backend in backends if backend.startswith(OWN)}
    runs: dict[str, dict[str, dict]] = {}
    newest: dict[str, dict] = {}
    for row in rows:
        runs.setdefault(row["commit"], {})[row["backend"]] = newest[row["backend"]] = row
    complete = [run for run in runs.values() if own <= set(run)]
    if not complete or not set(backends) <= set(newest):
        raise ValueError(f"no run measured all of {sorted(backends)}; runs: {list(runs)}")
    return {backend: (newest | complete[-1])[backend] for backend in backends}


def drawn_rows(panel: Panel, folder: pathlib.Path = RESULTS) -> dict[str, list[dict]]:
    """For each backend its row in each case."""
    rows = [json.loads(line) for line in (folder / f"{panel.file}.jsonl").read_bytes().splitlines() if line.strip()]
    drawn: dict[str, list[dict]] = {backend: [] for backend in panel.backends}
    for name in panel.cases:
        wanted = {**panel.select, "name": name, "dtype": "bfloat16"}
        of_case = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        for backend, row in newest_rows(of_case, panel.backends).items():
            drawn[backend].append(row)
    return drawn


def versions(rows: Iterable[dict]) -> str:
    """Of the libraries and the days that measured the rows."""
    rows = list(rows)
    jax, triton = (", ".join(sorted({row[key] for row in rows})) for key in ("jax", "triton"))
    dates = sorted(row["date"] for row in rows)
    return f"NVIDIA H200, JAX {jax}, cuDNN {CUDNN}, Triton {triton}; measured from {dates[0]} to {dates[-1]}"


def draw(file: pathlib.Path = PICTURE) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same rows give the same bytes. A white ground: GitHub and the site show the picture in dark mode, too.
    plt.rcParams.update(
        {"svg.hashsalt": "jaxops", "font.size": 9, "text.color": "#24292f", "axes.edgecolor": "#57606a"}
    )
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.06)
    every = [drawn_rows(panel) for panel in PANELS]
    for axis, panel, rows in zip(axes.flat, PANELS, every, strict=True):
        drawn = {backend: [row[panel.value] for row in of_backend] for backend, of_backend in rows.items()}
        colors = COLORS[3 - len(drawn) : 3] if panel.file != "train_step" else COLORS[1:]
        width = 0.8 / len(drawn)
        thousand = 1000 if panel.value == "tokens_per_s" else 1
        for i, (backend, heights) in enumerate(drawn.items()):
            places = [case + (i - (len(drawn) - 1) / 2) * width for case in range(len(heights))]
            bars = axis.bar(
                places,
                [height / thousand for height in heights],
                0.94 * width,
                label=panel.backends[backend],
                color=colors[i],
            )
            axis.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=1)
        axis.set_title(f"{panel.title} ({panel.unit})", loc="left", fontweight="bold", fontsize=10)
        axis.set_xticks(range(len(panel.cases)), list(panel.cases.values()))
        axis.tick_params(length=0)
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.margins(y=0.3)
        axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper left", borderaxespad=0.1)
    shown = [row for rows in every for of_backend in rows.values() for row in of_backend]
    figure.supxlabel(versions(shown), fontsize=8, color="#57606a")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
    print(PICTURE)
