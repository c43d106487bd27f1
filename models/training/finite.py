"""Runs whose numbers are not finite: which steps count, and when the run ends."""

import math
from collections.abc import Sequence
from typing import Any


class NotFinite(Exception):
    """Too many numbers of a run were not finite; the message says which, and since which step."""


class Watch:
    """Counts steps in a row whose numbers are not finite, and such evaluations: `most` of either end the run."""

    def __init__(self, most: int):
        self._most = most
        self._since: dict[str, tuple[int, int]] = {}  # what is not finite: (the first step, how many in a row)

    @property
    def finite(self) -> bool:
        """Whether the last step and the last evaluation were: only then is a state worth a checkpoint."""
        return not self._since

    def add(self, done: int, read: Sequence[Any], heldout: float | None) -> None:
        """The metrics of the steps up to `done`, and the held-out loss after them if there was an evaluation."""
        for step, metrics in enumerate(read, done + 1 - len(read)):
            self._count("loss or the gradient norm", step, float(metrics.loss), float(metrics.gradient_norm))
        if heldout is not None:
            self._count("held-out loss", done, heldout)

    def _count(self, what: str, step: int, *values: float) -> None:
        first, count = self._since.get(what, (step, 0))
        if count < self._most:  # later steps cannot make up for these
            self._since.pop(what, None)
            if not all(map(math.isfinite, values)):
                self._since[what] = first, count + 1

    def check(self, *, ended: bool) -> None:
        """Raises NotFinite if too many in a row were not finite, or, with the last step done, that one."""
        for what, (first, count) in self._since.items():
            if ended or count >= self._most:
                raise NotFinite(f"The {what} is not finite since step {first} ({count} in a row).")
