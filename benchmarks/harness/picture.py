"""The pictures of README.md and docs/speed.md, from the measured rows: `python -m benchmarks.harness.picture` writes
docs/pictures/*.svg, and a picture beside each trace of a step (*.trace.json.gz).

Needs matplotlib (extra `bench`). A cluster's bars of jaxops are of one run, the newest that measured all of them. Its
peers are of the same run, or of the newest that measured them.
"""

import json
import math
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.harness import ROOT
from benchmarks.harness.traces import draw_trace

RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "pictures"
CUDNN = "9.19"  # of the machines that measured; rows before 2026-11-28 do not say it
PEERS, OWN = ("#b8bec7", "#7d8793"), ("#3b7ddd", "#1b3f7a", "#7aa7e8")  # greys, blues

Match = dict[str, Any]  # entries of a row; "shape.B" is B of its shape


class Panel(NamedTuple):
    """Bars of one benchmark: a cluster a case, a bar a series.

    Attributes:
      file: of RESULTS, without .jsonl.
      select, cases, series: what all rows, those of a cluster, and those of a bar have. Series of jaxops begin so.
      value: the row's entry that is drawn.
    """

    title: str
    unit: str
    file: str
    select: Match
    cases: dict[str, Match]
    series: dict[str, Match]
    value: str


def names(**labels: str) -> dict[str, Match]:
    return {label: {"name": name} for name, label in labels.items()}


def backends(**labels: str) -> dict[str, Match]:
    return {label: {"backend": backend} for backend, label in labels.items()}


GROUPED_CASES = names(mixtral_up="Mixtral", dsmoe16b="DeepSeekMoE", qwen3_30b="Qwen3-30B", dsv3="DeepSeek-V3")
GROUPED_SIDES = backends(torch_grouped_mm="torch._grouped_mm", triton="jaxops")
GROUPED = Panel(
    "Grouped matmul, forward, uneven groups", "TFLOP/s", "nvidia_h200/grouped_matmul",
    {"op": "grouped_matmul", "pass": "fwd", "dist": "skewed"}, GROUPED_CASES, GROUPED_SIDES, "tflops",
)  # fmt: skip
MOE = Panel(
    "MoE layer, forward and backward", "TFLOP/s", "nvidia_h200/moe", {"op": "moe", "pass": "fwd+bwd", "dist": "router"},
    names(
        qwen3_30b_t4096="Qwen3-30B, 4k tokens",
        qwen3_30b_t32768="Qwen3-30B, 32k tokens",
        mixtral_t16384="Mixtral, 16k tokens",
    ),
    backends(tokamax_triton="tokamax + XLA", jaxops="jaxops"), "tflops",
)  # fmt: skip
ADALN = Panel(
    "AdaLN, forward and backward, packed sequences", "GB/s", "nvidia_h200/adaln",
    {"op": "adaln", "pass": "fwd+bwd", "dist": "unequal"},
    names(t65536_d1024="D = 1024", t65536_d3072="D = 3072", t65536_d4096="D = 4096"),
    backends(xla="XLA", torch_compile="torch.compile", pallas="jaxops"), "gbps",
)  # fmt: skip
STEP = Panel(
    "Whole training step, 1 GPU", "tokens/s", "nvidia_h200/train_step", {"op": "train_step"},
    names(moe_3b="MoE, 3.1B parameters", dit_1b="DiT, 1.0B parameters"),
    backends(xla="XLA", jaxops="jaxops", jaxops_fp8_tensorwise="jaxops, FP8"), "tokens_per_s",
)  # fmt: skip
GATED = {"op": "gated_residual_adaln"}
RECIPES = ("tensorwise", "blockwise")
MASKS = {"whole": "whole", "causal": "causal", "text_and_images": "text and images"}
PICTURES: dict[str, tuple[Panel, ...]] = {
    "gain": (GROUPED, MOE, ADALN, STEP),
    "grouped_matmul": (
        GROUPED,
        GROUPED._replace(title="Weight gradient, uneven groups", select=GROUPED.select | {"pass": "wgrad"}),
    ),
    "moe": (MOE._replace(title="MoE layer, forward", select=MOE.select | {"pass": "fwd"}), MOE),
    "adaln": (ADALN, ADALN._replace(title="The same after a gated residual", select=ADALN.select | GATED)),
    "packed_attention": (
        Panel(
            "Attention, forward and backward, 16 sequences", "TFLOP/s", "nvidia_h200/packed_attention",
            {"name": "t16384_32x128_kv8", "pass": "fwd+bwd", "dist": "unequal"},
            {label: {"mask": mask} for mask, label in MASKS.items()},
            backends(cudnn_padded="padded blocks, cuDNN", jaxops="jaxops"), "tflops",
        ),
    ),
    "products_across_devices": tuple(
        Panel(
            f"{op}, 2 GPUs", "us", "nvidia_h200_x2/collective_matmul", {"op": op, "dist": ""},
            names(
                m2048_k4096_n8192="2048, 4096, 8192",
                m4096_k4096_n14336="4096, 4096, 14336",
                m16384_k2880_n5760="16384, 2880, 5760",
            ),
            backends(xla="XLA", torch_symmetric="torch, symmetric", jaxops="jaxops"), "us_p50",
        )
        for op in ("all_gather_matmul", "matmul_reduce_scatter")
    ),
    "several_cards": tuple(
        Panel(
            f"MoE step, {devices} GPUs", "of as many single ones", f"nvidia_h200_x{devices}/train_step",
            {"name": "moe_3b", "options": "default"},
            {axis: {"mesh": f"{axis}={devices}"} for axis in ("data", "fsdp", "expert", "tensor")},
            backends(jaxops="jaxops"), "scaling",
        )
        for devices in (2, 4)
    ),
    "fp8": (
        Panel(
            "FP8 linear layer, forward and backward, all casts", "TFLOP/s", "nvidia_h200/fp8_matmul",
            {"pass": "fwd+bwd"},
            names(
                m8192_k4096_n4096="8192, 4096, 4096",
                m8192_k8192_n8192="8192, 8192, 8192",
                m16384_k4096_n16384="16384, 4096, 16384",
            ),
            backends(xla_bf16="bfloat16, cuBLAS")
            | {f"jaxops, {recipe}": {"backend": "triton", "recipe": recipe} for recipe in RECIPES},
            "tflops",
        ),
    ),
    "training_steps": (STEP,),
    "offload": tuple(
        Panel(
            f"{title}, 6.9B parameters, 1 GPU", "tokens/s", "nvidia_h200/offload", {"name": name},
            {"": {}},
            {
                f"{kept} rows, kept": {"backend": "keep", "dist": f"{kept} rows"},
                "10 rows, recomputed": {"backend": "recompute", "dist": "10 rows"},
                "jaxops: 10 rows, offloaded": {"backend": "offload", "dist": "10 rows"},
            },
            "tokens_per_s",
        )
        for title, name, kept in (("Decoder", "decoder_7b", 4), ("DiT", "dit_7b", 3))
    ),
    "decode": (
        Panel(
            "Decode step, Qwen3-30B-A3B", "of the memory's limit", "nvidia_h200/decode", {"op": "decode"},
            {f"{rows} rows": {"shape.B": rows} for rows in (1, 256)},
            backends(jaxops="jaxops, bfloat16", jaxops_fp8_blockwise="jaxops, FP8 weights"), "of_ceiling",
        ),
    ),
    "one_h100": tuple(
        GROUPED._replace(
            title=f"Grouped matmul, H100, {name}", file="nvidia_h100_80gb_hbm3/grouped_matmul",
            select=GROUPED.select | {"pass": name, "dist": "balanced"},
        )
        for name in ("fwd", "wgrad")
    ),
}  # fmt: skip


def matches(row: dict, match: Match) -> bool:
    return all((row["shape"] if "." in key else row).get(key.split(".")[-1]) == value for key, value in match.items())


def newest_rows(rows: list[dict], series: dict[str, Match]) -> dict[str, dict]:
    """A row of each series: jaxops' of the last run (commit) with all of them, a peer's of that run or its newest."""
    own = {label for label in series if label.startswith("jaxops")}
    runs: dict[str, dict[str, dict]] = {}
    newest: dict[str, dict] = {}
    for row in rows:
        for label in (label for label, match in series.items() if matches(row, match)):
            runs.setdefault(row["commit"].rstrip("+"), {})[label] = newest[label] = row
    complete = [run for run in runs.values() if own <= set(run)]
    if not complete or not set(series) <= set(newest):
        raise ValueError(f"no run measured all of {sorted(series)}; runs: {list(runs)}")
    return newest | complete[-1]


def drawn_rows(panel: Panel, folder: pathlib.Path = RESULTS) -> dict[str, list[dict]]:
    """For each series its row in each case."""
    rows = [json.loads(line) for line in (folder / f"{panel.file}.jsonl").read_bytes().splitlines() if line.strip()]
    rows = [row for row in rows if "us_p50" in row and matches(row, {"dtype": "bfloat16"} | panel.select)]
    chosen = [newest_rows([row for row in rows if matches(row, case)], panel.series) for case in panel.cases.values()]
    return {label: [of_case[label] for of_case in chosen] for label in panel.series}


def versions(rows: Iterable[dict]) -> str:
    """Of the card, the libraries and the days that measured the rows."""
    rows = list(rows)
    device, jax, triton = (", ".join(sorted({row[key] for row in rows})) for key in ("device", "jax", "triton"))
    dates = sorted(row["date"] for row in rows)
    return f"{device}, JAX {jax}, cuDNN {CUDNN}, Triton {triton}; measured from {dates[0]} to {dates[-1]}"


def draw(name: str, folder: pathlib.Path = FOLDER) -> pathlib.Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = PICTURES[name]
    every = [drawn_rows(panel) for panel in panels]
    grid = (2, 2) if len(panels) == 4 else (1, len(panels))
    # The same rows give the same bytes. A white ground: GitHub and the site show the picture in dark mode, too.
    style: dict[Any, Any] = {
        "svg.hashsalt": "jaxops",
        "svg.fonttype": "none",
        "font.size": 9,
        "font.family": "sans-serif",
    }
    style |= {"text.color": "#24292f", "axes.edgecolor": "#57606a"}
    with rc_context(style):
        figure = Figure(figsize=(5 * grid[1] if grid[1] > 1 else 7, 3 * grid[0]), facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.06)
        for axis, panel, rows in zip(figure.subplots(*grid, squeeze=False).flat, panels, every, strict=True):
            _bars(axis, panel, rows)
        shown = [row for rows in every for of_series in rows.values() for row in of_series]
        figure.supxlabel(versions(shown), fontsize=7, color="#57606a")
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    return folder / f"{name}.svg"


def _bars(axis: Any, panel: Panel, rows: dict[str, list[dict]]) -> None:
    own = [label for label in rows if label.startswith("jaxops")]
    peers = [label for label in rows if label not in own]
    colors = dict(zip(peers, PEERS[2 - len(peers) :], strict=True)) | dict(zip(own, OWN, strict=False))
    width = 0.8 / len(rows)
    for i, (label, of_series) in enumerate(rows.items()):
        places = [case + (i - (len(rows) - 1) / 2) * width for case in range(len(of_series))]
        heights = [row[panel.value] for row in of_series]
        bars = axis.bar(places, heights, 0.94 * width, label=label, color=colors[label])
        digits = 2 if max(heights) < 10 else 0
        axis.bar_label(bars, fmt=f"{{:,.{digits}f}}", fontsize=8, padding=1)
        assert all(math.isfinite(height) and height > 0 for height in heights)
    axis.set_title(f"{panel.title} ({panel.unit})", loc="left", fontweight="bold", fontsize=10)
    axis.set_xticks(range(len(panel.cases)), list(panel.cases))
    axis.tick_params(length=0)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.margins(y=0.4)
    columns = 3 if len("".join(rows)) < 40 else 2
    axis.legend(frameon=False, fontsize=8, ncols=columns, loc="upper left", borderaxespad=0.1)


if __name__ == "__main__":
    for each in PICTURES:
        print(draw(each))
    for trace in sorted(RESULTS.glob("*/*.trace.json.gz")):
        print(draw_trace(trace))
