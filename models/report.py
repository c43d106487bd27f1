"""Pictures of a training run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw


@dataclasses.dataclass
class History:
    """What a run has read from the device so far.

    Attributes:
      metrics: of each step; each has at least `loss`.
      heldout: (steps done, held-out loss).
    """

    metrics: list[Any] = dataclasses.field(default_factory=list)
    heldout: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def loss(self) -> list[float]:
        return [float(metrics.loss) for metrics in self.metrics]


def plot_loss(history: History, unit: str, path: Path, baseline: tuple[str, float] | None = None) -> None:
    """The loss of every step's batch and of the held-out data; a baseline is a dashed line with a name."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(history.metrics) + 1), history.loss, color="tab:blue", alpha=0.4, label="training batch")
    axes.plot(*zip(*history.heldout, strict=True), color="tab:orange", marker="o", label="held-out")
    if baseline is not None:
        name, value = baseline
        axes.axhline(value, color="tab:gray", linestyle="--", label=f"{name} ({value:.2f})")
    axes.set(xlabel="step", ylabel=unit, ylim=(0, None), title="Loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_precisions(rows: list[dict], baseline: str, path: Path) -> None:
    """A column a model: the newest loss curve in every precision, and below them how far each lies from the baseline that was trained beside it.

    Args:
      rows: of `models.compare_precision`, oldest first.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(7 * len(models), 7), layout="constrained")
    for (above, below), model in zip(figure.subplots(2, len(models), squeeze=False, sharex="col").T, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        # Two runs of one program are not compared, XLA may have chosen other algorithms for it: a run begins with its baseline.
        drawn, beside = {}, None
        for row in mine:
            precision, seed, curve = row["precision"], row["seed"], np.array(row["curve"])
            if (precision, seed) == (baseline, 0):
                beside = curve
            if seed == 0 or (precision, seed) == (baseline, 1):
                drawn[precision, seed] = curve, row["steps"], beside
        for (precision, seed), (curve, steps, wanted) in drawn.items():
            middles = (np.arange(len(curve)) + 0.5) * steps / len(curve)
            line = {"color": "black", "linestyle": "-" if seed == 0 else ":"} if precision == baseline else {"linewidth": 1}
            above.plot(middles, curve, label=precision if seed == 0 else f"{precision}, other parameters", **line)
            if wanted is not None and len(curve) == len(wanted):
                below.plot(middles, 100 * (curve / wanted - 1), **line)
        above.set(title=model, ylabel="training loss", yscale="log")
        below.set(xlabel="step", ylabel=f"% from {baseline}", ylim=(-3, 3))
        below.grid(alpha=0.3)
        above.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def plot_expert_load(load: np.ndarray, path: Path) -> None:
    """A heat map for each layer, experts over steps, of each expert's share [steps, layers, experts]; 1 is a fair one."""
    load = load * load.shape[-1]
    steps, layers, experts = load.shape
    figure = Figure(figsize=(8, 1 + 1.6 * layers), layout="constrained")
    rows = figure.subplots(layers, squeeze=False)[:, 0]
    style = {"aspect": "auto", "interpolation": "nearest", "cmap": "coolwarm", "vmin": 0, "vmax": 2, "extent": (0.5, steps + 0.5, experts - 0.5, -0.5)}
    images = [axes.imshow(load[:, layer].T, **style) for layer, axes in enumerate(rows)]
    for layer, axes in enumerate(rows):
        axes.set(ylabel=f"layer {layer}\nexpert")
        axes.locator_params(axis="y", integer=True)
    rows[-1].set(xlabel="step")
    figure.colorbar(images[0], ax=list(rows), label="load (1 = fair share)", extend="max")
    figure.savefig(path, dpi=120)


def draw_grid(images: list[list[np.ndarray]], names: Sequence[str], path: Path, zoom: int = 6) -> None:
    """Rows of uint8 [height, width, channels] images, each in the middle of its column; the names stand over the columns."""
    gap, heading = 2 * zoom, 16
    column_width = zoom * max(image.shape[1] for row in images for image in row) + gap
    row_heights = [zoom * max(image.shape[0] for image in row) + gap for row in images]
    canvas = Image.new("RGB", (column_width * len(names), heading + sum(row_heights)), "dimgray")
    draw = ImageDraw.Draw(canvas)
    for column, name in enumerate(names):
        middle, top = column_width * column + column_width // 2, heading
        draw.text((middle, heading // 2), name, fill="white", anchor="mm")
        for row, row_height in zip(images, row_heights, strict=True):
            height, width = (zoom * side for side in row[column].shape[:2])
            # Pillow knows a gray image only without a channel axis.
            pixels = Image.fromarray(row[column].squeeze(2) if row[column].shape[2] == 1 else row[column])
            canvas.paste(pixels.resize((width, height), Image.Resampling.NEAREST), (middle - width // 2, top + (row_height - height) // 2))
            top += row_height
    canvas.save(path)
