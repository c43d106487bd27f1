"""Every choice that `route` makes: how tokens are cut into programs, backend."""

import dataclasses
import itertools
from typing import Literal

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops._lib.powers import check_powers_of_2, power_of_2

PASSES = ("fwd", "bwd")
SCORES = ("softmax", "sigmoid")
TINY = 1e-20  # added to a sum of scores before one divides by it, as in DeepSeek-V3's own code: scores that all underflow give zeros
Pass = Literal["fwd", "bwd"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      k: experts a token.
      score: "softmax" or "sigmoid".
      normalize: divide a token's weights by their sum.
      weight_scale: factor on the weights.
      expert_groups, top_expert_groups: experts are in expert_groups equal groups of neighbours, of which a token may choose from its best top_expert_groups.
      capacity: most rows of an expert, or None where nothing can be dropped.
    """

    k: int
    score: str
    normalize: bool
    weight_scale: float
    expert_groups: int
    top_expert_groups: int
    capacity: int | None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      rows: tokens of a program; fwd counts over them before it writes a count for each expert. A power of two.
      step: tokens whose scores it holds in registers at a time. A power of two, at most rows.
      warps: warps a program (1, 2, 4, 8, 16 or 32).
    """

    rows: int
    step: int
    warps: int = 1

    def __post_init__(self):
        check_powers_of_2(self, "rows", "step", "warps")
        if self.step > self.rows:
            raise ValueError(f"Tiles.step={self.step} must be at most Tiles.rows={self.rows}.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`; the xla backend needs none of it.

    Attributes:
      backend: "pallas" or "xla".
      fwd: tiles of the two forward passes over the tokens: the one that chooses, and the one that finds each choice's row.
      bwd: tiles of the backward pass.
    """

    backend: Literal["pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape [T, E] of the logits."""

    T: int
    E: int


def make_plan(problem: Problem, device: Device, *, backend: str = "auto", plan: Plan | None = None) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, then the heuristic's. There are no tuned rows: the choice is small.

    Args:
      problem: static shape.
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


def heuristic(pass_name: Pass, problem: Problem) -> Tiles:
    """Up to 16 scores a thread of one warp: Triton lays warps along the experts first, and every maximum over them would wait for all. (From 1,024 experts on
    there is no other way: a warp for each 1,024.)

    fwd takes 64 tokens, so that few counts are left to add up, but fewer where there would be less than four programs for each of an H200's multiprocessors.
    """
    width = power_of_2(problem.E)
    step = max(1, min(16, 512 // width))
    rows = 64 if pass_name == "fwd" else step
    while rows > step and -(-problem.T // rows) < 528:
        rows //= 2
    return Tiles(rows, step, max(1, min(32, width // 1024)))


def candidates(pass_name: Pass, problem: Problem) -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those with 4 to 64 scores a thread."""
    found, width = [heuristic(pass_name, problem)], power_of_2(problem.E)
    for rows, step, warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)):
        if step <= rows and 4 <= step * width / (32 * warps) <= 64 and (tile := Tiles(rows, step, warps)) not in found:
            found.append(tile)
    return found
