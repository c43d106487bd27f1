"""The sizes that `python -m models.train --preset` knows."""

import dataclasses

from models.moe_lm import MoEConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained.

    Attributes:
      batch: sequences a step.
      learning_rate: the peak, after warmup_steps and before the cosine.
      eval_every: steps between evaluations.
      eval_windows: held-out sequences of an evaluation, a multiple of batch.
    """

    model: MoEConfig
    batch: int
    steps: int
    learning_rate: float
    warmup_steps: int
    eval_every: int
    eval_windows: int = 256
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    balance_weight: float = 0.01


PRESETS = {
    # Sized for two CPU cores: far under the 2.3 nats a byte of a bigram table in less than three minutes, compilation included.
    "demo": Preset(
        MoEConfig(layers=2, width=128, heads=4, experts=4, top_k=2, hidden=192, context=128),
        batch=16,
        steps=300,
        learning_rate=4e-3,
        warmup_steps=40,
        eval_every=60,
    ),
    # 25 million parameters, 9 million of them at work on a token.
    "small": Preset(
        MoEConfig(layers=6, width=384, heads=6, experts=8, top_k=2, hidden=384, context=512),
        batch=64,
        steps=3_000,
        learning_rate=1e-3,
        warmup_steps=200,
        eval_every=250,
    ),
    # 156 million, 60 million at work.
    "medium": Preset(
        MoEConfig(layers=12, width=768, heads=12, experts=8, top_k=2, hidden=576, context=1024),
        batch=32,
        steps=5_000,
        learning_rate=6e-4,
        warmup_steps=400,
        eval_every=500,
    ),
    # 1.1 billion, 131 million at work.
    "large": Preset(
        MoEConfig(layers=16, width=1024, heads=16, experts=32, top_k=2, hidden=640, context=1024),
        batch=32,
        steps=5_000,
        learning_rate=3e-4,
        warmup_steps=500,
        eval_every=500,
    ),
}
