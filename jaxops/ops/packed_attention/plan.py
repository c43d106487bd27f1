"""Plans of packed attention: backend, the way of the portable one, tiles of the kernels' passes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from jaxops._lib.device import Device
from jaxops._lib.plans import AMPERE, BasePlan, Call, Planner, check_fields
from jaxops._lib.powers import power_of_2
from jaxops.ops.packed_attention.cudnn import cudnn_cannot

PASSES = ("fwd", "dq", "dkv")
WAYS = ("dense", "banded", "blocks")
Way = Literal["dense", "banded", "blocks"]


class Arrays(NamedTuple):
    """The operands of a call; gradients come in the same places.

    Attributes:
      q: [T, N, H].
      k, v: [S, K, H].
      first, end, keys: of `visible_rows`, int32 [T], [T], [2].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    first: jax.Array
    end: jax.Array
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      scale: factor on the scores.
      precision: of the products.
      longest: rows of the longest sequence, if known.
      pairs: of a query and a key that it sees, at the most, for the launches' costs.
    """

    scale: float
    precision: lax.Precision
    longest: int | None
    pairs: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass of the Pallas kernels is cut into programs.

    Attributes:
      bq: rows of queries in a step; a program of fwd and dq owns as many.
      bk: rows of keys in a step; a program of dkv owns as many. Both are powers of two, at least 16.
      warps: warps a program (1, 2, 4 or 8).
      stages: pipeline stages of the loop over the other operand's blocks.
    """

    bq: int
    bk: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        check_fields(self, "bq", "bk", power_of_2=True, least=16)
        check_fields(self, "warps", power_of_2=True, most=8)
        check_fields(self, "stages")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward and of the two backward passes (gradients of q, and of k and v); the way of "xla".

    Attributes:
      way: "dense" computes all T * S pairs; "banded" 3 * T * longest, each block of `longest` rows with itself and its
        two neighbours; "blocks" loops over blocks of 256 rows, skips those that no row sees, and holds no more than a
        block's scores in memory.
    """

    backend: Literal["cudnn", "pallas", "xla"] = "pallas"
    way: Way | None = None
    fwd: Tiles | None = None
    dq: Tiles | None = None
    dkv: Tiles | None = None

    def __post_init__(self):
        if self.way not in (None, *WAYS):
            raise ValueError(f"Plan.way={self.way!r}: write {', '.join(map(repr, WAYS))} or None.")
        if self.way is not None and self.backend != "xla":
            raise ValueError(f"Plan.way={self.way!r} is of the backend 'xla', and Plan.backend is {self.backend!r}.")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on.

    Attributes:
      T, S: rows of queries and of keys.
      heads, kv_heads, head_dim, dtype: of q and k.
      mask: "whole" or "causal", or "rows" where a window or visible_until says what each row sees.
      cross: keys have offsets of their own.
      longest: rows of the longest sequence, or None.
    """

    T: int
    S: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: Literal["whole", "causal", "rows"] = "whole"
    cross: bool = False
    longest: int | None = None


def _cudnn_cannot(problem: Problem, device: Device) -> str:
    p = problem
    return cudnn_cannot(p.dtype, p.head_dim, plain=p.mask != "rows" and not p.cross, device=device)


_DENSE = 2**24  # scores of all heads (64 MiB of float32) up to which all pairs at once are the simplest program


def _way(problem: Problem) -> Way:
    p = problem
    if p.T * p.S * p.heads <= _DENSE:
        return "dense"
    return "banded" if _can_band(p) and 3 * (p.longest or p.S) < p.S else "blocks"


def _can_band(problem: Problem) -> bool:
    return problem.longest is not None and not problem.cross


def _auto(problem: Problem, device: Device) -> str:
    if not _cudnn_cannot(problem, device):
        return "cudnn"
    # The Pallas kernels have not been timed: only where cuDNN has no such mask, and no `longest` bounds the blocks.
    if device.has(AMPERE) and problem.dtype != "float32" and _way(problem) != "banded":
        return "pallas"
    return "xla"


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    problem, way = call.problem, call.plan.way
    if call.backend == "cudnn" and (why := _cudnn_cannot(problem, call.device)):
        raise NotImplementedError(f"backend='cudnn' cannot run this: {why}. Use backend='auto' or 'xla'.")
    if way == "banded" and not _can_band(problem):
        needed = "longest, the rows of the longest sequence" if not problem.cross else "queries and keys in one packing"
        raise ValueError(f"Plan.way='banded' needs {needed}. Pass it, or take way='blocks'.")
    return {"way": way or _way(problem)} if call.backend == "xla" else {}


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """After FlashAttention-2's sizes for head_dim 64 and 128; not yet measured."""
    wide, half = power_of_2(problem.head_dim) > 64, problem.dtype != "float32"
    bq, bk = {"fwd": (128, 64), "dq": (64, 64), "dkv": (64, 64)}[pass_name]
    bq, bk = (bq, bk) if half else (64 if pass_name == "fwd" else 32, 32)
    return Tiles(bq, bk, 8 if wide and half and pass_name == "fwd" else 4, 2)


def _key(pass_name: str, *, T: int, heads: int, head_dim: int, dtype: str, mask: str, **_: Any) -> tuple:
    return pass_name, dtype, power_of_2(T), heads, head_dim, mask


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    for bq, bk, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield Tiles(bq, bk, warps, stages)


PLANNER = Planner(
    Plan, Tiles, PASSES, heuristic, _search, _key, lambda problem: AMPERE, library="cudnn", auto=_auto, others=_others
)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
