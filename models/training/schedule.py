"""How long a training is, its learning rate, and its optimizer."""

import dataclasses
import re
from typing import Annotated, TypeVar

import jax
import optax
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from models.distributed.mesh import name_of

Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # of a larger one `jax.random.key` takes the last 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and learning rate of a training.

    Attributes:
      learning_rate: the peak, after warmup_steps and before the cosine decay.
      eval_every: steps between evaluations.
      accumulate: micro-batches of a step, one after another: the gradient is the batch's, the memory one micro-batch's.
      ema: decay of the averaged weights, after many steps; they are evaluated and saved. None for no average.
      freeze: regular expressions. Parameters with a match in their name, such as "blocks/attention/q/kernel", are not
        trained: no gradient, update, decay, optimizer state or average of them is computed.
      seed: of parameters, batches and random draws.
    """

    steps: PositiveInt
    learning_rate: PositiveFloat
    warmup_steps: NonNegativeInt
    eval_every: PositiveInt
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0
    accumulate: PositiveInt = 1
    ema: Share | None = None
    freeze: tuple[str, ...] = ()
    seed: Seed = 0


AnySchedule = TypeVar("AnySchedule", bound=Schedule)


def with_steps(schedule: AnySchedule, steps: int | None) -> AnySchedule:
    """The schedule with another number of steps; a short one warms up for an eighth of it."""
    steps = schedule.steps if steps is None else steps
    return dataclasses.replace(schedule, steps=steps, warmup_steps=min(schedule.warmup_steps, max(1, steps // 8)))


def make_learning_rate(schedule: Schedule) -> optax.Schedule:
    end = max(schedule.steps, schedule.warmup_steps + 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, schedule.learning_rate, schedule.warmup_steps, end, 0.05 * schedule.learning_rate
    )


def is_decayed(path: tuple) -> bool:
    """By a parameter's name: not norms' scales, biases and sinks. Not by rank, because layers are stacked."""
    return re.search(r"(\b|_)(scale|bias|sinks)\b", name_of(path)) is None


def make_optimizer(schedule: Schedule) -> optax.GradientTransformation:
    decayed = lambda params: jax.tree.map_with_path(lambda path, _: is_decayed(path), params)
    adamw = optax.adamw(make_learning_rate(schedule), b2=0.98, weight_decay=schedule.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(schedule.clip_norm), adamw)
