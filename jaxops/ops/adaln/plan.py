"""Every choice that the AdaLN ops make: how rows are cut into programs, what is saved, backend."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax

from jaxops._lib.device import Device
from jaxops._lib.plans import ADA, AMPERE, BasePlan, choose_backend, plan_device
from jaxops._lib.powers import check_powers_of_2, power_of_2

PASSES = ("fwd", "bwd")
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh")
PER = ("sequence", "row")
STATS = {"layer": ("mean", "rstd"), "rms": ("rstd",)}  # of each row, float32
Pass = Literal["fwd", "bwd"]


class Arrays(NamedTuple):
    """The operands of a call; gradients come in the same places.

    Attributes:
      x: [T, D]; the residual, where there is a gate.
      h: [T, D], what the gate lets into the residual; None without gate.
      gate, scale, shift: [B, D], or [T, D] with Spec.per_row; gate is None without gated residual, the others without norm.
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
    activation: Literal["silu", "gelu", "gelu_tanh"] | None
    per_row: bool
    out_dtype: str


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      rows: rows of one sequence that a program owns; bwd sums over them before it writes a part of a sequence's sum. A power of two.
      step: rows that it holds in registers at a time. A power of two, at most rows.
      block: columns of one register array; a row is cdiv(D, block) of them. A power of two.
      warps: warps a program (1, 2, 4, 8, 16 or 32).
      ahead: load a step's rows while the step before is worked on.
    """

    rows: int
    step: int
    block: int
    warps: int
    ahead: bool = False

    def __post_init__(self):
        check_powers_of_2(self, "rows", "step", "block", "warps")
        if self.step > self.rows:
            raise ValueError(f"Tiles.step={self.step} must be at most Tiles.rows={self.rows}.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`; the xla backend needs none of it.

    Attributes:
      backend: "pallas" or "xla".
      fwd: rows of the forward pass.
      bwd: rows of the backward pass.
      save_stats: whether a differentiated forward writes each row's mean and 1 / standard deviation for the backward, or the backward finds them again.
    """

    backend: Literal["pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None
    save_stats: bool | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape [T, D] in B sequences, its dtype, whether a gated residual goes before the norm, and whether
    the result is FP8."""

    T: int
    D: int
    B: int
    dtype: str
    gated: bool = False
    fp8: bool = False


def key_of(pass_name: str, D: int, dtype: str, gated: bool) -> tuple:
    """What tuned rows are looked up by. The width as it is: it decides how a row is cut. The number of rows only makes more programs (see `_spread`)."""
    return (pass_name, D, dtype, gated)


def key_of_row(row: dict) -> tuple:
    return key_of(row["pass"], row["D"], row["dtype"], row["gated"])


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's rows, then a tuned row's, then the heuristic's.

    Args:
      problem: static shape and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows (`jaxops.tuning.tuned_rows`), best source first.
      backend: "auto" takes Pallas on a GPU and xla elsewhere; "pallas" or "xla" is obeyed. On a CPU, "pallas" runs in Pallas' interpreter.
      plan: used as it is; only what it leaves None is filled.
    """
    device = plan_device(Plan, plan, device)
    backend = choose_backend(device, backend, plan, needs=ADA if problem.fp8 else AMPERE)
    if backend == "xla":
        return Plan("xla", device=device)
    p, table = problem, {}
    for row in rows:
        table.setdefault(key_of_row(row), row)
    chosen = {}
    for name in PASSES:
        explicit = getattr(plan, name) if plan is not None else None
        row = table.get(key_of(name, p.D, p.dtype, p.gated))
        chosen[name] = explicit or (_spread(name, Tiles(**row["rows"]), problem.T) if row else heuristic(name, problem))
    save_stats = plan.save_stats if plan is not None else None
    if save_stats is None:
        # H200, 2026-11-21, bfloat16: with a gate 995 -> 925 us (D 4096) and 749 -> 711 (D 3072) backward for 1 % more forward; without, nothing.
        save_stats = problem.gated and problem.D >= 2048
    return Plan("pallas", **chosen, save_stats=save_stats, device=device)


def _spread(pass_name: str, rows: Tiles, T: int) -> Tiles:
    """With fewer rows a program where there are not enough in all for 2,048 warps, 16 on each of an H200's multiprocessors.

    H200, 2026-11-21, forward and backward of [16384, 1024]: 64 rows a program 80 us, 16 rows 60 us; [4096, 3072]: 92 and 59 us.
    """
    least = max(rows.step, {"fwd": 4, "bwd": 16}[pass_name])
    while rows.rows > least and -(-T // rows.rows) * rows.warps < 2048:
        rows = dataclasses.replace(rows, rows=rows.rows // 2)
    return rows


def _block(D: int, most: int) -> int:
    """The widest power of two, from 256 to `most`, that covers D with the fewest columns to spare. Narrower ones have no 16-byte load for each lane."""
    least = min(256, max(32, power_of_2(D)))
    sizes = [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
    return min(sizes, key=lambda block: (-(-D // block) * block, -block))


def heuristic(pass_name: str, problem: Problem) -> Tiles:
    """Tiles for a width that nobody tuned, after what was measured at D 1024 to 6144 (H200, 2026-11-21).

    A step is one row (several, where they are short), the next one on its way. fwd takes 16 rows a program; bwd 64, so that few parts of its sums are
    left to add up.
    """
    block = _block(problem.D, 4096 if problem.D >= 16384 else 1024)
    columns = -(-problem.D // block) * block
    warps = 1 << max(0, min(4 if pass_name == "fwd" else 5, (columns // 512 - 1).bit_length() if columns > 512 else 0))
    rows = Tiles(16 if pass_name == "fwd" else 64, max(1, min(8, 512 // max(columns, 1))), block, warps, ahead=True)
    return _spread(pass_name, rows, problem.T)


def candidates(pass_name: str, problem: Problem) -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those that hold 8 to 64 columns a thread."""
    found, D = [heuristic(pass_name, problem)], problem.D
    owned, most = ((8, 16, 32), 64) if pass_name == "fwd" else ((64, 128), 48)
    for rows, step, size, warps, ahead in itertools.product(
        owned, (1, 2, 4), (512, 1024, 4096), (1, 2, 4, 8, 16), (True, False)
    ):
        block = _block(D, size)
        held = step * -(-D // block) * block / (32 * warps)
        tiles = Tiles(rows, step, block, warps, ahead)
        if 8 <= held <= most and block >= 128 * warps and tiles not in found:
            found.append(tiles)
    return found
