"""The README's picture, from the measured rows: `python -m benchmarks.picture` writes docs/pictures/gain.svg.

Needs matplotlib (extra `bench`). Each cluster of bars is one run: the newest that measured all its backends.
"""

import json
import pathlib
from typing import NamedTuple

from benchmarks.harness import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "nvidia_h200"
PICTURE = ROOT / "docs" / "pictures" / "gain.svg"
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


def newest_run(rows: list[dict], backends: set[str]) -> dict[str, dict]:
    """The rows of the last run (commit) that measured all backends, so that every cluster of bars is one run."""
    runs: dict[str, dict[str, dict]] = {}
    for row in rows:
        runs.setdefault(row["commit"], {})[row["backend"]] = row
    complete = [run for run in runs.values() if backends <= set(run)]
    if not complete:
        raise ValueError(f"no run measured all of {sorted(backends)}; runs: {list(runs)}")
    return complete[-1]


def values(panel: Panel, folder: pathlib.Path = RESULTS) -> dict[str, list[float]]:
    """For each backend its value in each case."""
    rows = [json.loads(line) for line in (folder / f"{panel.file}.jsonl").read_bytes().splitlines() if line.strip()]
    drawn: dict[str, list[float]] = {backend: [] for backend in panel.backends}
    for name in panel.cases:
        wanted = {**panel.select, "name": name, "dtype": "bfloat16"}
        found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        run = newest_run(found, set(panel.backends))
        for backend in panel.backends:
            drawn[backend].append(run[backend][panel.value])
    return drawn


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
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        drawn = values(panel)
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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
    print(PICTURE)
