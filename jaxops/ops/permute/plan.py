"""Every choice that `permute` and `combine` make: how tokens and columns are cut into programs, backend."""

import dataclasses
import itertools
from typing import Literal

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops._lib.powers import check_powers_of_2, power_of_2

PASSES = ("permute", "combine", "combine_bwd")
Pass = Literal["permute", "combine", "combine_bwd"]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      rows: tokens of a program. A power of two.
      block: columns that it holds in registers at a time; permute and combine have a program for each `block` columns, combine_bwd a loop over them, since it
        adds up whole rows. A power of two.
      choices: of a token, whose rows are on their way at once. A power of two.
      warps: warps a program (1, 2, 4, 8, 16 or 32).
    """

    rows: int
    block: int
    choices: int
    warps: int

    def __post_init__(self):
        check_powers_of_2(self, "rows", "block", "choices", "warps")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`; the xla backend needs none of it.

    Attributes:
      backend: "pallas" or "xla".
      permute: tiles of permute's forward, which reads a token once and writes the row of each of its choices.
      combine: tiles of combine's forward and permute's backward, which add up the rows of a token's choices.
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


def make_plan(problem: Problem, device: Device, *, backend: str = "auto", plan: Plan | None = None) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, then the heuristic's. There are no tuned rows: the choice is small.

    Args:
      problem: static shape and dtype.
      device: see `jaxops.tuning.current_device()`.
      backend: "auto" takes Pallas on a GPU and xla elsewhere; "pallas" or "xla" is obeyed. On a CPU, "pallas" runs in Pallas' interpreter.
      plan: used as it is; only what it leaves None is filled.
    """
    device = plan_device(Plan, plan, device)
    backend = choose_backend(device, backend, plan)
    if backend == "xla":
        return Plan("xla", device=device)
    chosen = {name: (getattr(plan, name) if plan is not None else None) or heuristic(name, problem) for name in PASSES}
    return Plan("pallas", **chosen, device=device)


def _block(D: int, most: int) -> int:
    """The widest power of two up to `most` that covers D with the fewest columns to spare, but no narrower than a quarter of that."""
    least = min(most // 4, power_of_2(D))
    sizes = [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
    return min(sizes, key=lambda block: (-(-D // block) * block, -block))


def heuristic(pass_name: Pass, problem: Problem) -> Tiles:
    """Four warps, each thread of which has one 16-byte load of a token on its way, and one of each of up to 8 choices: enough of them for the memory, and few
    enough registers for many programs at a time. Short rows share a program."""
    held = 4 * 32 * problem.lane
    block = _block(problem.D, held)
    return Tiles(held // block, block, min(8, power_of_2(problem.k)), 4)


def candidates(pass_name: Pass, problem: Problem) -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those whose threads hold one to four loads of a token."""
    found = [heuristic(pass_name, problem)]
    for rows, most, choices, warps in itertools.product(
        (1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
    ):
        block = _block(problem.D, most)
        loads = rows * block / (32 * warps * problem.lane)
        tile = Tiles(rows, block, choices, warps)
        if (
            1 <= loads <= 4
            and loads * choices <= 16
            and choices <= power_of_2(problem.k)
            and block <= power_of_2(problem.D)
            and tile not in found
        ):
            found.append(tile)
    return found
