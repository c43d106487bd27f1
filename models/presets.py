"""The sizes that `python -m models.train lm --preset` and `python -m models.train dit --preset` know."""

import dataclasses

from models.decoder import DecoderConfig
from models.loop import Schedule


@dataclasses.dataclass(frozen=True)
class Preset(Schedule):
    """A language model and how it is trained.

    Attributes:
      context: tokens of a training sequence.
      batch: sequences a step.
      eval_windows: held-out sequences of an evaluation, a multiple of batch.
    """

    model: DecoderConfig
    context: int
    batch: int
    eval_windows: int = 256
    balance_weight: float = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTPreset(Schedule):
    """A diffusion transformer and how it is trained; what else the model needs to know, the data set tells.

    Attributes:
      tokens: the token budget of a batch.
      images: the most images of a batch; with more than the budget holds, the budget is what fills up.
      ema: how much of the averaged weights a step keeps, once there have been many steps.
      sample_steps: Heun steps from noise to image.
      guidance: of the samples; 1 is none.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    images: int
    weight_decay: float = 0.01
    ema: float = 0.995
    sample_steps: int = 20
    guidance: float = 2.5


def of_bytes(*, layers: int, width: int, heads: int, experts: int, hidden: int, top_k: int = 2) -> DecoderConfig:
    """A model whose tokens are bytes."""
    return DecoderConfig(256, width, layers, heads, heads, width // heads, hidden, experts, top_k, tie_embeddings=True)


PRESETS = {
    # Sized for two CPU cores: far under the 2.3 nats a byte of a bigram table in less than three minutes, compilation included.
    "demo": Preset(
        of_bytes(layers=2, width=128, heads=4, experts=4, hidden=192),
        context=128,
        batch=16,
        steps=300,
        learning_rate=4e-3,
        warmup_steps=40,
        eval_every=60,
    ),
    # 25 million parameters, 9 million of them at work on a token.
    "small": Preset(
        of_bytes(layers=6, width=384, heads=6, experts=8, hidden=384),
        context=512,
        batch=64,
        steps=3_000,
        learning_rate=1e-3,
        warmup_steps=200,
        eval_every=250,
    ),
    # 118 million, 42 million at work, nine tenths of it in linear layers whose sides are multiples of 128: for `python -m models.compare_precision`.
    "wide": Preset(
        of_bytes(layers=4, width=1024, heads=8, experts=8, hidden=1024),
        context=512,
        batch=16,
        steps=500,
        learning_rate=6e-4,
        warmup_steps=60,
        eval_every=250,
    ),
    # 156 million, 60 million at work.
    "medium": Preset(
        of_bytes(layers=12, width=768, heads=12, experts=8, hidden=576),
        context=1024,
        batch=32,
        steps=5_000,
        learning_rate=6e-4,
        warmup_steps=400,
        eval_every=500,
    ),
    # 1.1 billion, 131 million at work.
    "large": Preset(
        of_bytes(layers=16, width=1024, heads=16, experts=32, hidden=640),
        context=1024,
        batch=32,
        steps=5_000,
        learning_rate=3e-4,
        warmup_steps=500,
        eval_every=500,
    ),
}

DIT_PRESETS = {
    # Sized for two CPU cores: digits that can be read in less than three minutes, compilation and sampling included.
    "demo": DiTPreset(layers=4, width=128, heads=4, tokens=512, images=18, steps=1_400, learning_rate=2e-3, warmup_steps=100, eval_every=200),
    # DiT-S: 33 million parameters, for a GPU.
    "small": DiTPreset(layers=12, width=384, heads=6, tokens=16_384, images=576, steps=5_000, learning_rate=5e-4, warmup_steps=500, eval_every=500, ema=0.999),
    # 80 million parameters, in layers whose sides are multiples of 128: for `python -m models.compare_precision`.
    "wide": DiTPreset(layers=4, width=1024, heads=8, tokens=8_192, images=384, steps=500, learning_rate=3e-4, warmup_steps=60, eval_every=250),
}
