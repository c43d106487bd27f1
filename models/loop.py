"""What the training of every model shares: its schedule, its optimizer, and the loop over steps."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.report import History

BACKENDS = ("auto", "pallas", "xla")
READ_EVERY = 10


def check_option(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}.", param_hint=f"--{option}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a model is trained, and how fast it learns.

    Attributes:
      learning_rate: the peak, after warmup_steps and before the cosine.
      eval_every: steps between evaluations.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    eval_every: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0


AnySchedule = TypeVar("AnySchedule", bound=Schedule)


def with_steps(schedule: AnySchedule, steps: int | None) -> AnySchedule:
    """The schedule with the number of steps asked for; a short one warms up for an eighth of it."""
    steps = schedule.steps if steps is None else steps
    return dataclasses.replace(schedule, steps=steps, warmup_steps=min(schedule.warmup_steps, max(1, steps // 8)))


def make_optimizer(schedule: Schedule) -> optax.GradientTransformation:
    end = max(schedule.steps, schedule.warmup_steps + 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, schedule.learning_rate, schedule.warmup_steps, end, 0.05 * schedule.learning_rate)
    adamw = optax.adamw(rate, b2=0.98, weight_decay=schedule.weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    return optax.chain(optax.clip_by_global_norm(schedule.clip_norm), adamw)


def run_steps(schedule: Schedule, advance: Callable[[], Any], evaluate: Callable[[], jax.Array], tokens: int, unit: str, console: Console) -> History:
    """Runs all steps and evaluations, and shows how they go.

    Args:
      advance: starts a step of `tokens` tokens and gives its metrics, on the device; reading them is the only wait for the device.
      evaluate: starts an evaluation of what the last step left and gives the held-out loss, on the device.
      unit: of the loss, as it is written after a number.
    """
    history, unread = History(), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # The guard turns any transfer that was not asked for by name, and so any hidden wait, into an error.
    with jax.transfer_guard("disallow"), Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=schedule.steps)
        last_read = time.perf_counter()
        for done in range(1, schedule.steps + 1):
            unread.append(advance())
            at_eval = done % schedule.eval_every == 0 or done in (1, schedule.steps)
            if not at_eval and len(unread) < READ_EVERY:
                continue
            history.metrics += jax.device_get(unread)
            rate = len(unread) * tokens / (time.perf_counter() - last_read)
            loss = float(history.metrics[-1].loss)
            progress.update(task, completed=done, description=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
            if at_eval:
                history.heldout.append((done, float(jax.device_get(evaluate()))))
                progress.console.print(f"step {done}: held-out {history.heldout[-1][1]:.3f} {unit}" + (f", {rate:,.0f} tokens/s" if done > 1 else ""))
            unread.clear()
            last_read = time.perf_counter()
    return history
