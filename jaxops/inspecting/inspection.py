"""What `jaxops.inspect` returns. printing.py turns it into tables."""

import dataclasses
from typing import Any

from jaxops.inspecting import printing
from jaxops.inspecting.calls import Argument
from jaxops.inspecting.choices import Choice
from jaxops.inspecting.programs import Program
from jaxops.inspecting.ragged import Ragged
from jaxops.inspecting.residuals import Kept
from jaxops.inspecting.values import Error, Values


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One call of an op, examined. `print` it for plain text; rich's `print` shows tables.

    Attributes:
      op: name of the op.
      device: the vendor's name of what it ran on.
      arguments: the arrays that were passed.
      static: what else was passed, by name.
      plan: the op's Plan as it ran, to be passed as plan=; of several modalities a tuple; None without plans.
      choices: each choice of the plans, with its source. An op made of others has theirs, too.
      programs: the compiled forward and, where there are gradients, backward.
      reference: what the errors are against.
      errors: of the results and gradients; the cotangents are random normal numbers.
      values: of the floating arguments, results and gradients.
      ragged: splits of rows into groups or sequences.
      kept: what lives from the forward to the backward; empty without gradients.
      notes: what is left out or cannot be known here.
    """

    op: str
    device: str
    arguments: tuple[Argument, ...]
    static: dict[str, Any]
    plan: Any
    choices: tuple[Choice, ...]
    programs: tuple[Program, ...]
    reference: str
    errors: tuple[Error, ...]
    values: tuple[Values, ...]
    ragged: tuple[Ragged, ...]
    kept: tuple[Kept, ...]
    notes: tuple[str, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes that live from the forward to the backward beside the arguments."""
        return sum(each.bytes for each in self.kept if not each.name.startswith("argument "))

    def __str__(self) -> str:
        return printing.as_text(printing.sections(self))

    def __rich__(self) -> Any:
        return printing.as_rich(printing.sections(self))


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Two calls that differ in their backend or plan.

    Attributes:
      labels: what differs.
      first, second: the calls.
      differences: of the first one's results and gradients, against the second one's.
    """

    labels: tuple[str, str]
    first: Inspection
    second: Inspection
    differences: tuple[Error, ...]

    def __str__(self) -> str:
        return printing.as_text(printing.sections_of_two(self))

    def __rich__(self) -> Any:
        return printing.as_rich(printing.sections_of_two(self))
