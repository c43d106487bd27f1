"""Pictures of a training run."""

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


@dataclasses.dataclass
class History:
    """What a run has read from the device so far.

    Attributes:
      loss: nats a byte of each step's batch.
      heldout: (steps done, nats a held-out byte).
      load: [layers, experts] of each step: the share of the assignments that each expert got.
    """

    loss: list[float] = dataclasses.field(default_factory=list)
    heldout: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    load: list[np.ndarray] = dataclasses.field(default_factory=list)


def plot_loss(history: History, bigram: float, path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(history.loss) + 1), history.loss, color="tab:blue", alpha=0.4, label="training batch")
    axes.plot(*zip(*history.heldout, strict=True), color="tab:orange", marker="o", label="held-out bytes")
    axes.axhline(bigram, color="tab:gray", linestyle="--", label=f"bigram table ({bigram:.2f})")
    axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, None), title="Loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_expert_load(history: History, path: Path) -> None:
    """A heat map for each layer, experts over steps; 1 is an expert's fair share."""
    load = np.stack(history.load)
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
