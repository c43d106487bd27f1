"""Plans of the AdaLN ops: how rows are cut into programs, what the forward saves, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax

from jaxops._lib.arrays.powers import covering, power_of_2
from jaxops._lib.planning.device import Capability, Device
from jaxops._lib.planning.plans import ADA, AMPERE, BasePlan, Call, Planner, check_fields

PASSES = ("fwd", "bwd")
PER = ("sequence", "row")
STATS = {"layer": ("mean", "rstd"), "rms": ("rstd",)}  # of each row, float32


class Arrays(NamedTuple):
    """The operands of a call; gradients come in the same places.

    Attributes:
      x: [T, D]; the residual, where there is a gate.
      h: [T, D], what the gate lets into the residual; None without gate.
      gate, scale, shift: [B, D], or [T, D] with Spec.per_row; gate is None without gated residual, the others without
        norm.
      weight, bias: [D] or None.
      offsets: [B + 1] int32.
    """

    x: jax.Array
    h: jax.Array | None
    gate: jax.Array | None
    scale: jax.Array | None
    shift: jax.Array | None
    weight: jax.Array | None
    bias: jax.Array | None
    offsets: jax.Array


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      norm: "layer", "rms", or None where only the gated residual is wanted.
      epsilon: added to the variance (or mean square).
      activation: of the normalised and affine row, before the modulation.
      per_row: gate, scale and shift have a vector for every row instead of one for every sequence.
      out_dtype: name of y's dtype.
    """

    norm: Literal["layer", "rms"] | None
    epsilon: float
    activation: str | None
    per_row: bool
    out_dtype: str


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs. All numbers are powers of two.

    Attributes:
      rows: rows of one sequence that a program owns; bwd sums over them before it writes its part of a sequence's sum.
      step: rows that it holds in registers at a time, at most `rows`.
      block: columns of one register array; a row is cdiv(D, block) of them.
      warps: warps a program, at most 32.
      ahead: load a step's rows during the step before.
    """

    rows: int
    step: int
    block: int
    warps: int
    ahead: bool = False

    def __post_init__(self):
        check_fields(self, "rows", "step", "block", power_of_2=True)
        check_fields(self, "warps", power_of_2=True, most=32)
        if self.step > self.rows:
            raise ValueError(f"Tiles.step={self.step} must be at most Tiles.rows={self.rows}.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward and of the backward pass; save_stats: a differentiated forward writes each row's mean and
    1 / standard deviation for the backward, which otherwise computes them again."""

    backend: Literal["pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None
    save_stats: bool | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: [T, D] in B sequences, its dtype, whether a gated residual precedes the norm, and whether
    the result is FP8."""

    T: int
    D: int
    B: int
    dtype: str
    gated: bool = False
    fp8: bool = False


def _key(pass_name: str, *, D: int, dtype: str, gated: bool, **_: Any) -> tuple:
    """The exact width, which decides how a row is cut. The number of rows only makes more programs: see `_spread`."""
    return pass_name, D, dtype, gated


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    return tiles if tiles is getattr(call.plan, pass_name) else _spread(pass_name, tiles, call.problem, call.device)


_TUNED_ROWS = 65_536  # T of the tuned rows: from here on their tiles stay as they are
# Rows that a program of bwd could have done instead of finding its tile, loading the modulation, and writing two
# float32 sums that another kernel reads.
_PROGRAM_ROWS = 8


def _spread(pass_name: str, tiles: Tiles, problem: Problem, device: Device) -> Tiles:
    """Fewer rows a program where all of them would make fewer than 2,048 warps, 16 a multiprocessor of an H200; in fwd
    without a gate down to 8 steps, where they would make fewer than 6,336, 48 a multiprocessor. In bwd without a gate,
    whose programs each write a part of the sums, 300 programs are enough where sequences are long; and fewer rows where
    the last of a few waves of programs would be nearly empty. docs/notes/2026-11-28_tiles_of_row_ops.md has the times.
    """
    T, least = problem.T, max(tiles.step, {"fwd": 4, "bwd": 16}[pass_name])
    few_suffice = pass_name == "bwd" and not problem.gated and T >= 256 * problem.B
    long = 8 * tiles.step if pass_name == "fwd" and not problem.gated else tiles.rows

    def enough(count: int) -> bool:
        return (few_suffice and count >= 300) or count * tiles.warps >= (6336 if tiles.rows > long else 2048)

    while tiles.rows > least and not enough(-(-T // tiles.rows)):
        tiles = dataclasses.replace(tiles, rows=tiles.rows // 2)
    if pass_name == "fwd" or tiles.rows <= least or T >= _TUNED_ROWS:
        return tiles
    resident = device.cores * _resident(tiles, problem)

    def time(rows: int) -> int:
        programs = -(-T // rows) + problem.B // 2  # a sequence's head is half as long as a tile, on average
        return -(-programs // resident) * (rows + _PROGRAM_ROWS)

    fewer = min((tiles.rows >> i for i in range(tiles.rows.bit_length()) if tiles.rows >> i >= least), key=time)
    return dataclasses.replace(tiles, rows=fewer) if time(fewer) < 0.95 * time(tiles.rows) else tiles


def _resident(tiles: Tiles, problem: Problem) -> int:
    """Programs of bwd that a multiprocessor's registers hold. A thread has 16, and for each of its columns about 9,
    with a gate 12 (ptxas for sm_90: D 1024, 1536, 2432 and 3072, in 6 to 24 columns a thread)."""
    columns = tiles.step * -(-problem.D // tiles.block) * tiles.block / (32 * tiles.warps)
    registers = min(256, -(-int(16 + (12 if problem.gated else 9) * columns) // 8) * 8)
    return max(1, 65_536 // (32 * tiles.warps * registers))


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    if call.backend == "xla" or call.plan.save_stats is not None:
        return {"save_stats": call.plan.save_stats if call.backend != "xla" else None}
    # With a gate the backward is 5 to 7 % faster, for 1 % more forward; without a gate, saving gains nothing.
    return {"save_stats": call.problem.gated and call.problem.D >= 2048}


def _block(D: int, most: int) -> int:
    """Columns of one register array: under 256, a lane has no 16-byte load."""
    return covering(D, min(256, max(32, power_of_2(D))), most)


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """After measurements at D 1024 to 6144 (H200, 2026-11-21). A step is one row (several, where rows are short), and
    the next one is loaded ahead. fwd takes 16 rows a program; bwd 64, which leaves few parts of its sums to add up."""
    block = _block(problem.D, 4096 if problem.D >= 16384 else 1024)
    columns = -(-problem.D // block) * block
    warps = 1 << max(0, min(4 if pass_name == "fwd" else 5, (columns // 512 - 1).bit_length() if columns > 512 else 0))
    if 2048 < columns <= 2560 and (pass_name == "bwd" or not problem.gated):
        warps = 4  # 8 % faster than 8
    rows = 16 if pass_name == "fwd" else 64
    tiles = Tiles(rows, max(1, min(8, 512 // max(columns, 1))), block, warps, ahead=True)
    return _spread(pass_name, tiles, problem, device)


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles that hold 8 to 64 columns a thread."""
    owned, most = ((8, 16, 32), 64) if pass_name == "fwd" else ((64, 128), 48)
    for rows, step, size, warps, ahead in itertools.product(
        owned, (1, 2, 4), (512, 1024, 4096), (1, 2, 4, 8, 16), (True, False)
    ):
        block = _block(problem.D, size)
        held = step * -(-problem.D // block) * block / (32 * warps)
        if 8 <= held <= most and block >= 128 * warps:
            yield Tiles(rows, step, block, warps, ahead)


def _needs(problem: Problem) -> Capability:
    return ADA if problem.fp8 else AMPERE


PLANNER = Planner(Plan, Tiles, PASSES, heuristic, _search, _key, _needs, fit=_fit, others=_others, symbolic=("T",))
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
