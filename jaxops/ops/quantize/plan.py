"""Plans of `quantize`: how the tensor is cut into programs, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.numerics.fp8 import BLOCK
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import ADA, BasePlan, Call, Planner, check_fields

PASSES = ("cast", "amax")
LAYOUTS = ("row", "col", "both")
WHOLE_ROW = 16_384  # columns up to which one program holds a row, finds its scale and casts it
WHOLE_COLUMN = 1 << 16  # as Tiles.panel: tiles are visited column by column through all rows


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs. All numbers except `programs` are powers of two.

    Attributes:
      rows: rows of a tile: 128 where a scale or a padded group spans 128 rows.
      cols: columns of a tile: a multiple of 128 where 128 columns share a scale. Where a row shares one and fits, the
        cast itself finds the row's largest magnitude.
      patch: consecutive rows that one thread holds of its columns: the bytes of its stores to values_t.
      near: neighbouring threads that hold patches one below the other: their stores to a row of values_t are adjacent.
      warps: warps a program, at most 32.
      programs: of the pass that finds the largest magnitudes of computed tensors; at most as many as run at once.
      panel: rows of tiles that are visited column by column, so that neighbours share lines of values_t in L2.
    """

    rows: int
    cols: int
    patch: int = 1
    near: int = 1
    warps: int = 4
    panel: int = 1
    programs: int = 528

    def __post_init__(self):
        check_fields(self, "rows", "cols", "patch", "near", "panel", power_of_2=True)
        check_fields(self, "warps", power_of_2=True, most=32)
        check_fields(self, "programs", least=1)
        if self.patch * self.near > self.rows:
            raise ValueError(
                f"Tiles.patch={self.patch} times Tiles.near={self.near} must be at most Tiles.rows={self.rows}."
            )


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the pass that writes the values, and of the pass that finds the largest magnitudes of rows and columns
    before it (see `Problem.looks_first`)."""

    backend: Literal["pallas", "xla"] = "pallas"
    cast: Tiles | None = None
    amax: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape [M, K] (of each tensor of a stack), its dtype, the scaling, the layouts,
    whether rows are in groups, and whether they are read through indices."""

    M: int
    K: int
    dtype: str
    scaling: str = "block_1x128"
    layouts: str = "row"
    ragged: bool = False
    gathered: bool = False

    @property
    def whole_row(self) -> bool:
        """Whether one program holds a whole row and finds its scale: rowwise, row layout only, short enough."""
        return self.scaling == "rowwise" and self.layouts == "row" and self.K <= WHOLE_ROW

    @property
    def looks_first(self) -> bool:
        """Whether a kernel finds the largest magnitudes of rows or columns before the cast. (XLA finds that of a whole
        tensor, where it is not given.)"""
        return self.scaling == "rowwise" and not self.whole_row

    @property
    def tall(self) -> bool:
        """Whether a tile has 128 rows: they share a scale, or are a block of a padded group, or are transposed."""
        return self.layouts != "row" or self.scaling == "block_128x128"


def _key(pass_name: str, *, K: int, dtype: str, scaling: str, layouts: str, gathered: bool = False, **_: Any) -> tuple:
    """A tile of 128 columns serves every width; for whole rows, the width counts up to the next power of two."""
    width = power_of_2(K) if scaling == "rowwise" and layouts == "row" else 0
    return pass_name, width, dtype, scaling, layouts, gathered


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    p = call.problem
    blocks = p.scaling == "block_128x128" or (p.scaling == "block_1x128" and p.layouts != "col")
    rule = None
    if p.tall and tiles.rows != BLOCK:
        rule = f"rows must be {BLOCK}"
    elif p.tall and tiles.cols > BLOCK:
        rule = f"cols must be at most {BLOCK}"
    elif blocks and tiles.cols % BLOCK:
        rule = f"cols must be a multiple of {BLOCK}"
    if rule and pass_name == "cast":
        raise ValueError(f"Plan.cast={tiles}: {rule} with scaling={p.scaling!r}, layouts={p.layouts!r}.")
    return tiles


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """32 or 64 elements a thread, all of them loaded at once."""
    if pass_name == "cast" and problem.tall:
        if problem.layouts == "row":
            return Tiles(BLOCK, BLOCK, warps=8, panel=8)
        # H200, 2026-11-26, 16384 x 4096, 1x128, both layouts: 82 us; 87 with patches of 32 rows, 92 with 16 warps.
        warps = 8 if problem.scaling.startswith("block") else 16
        if problem.gathered:
            # A token is a row several times, in different groups: these columns of all tokens stay in L2 meanwhile.
            # H200, 2026-11-26, 131,072 rows of 2,048 of 16,384 tokens, 1x128: 162 us; 167 with tiles of 128 columns and
            # 4 warps, 222 with 8.
            cols, near, warps = (BLOCK // 2, 2, 2) if problem.scaling == "block_1x128" else (BLOCK, 1, 16)
            return Tiles(BLOCK, cols, 64, near, warps, panel=WHOLE_COLUMN)
        return Tiles(BLOCK, BLOCK, 64, 1, warps, panel=64 if problem.layouts == "col" else 1)
    if pass_name == "cast" and problem.whole_row:
        cols = max(BLOCK, power_of_2(problem.K))
        return Tiles(max(1, 8192 // cols), cols, warps=max(4, cols // 2048))
    if problem.gathered:  # few columns, as in the cast, and few parts of each column's magnitude
        return Tiles(64, 256, warps=8)
    return Tiles(16, 512, warps=8)


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles with 32 to 128 elements a thread."""
    rows, cols, warps, patches, nears, panels = (8, 16, 32, 64), (128, 256, 512, 1024), (2, 4, 8), (1,), (1,), (1,)
    if pass_name == "cast" and problem.tall:
        rows, cols, warps, panels = (BLOCK,), (BLOCK,), (4, 8, 16), (1, 8, 64, WHOLE_COLUMN)[: 3 + problem.gathered]
        if problem.layouts != "row":
            patches, nears = (16, 32, 64), (1, 2, 4)
    elif pass_name == "cast" and problem.whole_row:
        rows, cols, warps = (1, 2, 4, 8, 16), (max(BLOCK, power_of_2(problem.K)),), (1, 2, 4, 8, 16)
    for row, col, patch, near, warp, panel in itertools.product(rows, cols, patches, nears, warps, panels):
        if patch * near <= row and 32 <= row * col / (32 * warp) <= 128:
            yield Tiles(row, col, patch, near, warp, panel)


PLANNER = Planner(Plan, Tiles, PASSES, heuristic, _search, key=_key, needs=lambda problem: ADA, fit=_fit)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
