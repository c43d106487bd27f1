"""The end of `python -m models.train mm`: drawings for prompts, captions of held-out images, how right they are."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from models.data.digits_in_words import captions_of, digit_in
from models.data.pairs import PairData
from models.multimodal.model import Multimodal
from models.multimodal.sampling import caption, draw, lowered_programs
from models.training.loop import Run
from models.training.presets import MultimodalPreset
from models.training.report import draw_captioned

SHOWN, MEASURED = 30, 200
# material is a `models.training.mm.Material` everywhere.


def show(preset: MultimodalPreset, model: Multimodal, data: PairData, material: Any, run: Run) -> None:
    """Writes OUT/samples.png. Of digits, prints how many of 200 drawings and captions are right."""
    draw_key, caption_key = jax.random.split(jax.random.key(preset.seed))
    tokenizer, count = material.tokenizer, SHOWN if data.labels is None else MEASURED
    images = data.heldout.pixels[:count]
    prompts = [captions[0] for captions in data.heldout.captions[:count]] if data.labels is None else prompts_of(count)
    sizes = [image.shape[:2] for image in images] if data.labels is None else count * [images[0].shape[:2]]
    asked_for = [np.array(tokenizer.encode(prompt), np.int32) for prompt in prompts]
    given, how = (material.tokens, material.room), {"steps": preset.sample_steps, "guidance": preset.guidance}
    drawn = draw(model, asked_for, sizes, *given, draw_key, **how)
    length, temperature = longest_caption(material), preset.temperature
    captions = caption(model, images, *given, caption_key, length=length, temperature=temperature)
    written = [tokenizer.decode(tokens) for tokens in captions]
    if data.labels is not None:
        read = reader(data.train.pixels, data.labels[0])
        asked = [digit_in(prompt) for prompt in prompts]
        shown, real = right(read(drawn), asked), right(read(data.heldout.pixels), data.labels[1].tolist())
        run.say(f"{shown} drawings show their prompt's digit, as a support vector machine reads it,")
        run.say(f"which reads {real} held-out digits right")
        named = [digit_in(text) for text in written]
        run.say(f"{right(named, data.labels[1][:count].tolist())} captions name the digit of a held-out image")
    some = np.linspace(0, len(prompts) - 1, min(SHOWN, len(prompts))).astype(int)
    drawings = ("drawn for these prompts", [drawn[i] for i in some], [prompts[i] for i in some])
    held = ("held-out images, and the captions written for them", images[:SHOWN], written[:SHOWN])
    draw_captioned([drawings, held], run.out / "samples.png")


def lowered(model: Multimodal, preset: MultimodalPreset, material: Any) -> Iterator[jax.stages.Lowered]:
    """The programs of `show`, for a model of `jax.ShapeDtypeStruct`s."""
    how = {"steps": preset.sample_steps, "guidance": preset.guidance, "temperature": preset.temperature}
    return lowered_programs(model, material.room, jax.random.key(0), length=longest_caption(material), **how)


def longest_caption(material: Any) -> int:
    """Tokens of one that is written, its end included."""
    return 1 + max(len(tokens) for _, captions in material.train for tokens in captions)


def prompts_of(count: int) -> list[str]:
    """Captions of the digits in turn, in all ways."""
    return [captions_of(i % 10)[i // 10 % len(captions_of(i % 10))] for i in range(count)]


def reader(images: Sequence[np.ndarray], digits: np.ndarray) -> Callable[[Sequence[np.ndarray]], list[int]]:
    """A support vector machine, trained on these, that reads digits."""
    from sklearn.svm import SVC

    flat = lambda images: np.stack([image.ravel() for image in images]) / 255
    machine = SVC(C=10.0, gamma=0.25).fit(flat(images), digits)  # pyright: ignore[reportArgumentType]
    return lambda images: machine.predict(flat(images)).tolist()


def right(got: Sequence[int | None], wanted: Sequence[int | None]) -> str:
    count = sum(one == other for one, other in zip(got, wanted, strict=True))
    return f"{count} of {len(wanted)} ({count / len(wanted):.1%})"
