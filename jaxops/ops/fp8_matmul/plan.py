"""Every choice that the FP8 products make: where the casts are done, which kernel multiplies, how it is cut into programs, backend."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jaxops._lib.device import Device, check_gluon, runs_gluon
from jaxops._lib.fp8 import BLOCK
from jaxops._lib.plans import ADA, BasePlan, choose_backend, plan_device
from jaxops._lib.powers import power_of_2
from jaxops.ops.fp8_matmul.recipes import RECIPES

PASSES = ("fwd", "dgrad", "wgrad")
BACKENDS = ("triton", "pallas", "xla")
HOPPER_TILES = (
    (128, 128),
    (192, 128),
    (128, 256),
)  # two consumers, three, and two where the tensor core sums by itself


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one product is cut into programs. The step along the contracted dimension is 128, as many numbers as share a scale.

    Attributes:
      kernel: "triton" (Hopper's own instructions), "pallas", or "xla", which has no tiles and becomes cuBLASLt where the scales are tensorwise.
      bm: rows of a program's output tile. A power of two, at least 16; "triton": 128 or 192.
      bn: columns of a program's output tile. A power of two, at least 16; "triton": 128, or 256 (by 128) where the tensor core does all of the sum.
      warps: warps a program ("pallas").
      stages: depth of the load pipeline; each stage holds one step of both operands in shared memory.
      panel: output tiles are visited in panels of this many tile rows, so that programs that run together share operands in L2.
    """

    kernel: Literal["triton", "pallas", "xla"] = "pallas"
    bm: int = 128
    bn: int = 128
    warps: int = 8
    stages: int = 3
    panel: int = 8

    def __post_init__(self):
        if self.kernel not in BACKENDS:
            raise ValueError(f"Tiles.kernel={self.kernel!r} must be one of {', '.join(map(repr, BACKENDS))}.")
        if self.kernel == "triton":
            if (self.bm, self.bn) not in HOPPER_TILES:
                raise ValueError(
                    f"Tiles of {self.bm}x{self.bn}: the triton kernel has {', '.join(f'{bm}x{bn}' for bm, bn in HOPPER_TILES)}."
                )
        else:
            for name in ("bm", "bn"):
                if (size := getattr(self, name)) < 16 or size & (size - 1):
                    raise ValueError(f"Tiles.{name}={size} must be a power of two and at least 16.")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"Tiles.warps={self.warps} must be 1, 2, 4, 8 or 16.")
        if self.panel < 1:
            raise ValueError(f"Tiles.panel={self.panel} must be at least 1.")
        if self.stages < (
            least := 2 if self.kernel == "triton" else 1
        ):  # the triton kernel starts a step before it gives back the one before
            raise ValueError(f"Tiles.stages={self.stages} must be at least {least}.")

    @property
    def shared_bytes(self) -> int:
        """Shared memory that the load pipeline takes, and what "triton" stores its tiles from, in bytes."""
        pipeline = self.stages * BLOCK * (self.bm + self.bn)
        return (
            pipeline
            if self.kernel != "triton"
            else pipeline + self.bm * self.bn * 2 + self.stages * 4 * (2 * self.bm + self.bn) + 256
        )


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. A pass left None is filled by `make_plan`; the xla backend needs no tiles.

    Attributes:
      backend: "triton", "pallas" or "xla". The casts of "triton" are Pallas kernels.
      cast: where x is cast for the forward: "before" the product, in one pass that writes what the backward needs too, or "inside" it ("triton",
        block scales, dense, bfloat16: no pass over x, but every 192 columns of the result cast it again; slower everywhere measured on an H200).
        w and the gradient are cast before.
      fwd: tiles of the forward pass.
      dgrad: tiles of the gradient of x.
      wgrad: tiles of the gradient of w.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    cast: Literal["before", "inside"] = "before"
    fwd: Tiles | None = None
    dgrad: Tiles | None = None
    wgrad: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the forward's static shape `x[M, K] @ w[K, N]`, the recipe, x's dtype; G groups of rows, each with its own w, or 0."""

    M: int
    K: int
    N: int
    recipe: str
    dtype: str
    G: int = 0


def key_of(pass_name: str, M: int, K: int, N: int, G: int, recipe: str) -> tuple:
    """What tuned rows are looked up by: sizes count up to the next power of two, so that a new sequence length needs no new tuning."""
    return (pass_name, recipe, *(power_of_2(size) for size in (M, K, N, G)))


def key_of_row(row: dict) -> tuple:
    return key_of(row["pass"], row["M"], row["K"], row["N"], row["G"], row["recipe"])


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, then a tuned row's, then the heuristic's.

    Args:
      problem: static shape, recipe and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows, best source first.
      backend: "auto" takes triton on Hopper where jax-triton is installed, pallas on other NVIDIA GPUs, xla elsewhere; the others are obeyed.
      plan: used as it is; only passes that it leaves None are filled.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan; a cast inside where there is none.
      NotImplementedError: a GPU without FP8, the triton backend elsewhere than on Hopper.
    """
    device = plan_device(Plan, plan, device)
    if backend == "auto" and plan is None and runs_gluon(device):
        backend = "triton"
    backend = choose_backend(device, backend, plan, BACKENDS, needs=ADA)
    if plan is not None and plan.cast == "inside" and not casts_inside(problem, backend):
        raise ValueError(
            f"cast='inside' has a kernel for backend 'triton', block scales, bfloat16 and no groups; this is {backend!r}, {problem.recipe!r}, "
            f"{problem.dtype}{', grouped' if problem.G else ''}: write cast='before'."
        )
    if backend == "xla":
        return Plan("xla", device=device)
    if backend == "triton":
        check_gluon(device)
    plan = plan or Plan(backend)  # pyright: ignore[reportArgumentType]  # choose_backend has checked it
    table = {}
    for row in rows:
        table.setdefault(key_of_row(row), Tiles(**row["tiles"]))
    chosen = {}
    for name in PASSES:
        tuned = table.get(key_of(name, problem.M, problem.K, problem.N, problem.G, problem.recipe))
        if tuned is not None and tuned.kernel != backend:
            tuned = None  # measured for the other backend
        chosen[name] = getattr(plan, name) or tuned or heuristic(name, problem, backend, device.cores)
    return dataclasses.replace(plan, **chosen, device=device)


def casts_inside(problem: Problem, backend: str) -> bool:
    """Whether the forward can cast x inside its product."""
    return (
        backend == "triton"
        and problem.G == 0
        and problem.dtype == "bfloat16"
        and RECIPES[problem.recipe].x.scaling == "block_1x128"
    )


def heuristic(pass_name: str, problem: Problem, backend: str, cores: int = 132) -> Tiles:
    """What runs where nothing was measured; cores: multiprocessors of the device."""
    out_rows, out_cols = {
        "fwd": (problem.M, problem.N),
        "dgrad": (problem.M, problem.K),
        "wgrad": (problem.K, problem.N),
    }[pass_name]
    if backend == "triton":
        return _heuristic_triton(pass_name, problem, out_rows, out_cols, cores)

    def cover(size: int) -> int:
        return min(128, max(16, power_of_2(size)))

    bm, bn = cover(out_rows), cover(out_cols)
    return Tiles("pallas", bm, bn, 8 if bm * bn == 128 * 128 else 4)


# The rate of tiles of 192 rows over that of 128 rows, where both fill the card, by the kind of scales. H200, 2026-11-21, 8192^3, interleaved: 128x128 blocks
# 786 against 814 us; 1x128 by 1x128 1,000 against 1,063 us; sums of one scale or of vectors are level.
_GAINS = {"block_128x128": 1.04, "block_1x128": 1.06}


def _heuristic_triton(pass_name: str, problem: Problem, out_rows: int, out_cols: int, cores: int) -> Tiles:
    recipe, groups = RECIPES[problem.recipe], problem.G or 1
    if pass_name in recipe.fast and out_cols > 128:
        return Tiles("triton", 128, 256, stages=3, panel=16)
    rows = out_rows if pass_name == "wgrad" else -(-out_rows // groups)  # of a group, were all as large
    gain = _GAINS.get((recipe.dy if pass_name == "wgrad" else recipe.w).scaling, 1.0)

    def time(bm: int) -> float:
        waves = -(-groups * -(-rows // bm) * -(-out_cols // 128) // cores)
        return waves * bm / (gain if bm == 192 else 1)

    if time(192) < time(128):
        return Tiles("triton", 192, 128, stages=4)
    # Scales beside the tiles leave room for four stages. Panels of 16 rows were 1 to 2 % faster than of 8, over groups of 256 and 512 rows 1 % slower.
    return Tiles("triton", 128, 128, stages=4 if recipe.x.scaling == "block_1x128" else 5, panel=8 if problem.G else 16)


def candidates(pass_name: str, problem: Problem, device: Device, backend: str = "triton") -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those that fit the device's shared memory."""
    found = [heuristic(pass_name, problem, backend, device.cores)]
    if backend == "triton":
        fast = pass_name in RECIPES[problem.recipe].fast
        shapes = (
            ((128, 256, 8, (3,)), (128, 128, 8, (4, 5))) if fast else ((128, 128, 8, (4, 5)), (192, 128, 8, (3, 4)))
        )
    else:
        shapes = tuple(
            (bm, bn, w, (2, 3, 4))
            for bm, bn, w in (
                (128, 128, 8),
                (128, 128, 4),
                (128, 64, 4),
                (64, 128, 4),
                (64, 64, 4),
                (32, 128, 4),
                (16, 128, 4),
            )
        )
    for bm, bn, warps, depths in shapes:
        for stages in depths:
            for panel in (8, 4, 16, 32) if backend == "triton" else (8,):
                tiles = Tiles("triton" if backend == "triton" else "pallas", bm, bn, warps, stages, panel)
                if tiles not in found and tiles.shared_bytes <= device.shared_bytes:
                    found.append(tiles)
    return found
