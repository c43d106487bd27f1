"""Runs of a training command whose compiled step is kept, and what the step of every model must be."""

import collections
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from models.training import loop
from tests.compilations import compilations


def rows_of(out: Path) -> list[dict]:
    """The rows of a run's log, which is strict JSON."""
    text = (out / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


class Command(NamedTuple):
    """A run of a command: output, folder, compilations, the compiled step, and the arguments of the first step."""

    printed: str
    out: Path
    compiled: collections.Counter[str]
    step: Any
    first: Any


def watched(out: Path, run: Callable[[], None]) -> Command:
    """The run of a command. Any implicit transfer in a step is an error."""
    printed, seen, make_step = io.StringIO(), {}, loop.make_step

    def guarded_step(*given):
        seen.update(step=make_step(*given))

        def step(state, batch, key):
            seen.setdefault("first", (jax.tree.map(np.array, state), batch, key))
            with jax.transfer_guard("disallow"):
                return seen["step"](state, batch, key)

        step.trace = seen["step"].trace  # compiled ahead
        return step

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), compilations() as compiled:
        patch.setattr(loop, "make_step", guarded_step)
        run()
    return Command(printed.getvalue(), out, compiled, **seen)


def check_step(command: Command, *others: str, most: int) -> None:
    """It is compiled once, never meets the host, donates the whole state, and gives the same bits each time.

    Args:
      others: programs of the run that are compiled once, too, beside the evaluation.
      most: all that the run compiles, with the small ones.
    """
    once = ("step", "evaluate", *others)
    assert [command.compiled[name] for name in once] == len(once) * [1], command.compiled
    assert command.compiled.total() <= most, command.compiled
    assert command.step._cache_size() == 1
    state, *given = command.first
    put = lambda: jax.device_put(state, jax.devices()[0])
    text = command.step.lower(put(), *given).compile().as_text()
    for word in ("callback", "outfeed", "infeed", "send(", "recv(", "S(5)"):  # S(5) is host memory
        assert word not in text
    aliases = text.split("input_output_alias={", 1)[1].splitlines()[0]
    assert aliases.count("-alias)") == len(jax.tree.leaves(state)), "the whole state is donated"
    one, other = (command.step(put(), *given)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)
