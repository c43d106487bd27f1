"""Plans of `route`: how tokens are cut into programs, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import BasePlan, Planner, check_fields

PASSES = ("fwd", "bwd")
SCORES = ("softmax", "sigmoid")
# Added to a sum of scores before the division, as in DeepSeek-V3's own code: scores that are all exactly 0 give zeros.
TINY = 1e-20
_FEW_SCORES = 4096  # of the tokens that are one program: 16 a thread of 8 warps


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      k: experts a token.
      score: "softmax" or "sigmoid".
      normalize: divide a token's weights by their sum.
      weight_scale: factor on the weights.
      expert_groups, top_expert_groups: experts are in expert_groups equal groups of neighbours, of which a token may
        choose from its best top_expert_groups.
      capacity: most rows of an expert, or None where nothing can be dropped.
      biased: whether a selection_bias chooses, so that scores far below a token's largest one may be chosen.
    """

    k: int
    score: str
    normalize: bool
    weight_scale: float
    expert_groups: int
    top_expert_groups: int
    capacity: int | None
    biased: bool = False


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs. All numbers are powers of two.

    Attributes:
      rows: tokens of a program; fwd counts over them before it writes a count for each expert.
      step: tokens whose scores it holds in registers at a time, at most `rows`.
      warps: warps a program, at most 32.
    """

    rows: int
    step: int
    warps: int = 1

    def __post_init__(self):
        check_fields(self, "rows", "step", power_of_2=True)
        check_fields(self, "warps", power_of_2=True, most=32)
        if self.step > self.rows:
            raise ValueError(f"Tiles.step={self.step} must be at most Tiles.rows={self.rows}.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward pass, whose two kernels over the tokens (one chooses experts, one finds the row of each
    choice) are one launch if there is a single tile, and of the backward pass."""

    backend: Literal["pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on.

    Attributes:
      T, E: the shape of the logits.
      groups: of experts, where a token may choose from a part of them only; else 1.
    """

    T: int
    E: int
    groups: int = 1


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """Up to 16 scores a thread of one warp: Triton lays warps along the experts first, and with several warps each
    maximum over experts would synchronise them. From 1,024 experts on, a warp for each 1,024.

    fwd takes 64 tokens a program, so that few counts are left to add up; fewer where that would make less than four
    programs a multiprocessor. As few tokens as up to 8 warps hold are one program, and one launch instead of three. Not
    with groups of experts: in several warps they take too many registers.
    """
    width = power_of_2(problem.E)
    few = power_of_2(problem.T)
    if pass_name == "fwd" and problem.groups == 1 and few * width <= _FEW_SCORES:
        return Tiles(few, few, max(1, few * width // 512))
    step = max(1, min(16, 512 // width))
    rows = 64 if pass_name == "fwd" else step
    while rows > step and -(-problem.T // rows) < 4 * device.cores:
        rows //= 2
    return Tiles(rows, step, max(1, min(32, width // 1024)))


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles with 4 to 64 scores a thread."""
    width = power_of_2(problem.E)
    for rows, step, warps in itertools.product((8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)):
        if step <= rows and 4 <= step * width / (32 * warps) <= 64:
            yield Tiles(rows, step, warps)


def _key(pass_name: str, *, T: int, E: int, **_: Any) -> tuple:
    """The number of tokens counts up to the next power of two."""
    return pass_name, power_of_2(T), E


PLANNER = Planner(Plan, Tiles, PASSES, heuristic, _search, key=_key, symbolic=("T",), splits=True)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
