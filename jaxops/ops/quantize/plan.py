"""Every choice that `quantize` makes: how the tensor is cut into programs, backend."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax

from jaxops._lib.device import Device
from jaxops._lib.fp8 import BLOCK
from jaxops._lib.plans import ADA, BasePlan, choose_backend, plan_device
from jaxops._lib.powers import check_powers_of_2, power_of_2

PASSES = ("cast", "amax")
LAYOUTS = ("row", "col", "both")
WHOLE_ROW = 16_384  # columns up to which one program holds a row, finds its scale and casts it


class Arrays(NamedTuple):
    """The operands of a call.

    Attributes:
      x: [G, M, K], a stack; G is 1 where there is none.
      offsets: [groups + 1] int32 or None; then G is 1.
      amax: [G] float32, what a tensorwise scale is made from instead of x; None where it is x's own.
      words: [2] int32, the key of stochastic rounding; None rounds to nearest.
    """

    x: jax.Array
    offsets: jax.Array | None = None
    amax: jax.Array | None = None
    words: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      scaling: one of `jaxops._lib.fp8.SCALINGS`.
      fp8: name of the values' dtype.
      layouts: "row", "col" or "both".
      pow2: scales are powers of two.
      measure: give x's largest magnitude, too, beside a tensorwise scale from another.
    """

    scaling: str
    fp8: str
    layouts: str = "row"
    pow2: bool = False
    measure: bool = False

    @property
    def row(self) -> bool:
        return self.layouts != "col"

    @property
    def col(self) -> bool:
        return self.layouts != "row"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      rows: rows of a tile; a power of two. 128 where a scale or a padded group spans 128 rows.
      cols: columns of a tile; a power of two. A multiple of 128 where 128 columns share a scale. Where a row does, and it fits, no
        other pass looks for its largest magnitude.
      patch: consecutive rows that one thread holds of its columns, and so the bytes of its stores to values_t. A power of two.
      near: neighbouring threads that hold patches one below the other, rows of values_t that they write together. A power of two.
      warps: warps a program (1, 2, 4, 8, 16 or 32).
      programs: of a pass that finds a whole tensor's largest magnitude: how many walk down the tensor together; so many that all of them run at once.
      panel: rows of tiles that are worked on together, column of tiles by column, so that neighbours share lines of values_t in L2.
    """

    rows: int
    cols: int
    patch: int = 1
    near: int = 1
    warps: int = 4
    panel: int = 1
    programs: int = 528

    def __post_init__(self):
        check_powers_of_2(self, "rows", "cols", "patch", "near", "warps", "panel")
        if self.patch * self.near > self.rows:
            raise ValueError(
                f"Tiles.patch={self.patch} times Tiles.near={self.near} must be at most Tiles.rows={self.rows}."
            )
        if self.programs < 1:
            raise ValueError(f"Tiles.programs={self.programs} must be positive.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`; the xla backend needs none of it.

    Attributes:
      backend: "pallas" or "xla".
      cast: tiles of the pass that writes the values.
      amax: tiles of the pass that finds the largest magnitudes first, where there is one: tensorwise, rowwise in columns or of very long rows.
    """

    backend: Literal["pallas", "xla"] = "pallas"
    cast: Tiles | None = None
    amax: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape [M, K] (of each tensor of a stack), its dtype, what shares a scale, and the layouts."""

    M: int
    K: int
    dtype: str
    scaling: str = "block_1x128"
    layouts: str = "row"
    ragged: bool = False

    @property
    def whole_row(self) -> bool:
        """Whether one program holds a row: nothing but its row's largest magnitude is needed, and the row is short enough."""
        return self.scaling == "rowwise" and self.layouts == "row" and self.K <= WHOLE_ROW

    @property
    def looks_first(self) -> bool:
        """Whether a pass over the tensor finds its largest magnitudes before the cast, where none are given."""
        return self.scaling == "tensorwise" or (self.scaling == "rowwise" and not self.whole_row)

    @property
    def tall(self) -> bool:
        """Whether a tile is 128 rows: they share a scale, or are a block of a padded group, or are written transposed."""
        return self.layouts != "row" or self.scaling == "block_128x128"


def key_of(pass_name: str, K: int, dtype: str, scaling: str, layouts: str) -> tuple:
    """What tuned rows are looked up by. A tile of 128 columns is the same for every width; of whole rows the width's power of two counts."""
    width = power_of_2(K) if scaling == "rowwise" and layouts == "row" else 0
    return (pass_name, width, dtype, scaling, layouts)


def key_of_row(row: dict) -> tuple:
    return key_of(row["pass"], row["K"], row["dtype"], row["scaling"], row["layouts"])


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, then a tuned row's, then the heuristic's.

    Args:
      problem: static shape, dtype, scaling and layouts.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows (`jaxops.tuning.tuned_rows`), best source first.
      backend: "auto" takes Pallas on a GPU with FP8 instructions and xla elsewhere; "pallas" or "xla" is obeyed. On a CPU, "pallas" runs in Pallas'
        interpreter.
      plan: used as it is; only what it leaves None is filled.

    Raises:
      ValueError: an unknown backend, one that contradicts the plan, or tiles that cannot hold what shares a scale.
      NotImplementedError: pallas on a TPU, or on a GPU older than compute capability 8.9.
    """
    device = plan_device(Plan, plan, device)
    backend = choose_backend(device, backend, plan, needs=ADA)
    if backend == "xla":
        return Plan("xla", device=device)
    p, table = problem, {}
    for row in rows:
        table.setdefault(key_of_row(row), row)
    chosen = {}
    for name in PASSES:
        explicit = getattr(plan, name) if plan is not None else None
        row = table.get(key_of(name, p.K, p.dtype, p.scaling, p.layouts))
        chosen[name] = explicit or (Tiles(**row["tile"]) if row else heuristic(name, problem))
        _check(name, chosen[name], problem)
    return Plan("pallas", **chosen, device=device)


def _check(name: str, tile: Tiles, p: Problem) -> None:
    what = f"Plan.{name}={tile}"
    if name == "amax":
        return
    if p.tall and tile.rows != BLOCK:
        raise ValueError(f"{what}: rows must be {BLOCK} with scaling={p.scaling!r}, layouts={p.layouts!r}.")
    if p.tall and tile.cols > BLOCK:
        raise ValueError(f"{what}: cols must be at most {BLOCK} with scaling={p.scaling!r}, layouts={p.layouts!r}.")
    blocks = p.scaling == "block_128x128" or (p.scaling == "block_1x128" and p.layouts != "col")
    if blocks and tile.cols % BLOCK:
        raise ValueError(
            f"{what}: cols must be a multiple of {BLOCK} with scaling={p.scaling!r}, layouts={p.layouts!r}."
        )


def heuristic(pass_name: str, problem: Problem) -> Tiles:
    """A tile for what nobody tuned: 64 to 128 elements a thread, all of them loaded at once."""
    if pass_name == "amax":
        return Tiles(16, 512, warps=4)
    if problem.tall:
        if problem.layouts == "row":
            return Tiles(BLOCK, BLOCK, warps=8, panel=8)
        # H200, 2026-11-21, 8192 x 14336, both layouts: patches of 32 bytes, 1x128 2,945 instead of 2,414 GB/s.
        return Tiles(
            BLOCK,
            BLOCK,
            32,
            2,
            4 if problem.scaling.startswith("block") else 16,
            panel=8 if problem.scaling.startswith("block") else 1,
        )
    if problem.whole_row:
        cols = max(BLOCK, power_of_2(problem.K))
        return Tiles(max(1, 8192 // cols), cols, warps=max(4, cols // 2048))
    return Tiles(16, 512, warps=4)


def candidates(pass_name: str, problem: Problem) -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's first."""
    found = [heuristic(pass_name, problem)]
    if pass_name == "cast" and problem.tall:
        patches = (16, 32, 64) if problem.layouts != "row" else (1,)
        nears = (1, 2, 4) if problem.layouts != "row" else (1,)
        tiles = (
            Tiles(BLOCK, BLOCK, patch, near, warps, panel)
            for patch, near, warps, panel in itertools.product(patches, nears, (4, 8, 16), (1, 8, 64))
            if patch * near <= BLOCK
        )
    elif pass_name == "cast" and problem.whole_row:
        cols = max(BLOCK, power_of_2(problem.K))
        tiles = (
            Tiles(rows, cols, warps=warps) for rows, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))
        )
    else:
        tiles = (
            Tiles(rows, cols, warps=warps)
            for rows, cols, warps in itertools.product((8, 16, 32, 64), (128, 256, 512, 1024), (2, 4, 8))
        )
    for tile in tiles:
        if 32 <= tile.rows * tile.cols / (32 * tile.warps) <= 128 and tile not in found:
            found.append(tile)
    return found
