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
    """How one pass is cut into programs. step, block and warps are powers of two.

    Attributes:
      rows: rows that a program owns, of whatever sequences; bwd sums over those of each.
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
        check_fields(self, "rows")
        check_fields(self, "step", "block", power_of_2=True)
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
    """The exact width, which decides how a row is cut. The number of rows only makes more programs: see `one_wave`."""
    return pass_name, D, dtype, gated


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    return tiles if tiles is getattr(call.plan, pass_name) else one_wave(pass_name, tiles, call.problem, call.device)


def one_wave(pass_name: str, tiles: Tiles, problem: Problem, device: Device) -> Tiles:
    """As many rows a program as make one wave. Programs of equal rows end together, and a further wave costs a start,
    in bwd more parts of sums too. docs/notes/2026-11-28_tiles_of_row_ops.md has the times."""
    programs = device.cores * _resident(pass_name, tiles, problem)
    rows = max(-(-problem.T // programs), {"fwd": 4, "bwd": 16}[pass_name])
    return dataclasses.replace(tiles, rows=-(-rows // tiles.step) * tiles.step)


def _resident(pass_name: str, tiles: Tiles, problem: Problem) -> int:
    """Programs that a multiprocessor's registers hold. A thread has 12, and about so many for each of a row's arrays
    and for each of its columns (ptxas for sm_90: D 768 to 8192, in 5 to 32 columns a thread)."""
    array, column = ((2, 7) if problem.gated else (3, 3.5)) if pass_name == "fwd" else (2, 12 if problem.gated else 9)
    arrays = -(-problem.D // tiles.block)
    columns = tiles.step * arrays * tiles.block / (32 * tiles.warps)
    registers = min(256, -(-int(12 + array * arrays + column * columns) // 8) * 8)
    return max(1, 65_536 // (32 * tiles.warps * registers))


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    if call.backend == "xla" or call.plan.save_stats is not None:
        return {"save_stats": call.plan.save_stats if call.backend != "xla" else None}
    # Forward and backward together, D 5120 with a gate: 439 us, without 486; D 2432: 472 and 447.
    return {"save_stats": (5120 if call.problem.gated else 6144) <= call.problem.D}


def _block(D: int, most: int) -> int:
    """Columns of one register array: under 256, a lane has no 16-byte load."""
    return covering(D, min(256, max(32, power_of_2(D))), most)


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """After measurements at D 1024 to 8192 (H200, 2026-11-28). A step is one row (several, where rows are short), of
    mostly 8 to 16 columns a thread. The next step is loaded ahead, but where registers would be spilled."""
    D, fwd = problem.D, pass_name == "fwd"
    columns = -(-D // (narrow := _block(D, 1024))) * narrow
    plain = not (fwd or problem.gated)
    if fwd or columns <= 2560:
        # At most 16 columns a thread; with a gate 12 in bwd, which holds more of each.
        warps = power_of_2(-(-columns // (512 if fwd or plain else 384)))
        warps = 1 if fwd and columns <= 1024 else min(warps, 16)
        if 2048 < columns <= 2560 and not (fwd and problem.gated):
            warps = 4  # 8 % faster than 8
        block = _block(D, 1024 if plain else min(4096, max(1024, 256 * warps)))  # 8 columns a thread: 16-byte loads
    else:
        # A row's sums wait for all warps: by twice as many 6 to 22 % slower at D 4096 and 7168.
        block = _block(D, 1024 if plain else 2048)
        warps = min(32, max(8, block // 128, power_of_2(-(-columns // 1024))))
        warps = 4 if plain and 4096 <= columns < 5120 else warps
    step = max(1, min(8, 512 // max(columns, 1)))
    if fwd and not problem.gated and 6144 < columns <= 8192:
        step = 2  # a multiprocessor has registers for one program, which loads two rows at a time
    ahead = fwd or not problem.gated or D <= 4096
    return one_wave(pass_name, Tiles(step, step, block, warps, ahead), problem, device)


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles that hold 8 to 64 columns a thread, in one wave."""
    most = 64 if pass_name == "fwd" else 48
    for step, size, warps, ahead in itertools.product(
        (1, 2, 4), (512, 1024, 2048, 4096), (1, 2, 4, 8, 16), (True, False)
    ):
        block = _block(problem.D, size)
        held = step * -(-problem.D // block) * block / (32 * warps)
        if 8 <= held <= most and block >= 128 * warps:
            yield one_wave(pass_name, Tiles(step, step, block, warps, ahead), problem, device)


def _needs(problem: Problem) -> Capability:
    return ADA if problem.fp8 else AMPERE


PLANNER = Planner(
    Plan, Tiles, PASSES, heuristic, _search, _key, _needs, fit=_fit, others=_others, symbolic=("T",), splits=True
)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
