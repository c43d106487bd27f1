"""The presets of `python -m models.train lm --preset`, `dit --preset` and `mm --preset`."""

import dataclasses
import datetime
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from jaxops.offload import Policy
from models.data.image_files import check_colour
from models.decoder import DecoderConfig
from models.multimodal.model import MultimodalConfig
from models.precision import Attends, Computation
from models.training.schedule import Schedule, Share


@dataclasses.dataclass(frozen=True)
class Preset(Schedule):
    """A language model, its data and its training.

    Attributes:
      context: tokens of a training sequence, at most.
      batch: sequences of a step, over all micro-batches; of shorter ones proportionally more.
      eval_windows: held-out sequences of an evaluation, at most.
      balance_weight: of the routers' load-balancing loss (`jaxops.Routing.aux_loss`), by micro-batch.
      data: files and folders of text; none for the sources of the Python standard library.
      raw_bytes: whether to read files that are no text, as bytes.
      tokenizer: a tokenizer.json; None for that of init_from's checkpoint, or for bytes.
      init_from: folder of a checkpoint in Hugging Face's format to start from; `model` then has its sizes.
      ignore_config: unknown keys of its config.json to go on without; see `models.hf.config.read_config`.
      pack: whether documents share rows. Otherwise a row has one document or a piece of one, in at most `buckets`
        lengths.
      buckets: at most how many lengths, and compiled steps, without pack.
      date: day or time, in ISO 8601, that chat templates see; None for the time when the run begins.
    """

    model: DecoderConfig
    context: PositiveInt
    batch: PositiveInt
    eval_windows: PositiveInt = 256
    balance_weight: NonNegativeFloat = 0.01
    data: tuple[str, ...] = ()
    raw_bytes: bool = False
    tokenizer: str | None = None
    init_from: str | None = None
    ignore_config: tuple[str, ...] = ()
    pack: bool = True
    buckets: PositiveInt = 3
    date: str | None = None

    def __post_init__(self):
        if self.date is not None:
            try:
                datetime.datetime.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"date is {self.date!r}; write it as 2026-11-27 or 2026-11-27T21:05:00.") from None
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch is {self.batch} and accumulate {self.accumulate}; batch must be a multiple of accumulate."
            )
        if self.ignore_config and self.init_from is None:
            raise ValueError("ignore_config is about the config.json of init_from, which is not given.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePreset(Schedule):
    """What the presets of both models of images have.

    Attributes:
      data: a data set's name, or a folder of images: for text and images with a .txt each, or a .jsonl file.
      patch, longest: side of a patch of own images, and patches of the largest of them.
      background: colour under transparent pixels of own images: a name, "#rrggbb" or "rgb(r,g,b)".
      sample_steps: Heun steps from noise to image.
      guidance: of what is drawn; 1 for none.
    """

    data: str = "digits"
    patch: PositiveInt = 4
    longest: PositiveInt = 64
    background: str = "white"
    weight_decay: NonNegativeFloat = 0.01
    ema: Share | None = 0.995
    sample_steps: PositiveInt = 20
    guidance: NonNegativeFloat = 2.5

    def check(self, *names: str) -> None:
        """Checks whether `accumulate` divides the settings of these names, and the background is a colour."""
        check_colour(self.background)
        sizes = {name: getattr(self, name) for name in names}
        if wrong := [f"{name} is {size}" for name, size in sizes.items() if size % self.accumulate]:
            raise ValueError(
                f"{', '.join(wrong)} and accumulate {self.accumulate}; {', '.join(names[:-1])} and {names[-1]} must be "
                "multiples of accumulate."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTPreset(Computation, ImagePreset):
    """A diffusion transformer, its data and its training; the data set gives the model's remaining sizes.

    Attributes:
      tokens: token budget of a step, over all micro-batches.
      images: images of a step, at most; with more than fit, the budget is the limit.
      layers, width, heads, attention: as of `models.dit.DiTConfig`.
    """

    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    tokens: PositiveInt
    images: PositiveInt
    attention: Attends = "auto"

    def __post_init__(self):
        if self.width % self.heads or self.width % 8:
            raise ValueError(
                f"width is {self.width} and heads {self.heads}; width must be a multiple of heads, and of 8."
            )
        self.check("tokens", "images")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalPreset(ImagePreset):
    """A model of text and images, its data and its training; the data gives the model's vocab and patch_values.

    Attributes:
      rows: tokens and patches of a step, over all micro-batches.
      predictions: of text tokens in a step, at most.
      documents: of a step, at most.
      tokenizer: a tokenizer.json; None for bytes.
      illustrated: share of documents in which the caption comes first, and the image is drawn; in the others it is
        captioned.
      captionless: share of the former without a caption, for guidance.
      image_weight: of a patch's squared error, beside a token's nats.
      time_shift: of the times of images that are drawn, as of `models.multimodal.loss.losses_of`.
      reading_noise: of images that are captioned, at most; from 0 to 1.
      balance_weight: of the routers' load-balancing loss, by micro-batch.
      temperature: of captions; 0 for the likeliest tokens.
    """

    model: MultimodalConfig
    rows: PositiveInt
    predictions: PositiveInt
    documents: PositiveInt
    tokenizer: str | None = None
    illustrated: Share = 0.5
    captionless: Share = 0.1
    image_weight: NonNegativeFloat = 1.0
    time_shift: PositiveFloat = 1.0
    reading_noise: Share = 0.0
    balance_weight: NonNegativeFloat = 0.01
    temperature: NonNegativeFloat = 0.5

    def __post_init__(self):
        self.check("rows", "predictions", "documents")


def of_bytes(*, layers: int, width: int, heads: int, experts: int, hidden: int, top_k: int = 2) -> DecoderConfig:
    """A model of byte tokens."""
    return DecoderConfig(256, width, layers, heads, heads, width // heads, hidden, experts, top_k, tie_embeddings=True)


def rates(steps: int, learning_rate: float, warmup_steps: int, eval_every: int) -> dict[str, Any]:
    """A schedule's first four settings."""
    return {"steps": steps, "learning_rate": learning_rate, "warmup_steps": warmup_steps, "eval_every": eval_every}


# fmt: off
PRESETS = {
    # Sized for two CPU cores: far below the 2.3 nats a byte of a bigram table in three minutes, compilation included.
    "demo": Preset(
        of_bytes(layers=2, width=128, heads=4, experts=4, hidden=192), context=128, batch=16,
        **rates(300, 4e-3, 40, 60),
    ),
    # 25 million parameters, 9 million active.
    "small": Preset(
        of_bytes(layers=6, width=384, heads=6, experts=8, hidden=384), context=512, batch=64,
        **rates(3_000, 1e-3, 200, 250),
    ),
    # 118 million, 42 million active, nine tenths in linear layers with sides divisible by 128.
    "wide": Preset(
        of_bytes(layers=4, width=1024, heads=8, experts=8, hidden=1024), context=512, batch=16,
        **rates(500, 6e-4, 60, 250),
    ),
    # 156 million, 60 million active.
    "medium": Preset(
        of_bytes(layers=12, width=768, heads=12, experts=8, hidden=576), context=1024, batch=32,
        **rates(5_000, 6e-4, 400, 500),
    ),
    # 1.1 billion, 131 million active.
    "large": Preset(
        of_bytes(layers=16, width=1024, heads=16, experts=32, hidden=640), context=1024, batch=32,
        **rates(5_000, 3e-4, 500, 500),
    ),
    # Like Qwen3's mixtures of experts: 3.1 billion, 0.6 billion active; for a GPU of 140 GB, and at most 32,768 tokens.
    "3b": Preset(
        DecoderConfig(
            32_768, 2048, layers=14, heads=16, kv_heads=4, head_dim=128, hidden=512, experts=64, top_k=8, qk_norm=True,
            unroll=True,
        ),
        context=2048, batch=8, **rates(20_000, 3e-4, 1_000, 1_000),
    ),
    # Qwen3-30B-A3B's sizes: 30.5 billion, 3.3 billion active; for eight GPUs of 80 GB or four of 140 GB.
    "30b": Preset(
        DecoderConfig(
            151_936, 2048, layers=48, heads=32, kv_heads=4, head_dim=128, hidden=768, experts=128, top_k=8,
            qk_norm=True, rope_base=1_000_000.0, policy=Policy(),
        ),
        context=4096, batch=16, **rates(50_000, 3e-4, 2_000, 1_000),
    ),
}

DIT_PRESETS = {
    # Sized for two CPU cores: legible digits in less than three minutes, compilation and sampling included.
    "demo": DiTPreset(layers=4, width=128, heads=4, tokens=512, images=18, **rates(1_400, 2e-3, 100, 200)),
    # DiT-S: 33 million parameters, for a GPU.
    "small": DiTPreset(
        layers=12, width=384, heads=6, tokens=16_384, images=576, ema=0.999, **rates(5_000, 5e-4, 500, 500)
    ),
    # 1.0 billion, for images of up to 1,024 tokens.
    "1b": DiTPreset(
        layers=24, width=1536, heads=12, tokens=16_384, images=64, longest=1024, ema=0.9999, unroll=True,
        **rates(50_000, 1e-4, 1_000, 1_000),
    ),
}

MULTIMODAL_PRESETS = {
    # Sized for two CPU cores: legible digits, and captions that name them, in less than four minutes.
    "demo": MultimodalPreset(
        model=MultimodalConfig(
            vocab=258, patch_values=4, width=128, layers=4, heads=4, kv_heads=4, head_dim=32, text_experts=2,
            text_hidden=64, image_experts=3, image_hidden=128, top_k=1, qk_norm=True, tie_embeddings=True,
        ),
        rows=512, predictions=384, documents=24, image_weight=2.0, time_shift=3.0, sample_steps=10, temperature=0.0,
        **rates(2_000, 3e-3, 100, 400),
    ),
    # 2.0 billion parameters, 0.6 billion active, for a GPU of 140 GB: images of up to 1,024 patches, by the tokens of a
    # tokenizer of at most 32,766.
    "2b": MultimodalPreset(
        model=MultimodalConfig(
            vocab=32_768, patch_values=48, width=2048, layers=12, heads=16, kv_heads=4, head_dim=128, text_experts=16,
            text_hidden=512, image_experts=8, image_hidden=1536, top_k=2, qk_norm=True, tie_embeddings=True,
        ),
        rows=16_384, predictions=12_288, documents=128, longest=1024, ema=0.9999, image_weight=5.0,
        **rates(50_000, 1e-4, 1_000, 1_000),
    ),
}
# fmt: on
