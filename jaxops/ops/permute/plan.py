"""Plans of `permute` and `combine`: how tokens and columns are cut into programs, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxops._lib.arrays.powers import covering, power_of_2
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import BasePlan, Planner, check_fields

PASSES = ("permute", "combine", "combine_bwd")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs. All numbers are powers of two.

    Attributes:
      rows: tokens of a program.
      block: columns that it holds in registers at a time. permute and combine have a program for each `block` columns;
        combine_bwd, which sums over whole rows, loops over them.
      choices: choices of a token whose rows are loaded at once.
      warps: warps a program, at most 32.
    """

    rows: int
    block: int
    choices: int
    warps: int

    def __post_init__(self):
        check_fields(self, "rows", "block", "choices", power_of_2=True)
        check_fields(self, "warps", power_of_2=True, most=32)


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of each pass.

    Attributes:
      permute: tiles of permute's forward, which reads a token once and writes the row of each of its choices.
      combine: tiles of combine's forward and permute's backward, which sum the rows of a token's choices.
      combine_bwd: tiles of combine's backward.
    """

    backend: Literal["pallas", "xla"] = "pallas"
    permute: Tiles | None = None
    combine: Tiles | None = None
    combine_bwd: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: T tokens of D columns, k choices each, and the dtype of the rows."""

    T: int
    D: int
    k: int
    dtype: str

    @property
    def lane(self) -> int:
        """Columns of one thread's load: 16 bytes."""
        return 4 if self.dtype == "float32" else 8


def _block(D: int, most: int) -> int:
    return covering(D, min(most // 4, power_of_2(D)), most)


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """Four warps; each thread has one 16-byte load of a token in flight, and one of each of up to 8 choices: enough to
    saturate the memory, with few enough registers for many programs at a time. Short rows share a program."""
    held = 4 * 32 * problem.lane
    block = _block(problem.D, held)
    return Tiles(held // block, block, min(8, power_of_2(problem.k)), 4)


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles whose threads hold one to four loads of a token."""
    for rows, most, choices, warps in itertools.product(
        (1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
    ):
        block = _block(problem.D, most)
        loads = rows * block / (32 * warps * problem.lane)
        filled = choices <= power_of_2(problem.k) and block <= power_of_2(problem.D)
        if 1 <= loads <= 4 and loads * choices <= 16 and filled:
            yield Tiles(rows, block, choices, warps)


def _key(pass_name: str, *, D: int, k: int, dtype: str, **_: Any) -> tuple:
    """Programs are independent: the number of tokens changes nothing."""
    return pass_name, D, power_of_2(k), dtype


PLANNER = Planner(Plan, Tiles, PASSES, heuristic, _search, key=_key, symbolic=("T",))
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
