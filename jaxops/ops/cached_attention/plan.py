"""Plans of `cached_attention`: how a row's cached tokens are divided among programs, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import AMPERE, BasePlan, Call, Planner, check_fields

PASSES = ("fwd",)
FEWEST = 16  # rows and columns of a product on tensor cores
_WIDEST = 256  # head_dim of the kernel, whose programs hold whole heads in registers and shared memory


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the cached tokens of a row are divided among programs.

    Attributes:
      parts: programs that share what a row sees of one key head, at the most; a power of two.
      block: cached tokens that a program reads at a time, a power of two, at least 16.
      warps: warps a program, a power of two, at most 32.
      stages: software-pipeline stages of the loads.
    """

    parts: int
    block: int
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        check_fields(self, "parts", power_of_2=True)
        check_fields(self, "block", power_of_2=True, least=FEWEST)
        check_fields(self, "warps", power_of_2=True, most=32)
        check_fields(self, "stages")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """The tiles of the forward; the gradient is XLA's."""

    backend: Literal["pallas", "xla"] = "pallas"
    fwd: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: B rows that see S cached tokens at the most, heads of queries and of keys, and the dtype
    of the caches."""

    B: int
    heads: int
    kv_heads: int
    S: int
    head_dim: int
    dtype: str

    @property
    def held(self) -> tuple[int, int]:
        """Queries of a program, and columns of each."""
        group = self.heads // max(1, self.kv_heads)
        return max(FEWEST, power_of_2(group)), max(FEWEST, power_of_2(self.head_dim))


def shared_bytes(tiles: Tiles, problem: Problem) -> int:
    """Shared memory in bytes, at the most: blocks of keys and values of all stages but the last, then queries,
    probabilities and what results take on their way to another layout."""
    rows, columns = problem.held
    row = columns * jnp.dtype(problem.dtype).itemsize
    return (2 * max(1, tiles.stages - 1) * tiles.block + 3 * rows) * row


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """Two programs a multiprocessor read as fast as more do. A part has about 64 tokens or more: more parts take longer
    to add than they save."""
    rows, columns = problem.held
    most = max(1, min(2 * device.cores // max(1, problem.B * problem.kv_heads), problem.S // 64, 128))
    parts = 1 << most.bit_length() - 1
    tiles = Tiles(parts, 32 if parts >= 16 else 64, 8 if rows * columns > 8192 else 4, 3)
    while not fits(tiles, problem, device) and tiles.block > FEWEST:
        smaller = {"stages": 2} if tiles.stages > 2 else {"block": tiles.block // 2}
        tiles = dataclasses.replace(tiles, **smaller)
    return tiles


def fits(tiles: Tiles, problem: Problem, device: Device) -> bool:
    return shared_bytes(tiles, problem) <= device.shared_bytes


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    for parts, block, warps, stages in itertools.product(
        (1, 2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128), (2, 4, 8), (2, 3, 4)
    ):
        tiles = Tiles(parts, block, warps, stages)
        if parts * block <= max(block, problem.S) and fits(tiles, problem, device):
            yield tiles


def _key(pass_name: str, *, B: int, heads: int, kv_heads: int, S: int, head_dim: int, dtype: str, **_: Any) -> tuple:
    """Lengths count up to the next power of two, so that a longer cache needs no new tuning."""
    return pass_name, dtype, power_of_2(B), heads, kv_heads, power_of_2(S), head_dim


def _cannot(problem: Problem, device: Device) -> str:
    """Why the kernel cannot run this; "" if it can."""
    if problem.head_dim > _WIDEST:
        return f"the kernel has a head_dim of at most {_WIDEST}, not {problem.head_dim}"
    if not device.interpret and not fits(heuristic("fwd", problem, device), problem, device):
        return f"{problem.held[0]} queries of a key head do not fit into the shared memory"
    return ""


def _auto(problem: Problem, device: Device) -> str:
    return "pallas" if device.has(AMPERE) and not _cannot(problem, device) else "xla"


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    if call.backend == "pallas" and (why := _cannot(call.problem, call.device)):
        raise NotImplementedError(f"backend='pallas' cannot run this: {why}. Use backend='auto' or 'xla'.")
    return {}


PLANNER = Planner(Plan, Tiles, PASSES, heuristic, _search, _key, auto=_auto, others=_others)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
