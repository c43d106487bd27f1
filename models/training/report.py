"""A training run's output: metrics, as JSON lines and for TensorBoard, and pictures."""

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorboardX
from PIL import Image, ImageDraw, ImageOps

from models.training.terminal import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALWAYS = ("step", "loss", "tokens", "fill", "learning_rate", "gradient_norm")  # numbers in each line of metrics.jsonl


@dataclasses.dataclass
class History:
    """What a run has read from the device: rows of metrics.jsonl, and of the last steps the loads [layers, experts]."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    loads: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def loss(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """(steps done, held-out loss)."""
        return [(row["step"], row["heldout"]) for row in self.rows if "heldout" in row]

    @property
    def fill(self) -> float:
        """The mean over all steps."""
        return float(np.mean([row["fill"] for row in self.rows]))

    @property
    def last_heldout(self) -> float:
        """NaN before the first evaluation."""
        return self.heldout[-1][1] if self.heldout else math.nan


class MetricsLog:
    """Writes OUT/metrics.jsonl, a line a step, and TensorBoard event files to OUT/tensorboard. A context manager.

    A line has the step's number (from 1), the scalars of its `models.training.loop.Metrics`, tokens_per_s between two
    readings, and heldout after an evaluation; the first one of a process compile_s, the seconds until its step was
    compiled. null is a number that is not finite, which JSON does not have. Existing lines up to step `first`, the
    checkpoint that a run resumes from, are kept.

    One process of a run writes; the others only keep a history of the steps after `first`.
    """

    def __init__(self, out: Path, first: int, writes: bool = True, say: Callable[[str], None] = print):
        out.mkdir(parents=True, exist_ok=True)
        file = out / "metrics.jsonl"
        rows = _rows(file, first) if writes and first else []
        if writes and len(rows) < first:
            say(
                f"{file} lacks {first - len(rows)} of the {first} steps before this one, or they cannot be read: its "
                "curves have a gap."
            )
        self.history = History(rows)
        self._lines = (file if writes else Path(os.devnull)).open("w", encoding="utf-8")
        self._lines.writelines(map(_line, self.history.rows))
        self._events = tensorboardX.SummaryWriter(
            str(out.absolute() / "tensorboard"),  # of a relative path it takes what is before ":" as a protocol
            purge_step=first + 1,
            write_to_disk=writes,
        )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._events.close()

    def add(
        self, done: int, read: Sequence[Any], tokens_per_s: float, heldout: float | None, compile_s: float | None = None
    ) -> None:
        """The metrics of the steps up to `done`; compile_s is the first one's."""
        for step, metrics in enumerate(read, done + 1 - len(read)):
            numbers = {name: x for name, x in metrics._asdict().items() if x is not None and np.ndim(x) == 0}
            row = {"step": step} | {name: np.asarray(x).item() for name, x in numbers.items()}
            row["tokens_per_s"] = round(tokens_per_s)
            if step == done and heldout is not None:
                row["heldout"] = heldout
            if compile_s is not None:
                row["compile_s"], compile_s = round(compile_s, 1), None
            self.history.rows.append(row)
            if metrics.load is not None:
                self.history.loads.append(metrics.load)
            self._lines.write(_line(row))
            for name, value in row.items():
                if name != "step" and math.isfinite(value):  # of others the library prints a warning
                    self._events.add_scalar(name, value, step)
        self._lines.flush()


def _line(row: dict[str, Any]) -> str:
    lost = {name: None for name, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
    return json.dumps(row | lost) + "\n"


def _rows(file: Path, last: int) -> list[dict[str, Any]]:
    """The readable rows up to step `last`, null as NaN; a killed process may have left half a line."""
    found = {}
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        row = {name: math.nan if x is None else x for name, x in row.items()} if isinstance(row, dict) else {}
        if all(isinstance(row.get(name), int | float) for name in ALWAYS) and row["step"] <= last:
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def plot_report(history: History, unit: str, path: Path, baseline: tuple[str, float] | None = None) -> None:
    """Over the steps losses, held-out losses, learning rate, gradient norm, and each layer's expert load."""
    from matplotlib.figure import Figure  # a second, which a run would pay at its start

    layers = history.loads[0].shape[0] if history.loads else 0
    heights = [4.0, 1.6, 1.6] + layers * [1.4]
    figure = Figure(figsize=(8, sum(heights) + 1), layout="constrained")
    loss, rate, norm, *loads = figure.subplots(len(heights), height_ratios=heights, sharex=True)
    steps = [row["step"] for row in history.rows]
    loss.plot(steps, history.loss, color="tab:blue", alpha=0.4, label="training batch")
    loss.plot(*zip(*history.heldout, strict=True), color="tab:orange", marker="o", label="held-out")
    if baseline is not None:
        name, value = baseline
        loss.axhline(value, color="tab:gray", linestyle="--", label=f"{name} ({value:.2f})")
    loss.set(ylabel=unit, ylim=(0, None), title="Loss")
    loss.legend()
    rate.plot(steps, [row["learning_rate"] for row in history.rows])
    rate.set(ylabel="learning rate")
    norm.plot(steps, [row["gradient_norm"] for row in history.rows])
    norm.set(ylabel="gradient norm", yscale="log")
    if loads:
        _plot_expert_load(loads, np.stack(history.loads), steps[-1])
    figure.get_axes()[len(heights) - 1].set(xlabel="step")
    figure.savefig(path, dpi=120)


def _plot_expert_load(rows: "list[Axes]", load: np.ndarray, last: int) -> None:
    """A heat map for each layer, experts over steps, of each expert's share [steps, layers, experts]; 1 is even."""
    steps, _, experts = load.shape
    extent = (last - steps + 0.5, last + 0.5, experts - 0.5, -0.5)
    style = {"aspect": "auto", "interpolation": "nearest", "cmap": "coolwarm", "vmin": 0, "vmax": 2, "extent": extent}
    images = [axes.imshow(load[:, layer].T * experts, **style) for layer, axes in enumerate(rows)]
    for layer, axes in enumerate(rows):
        axes.set(ylabel=f"layer {layer}\nexpert")
        axes.locator_params(axis="y", integer=True)
    figure = rows[0].get_figure()
    assert figure is not None
    figure.colorbar(images[0], ax=rows, label="load (1 = fair share)", extend="max")


def draw_captioned(
    sections: Sequence[tuple[str, Sequence[np.ndarray], Sequence[str]]], path: Path, columns: int = 10
) -> None:
    """Sections of a title, uint8 [height, width, channels] images in rows, and a text below each image."""
    cell, gap, line = 128, 8, 14
    longest = cell // 6  # of the default font
    canvases = []
    for title, images, texts in sections:
        rows = -(-len(images) // columns)
        wrapped = [textwrap.wrap(one_line(text), longest)[:3] or [""] for text in texts]
        high = cell + gap + line * max(map(len, wrapped))
        canvas = Image.new("RGB", (columns * (cell + gap) + gap, 2 * line + rows * (high + gap)), "white")
        draw = ImageDraw.Draw(canvas)
        draw.text((canvas.width // 2, line), title, fill="black", anchor="mm")
        for number, (image, lines) in enumerate(zip(images, wrapped, strict=True)):
            left, top = gap + number % columns * (cell + gap), 2 * line + number // columns * (high + gap)
            pixels = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).convert("RGB")
            square = ImageOps.pad(pixels, (cell, cell), Image.Resampling.BICUBIC, "white", (0.5, 0))
            canvas.paste(square, (left, top))
            for place, text in enumerate(lines):
                draw.text((left + cell // 2, top + cell + gap + place * line), text, fill="black", anchor="mm")
        canvases.append(canvas)
    whole = Image.new("RGB", (canvases[0].width, sum(canvas.height for canvas in canvases)), "white")
    for number, canvas in enumerate(canvases):
        whole.paste(canvas, (0, sum(before.height for before in canvases[:number])))
    whole.save(path)
