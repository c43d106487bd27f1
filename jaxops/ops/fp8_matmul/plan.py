"""Plans of the FP8 products: which kernel multiplies, its tiles, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.arrays.sums import parts_of_sums
from jaxops._lib.numerics.fp8 import BLOCK
from jaxops._lib.planning.device import HOPPER_SHARED_BYTES, Device, check_gluon, runs_gluon
from jaxops._lib.planning.plans import ADA, BasePlan, Call, Planner, check_fields
from jaxops._lib.ragged.work_list import MOST_PANEL
from jaxops.ops.fp8_matmul.recipes import RECIPES

PASSES = ("fwd", "dgrad", "wgrad")
# bm, bn: two consumer warp groups, three, two where the tensor core does the whole sum, two where tiles are few. Tiles
# of 256x128 by two groups of 128 rows were 3 to 6 % slower than 192x128 (H200, 2026-11-26, block scales, eight shapes).
HOPPER_TILES = ((128, 128), (192, 128), (128, 256), (128, 64))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one product is cut into programs. The step along the contracted dimension is 128 numbers, which share a
    scale.

    Attributes:
      kernel: "triton" (Hopper), "pallas", or "xla", which has no tiles and becomes cuBLASLt where scales are
        tensorwise.
      bm, bn: rows and columns of an output tile. Powers of two, at least 16 (bm with swap 8); "triton": see
        `HOPPER_TILES`.
      warps: warps a program ("pallas").
      stages: pipeline stages; each holds one step of both operands in shared memory.
      panel: output tiles are visited in panels of this many tile rows, so that concurrent programs share operands in
        L2; "triton" over groups of rows: of about so many, each panel within a group.
      split: "pallas" fwd and dgrad: parts of each sum, each a program's; a second pass adds them.
      swap: "pallas" fwd and dgrad: the tensor core multiplies rhs' columns by rows, instead of rows by columns. It
        takes its first operand, at least 64 numbers high, from registers: there FP8 is converted, each number by one
        warp, without a way back to shared memory.
      cast_lhs: "pallas" fwd and dgrad with scales of 1x128 blocks: the product casts rows that are not quantized yet in
        its own launch, to the same bits as `quantize` before it. Each tile of columns casts its rows again. Rows that
        are quantized are multiplied as they are.
    """

    kernel: Literal["triton", "pallas", "xla"] = "pallas"
    bm: int = 128
    bn: int = 128
    warps: int = 8
    stages: int = 3
    panel: int = 8
    split: int = 1
    swap: bool = False
    cast_lhs: bool = False

    def __post_init__(self):
        check_fields(self, "kernel", among=("triton", "pallas", "xla"))
        check_fields(self, "split")
        if self.kernel != "pallas" and self.of_pallas:
            raise ValueError(f"Tiles of kernel={self.kernel!r} have no split, swap and cast_lhs: leave them out.")
        if self.kernel != "triton":
            check_fields(self, "bm", power_of_2=True, least=8 if self.swap else 16)
            check_fields(self, "bn", power_of_2=True, least=16)
        elif (self.bm, self.bn) not in HOPPER_TILES:
            known = ", ".join(f"{bm}x{bn}" for bm, bn in HOPPER_TILES)
            raise ValueError(f"Tiles of {self.bm}x{self.bn}: the triton kernel has {known}.")
        check_fields(self, "warps", power_of_2=True, most=16)
        check_fields(self, "panel", most=MOST_PANEL if self.kernel == "triton" else None)
        # The Triton mainloop issues a step before it releases the stage of the previous one.
        check_fields(self, "stages", least=2 if self.kernel == "triton" else 1)

    @property
    def of_pallas(self) -> bool:
        """Whether they are of "pallas" fwd and dgrad only."""
        return self.split > 1 or self.swap or self.cast_lhs

    @property
    def shared_bytes(self) -> int:
        """Shared memory in bytes: the load pipeline, and for "triton" the buffers that tiles are stored from."""
        bytes_of_lhs = 4 if self.cast_lhs else 1
        if self.kernel != "triton":
            return self.stages * BLOCK * (bytes_of_lhs * self.bm + self.bn)
        return self._hopper_pipeline + 2 * self.bm * (self.stored(2) or self.bn)

    @property
    def _hopper_pipeline(self) -> int:
        return self.stages * ((BLOCK + 8) * (self.bm + self.bn) + 20) + 512

    def stored(self, itemsize: int) -> int:
        """Columns of a result of so many bytes a number that a consumer of "triton" stores at a time by TMA: a tile's,
        or half where shared memory is short, or 0: not even those have room, and it stores from its registers."""
        left = HOPPER_SHARED_BYTES - self._hopper_pipeline
        return next((columns for columns in (self.bn, self.bn // 2) if self.bm * columns * itemsize <= left), 0)


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward pass and of the gradients of lhs (dgrad) and rhs (wgrad). The casts of "triton" are Pallas
    kernels."""

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    dgrad: Tiles | None = None
    wgrad: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the forward's static shape `lhs[M, K] @ rhs[K, N]`, the recipe, lhs' dtype; G groups of
    rows, each with its own rhs, or 0; whether lhs is quantized."""

    M: int
    K: int
    N: int
    recipe: str
    dtype: str
    G: int = 0
    quantize_lhs: bool = True


def _key(pass_name: str, *, M: int, K: int, N: int, G: int, recipe: str, quantize_lhs: bool = True, **_: Any) -> tuple:
    """Sizes count up to the next power of two, so that a new sequence length needs no new tuning. Recipes with the same
    products share rows."""
    sizes = (power_of_2(size) for size in (M, K, N, G))
    return pass_name, *RECIPES[recipe].kernel(pass_name), *sizes, quantize_lhs


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    if call.backend == "triton":
        if not call.problem.quantize_lhs:
            raise NotImplementedError("the triton kernel multiplies FP8 by FP8; with quantize_lhs=False use 'pallas'.")
        check_gluon(call.device)
    return {}


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    if pass_name == "wgrad" and tiles.of_pallas:
        raise ValueError(f"plan.wgrad={tiles}: wgrad's kernel has no split, swap or cast_lhs; leave them out.")
    if tiles.cast_lhs and not _casts(pass_name, call.problem):
        blocks = "the product casts scales of 1x128 blocks, with quantize_lhs=True"
        raise ValueError(f"plan.{pass_name}={tiles}, recipe={call.problem.recipe!r}: {blocks}; leave cast_lhs out.")
    if tiles.kernel == "triton" and tiles.shared_bytes > call.device.shared_bytes:
        needs = f"{tiles.shared_bytes} bytes of shared memory, {call.device.kind} has {call.device.shared_bytes}"
        raise ValueError(f"plan.{pass_name}={tiles} needs {needs}: use fewer stages.")
    return tiles


def _casts(pass_name: str, problem: Problem) -> bool:
    """Whether a forward or dgrad product can cast its rows itself."""
    recipe = RECIPES[problem.recipe]
    return problem.quantize_lhs and (recipe.lhs if pass_name == "fwd" else recipe.dout).scaling == "block_1x128"


# Of `multiply_unit`. H200, 2026-11-26, product, unit and cast of 262,144 rows, K 2,048, F 768, and of 32,768, 4,096,
# 14,336: 1,321 and 5,643 us (1,573 and 6,445 in two launches); 1,350 and 6,098 without a counter, in panels of 8.
UNIT_TILES = Tiles("triton", 128, 128, stages=4, panel=16)


def takes_unit(problem: Problem, backend: str, tiles: Tiles | None = None) -> bool:
    """Whether `multiply_unit` has a kernel for the forward's product, whose rhs is gate's and up's columns, with these
    tiles (by default `UNIT_TILES`): Hopper's, for block scales and bfloat16."""
    blocks = RECIPES[problem.recipe].rhs.scaling == "block_128x128" and problem.quantize_lhs
    fits = tiles is None or ((tiles.kernel, tiles.bm, tiles.bn) == ("triton", 128, 128) and tiles.stages <= 4)
    whole = problem.N % (2 * BLOCK) == 0
    return backend == "triton" and blocks and problem.dtype == "bfloat16" and problem.G > 0 and whole and fits


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """Tiles for a shape without a tuned row."""
    p = problem
    out_rows, out_cols = {"fwd": (p.M, p.N), "dgrad": (p.M, p.K), "wgrad": (p.K, p.N)}[pass_name]
    if kernel == "triton":
        return _heuristic_triton(pass_name, problem, out_rows, out_cols, device.cores)
    if not p.quantize_lhs and pass_name != "wgrad":
        return _heuristic_of_few_rows(p, out_cols, p.K if pass_name == "fwd" else p.N, device)
    bm, bn = (min(128, max(16, power_of_2(size))) for size in (out_rows, out_cols))
    # Not measured on an Ada card. With 16 rows a program casts at most an eighth of the numbers that it converts, and
    # a launch of the cast takes about 2 us. On other cards the measured choice is a cast of its own.
    inside = device.capability == ADA and pass_name == "fwd" and _casts("fwd", p) and power_of_2(p.M) <= 16
    return Tiles("pallas", bm, bn, 8 if bm * bn == 128 * 128 else 4, cast_lhs=inside)


def _heuristic_of_few_rows(problem: Problem, columns: int, length: int, device: Device) -> Tiles:
    """Tiles of unquantized rows for sums over `length`, where reading rhs takes the time.

    Twice the rows of a mean group, since each further tile of a group reads its matrix again. Up to 16 rows five
    programs a multiprocessor, and of more, whose products take longer than reading rhs, one. H200, 2026-11-25, cold
    weights, 1 to 256 tokens (dense 2048x5120 and 4096x2048, 128 experts of 768x2048): at most 2.1 % longer than the
    fastest of 19 to 56 tiles in each of twelve cases.
    """
    M, G = problem.M, problem.G
    bm = max(8, min(power_of_2(M), power_of_2(2 * M // G), 64) if G else min(power_of_2(M), 128))
    high, each = min(M, G) if G else -(-M // bm), 5 if bm <= 16 else 1
    programs = lambda bn: high * -(-columns // bn)
    if bm == 8:
        bn, warps, stages, swap = 64, 4, 4, True
    elif G:
        bn, warps, stages, swap = 128, 4, 3, False
    elif bm == 16:
        bn, warps, stages, swap = 64, 4, 4, False
    elif bm == 128 and 2 * programs(64) <= device.cores:
        bn, warps, stages, swap = 64, 4, 4, True
    else:
        bn, warps, stages, swap = 128, 8, 4 if bm < 128 else 3, True
    fit = device.shared_bytes // (BLOCK * (2 * bm + bn))  # lhs has two bytes
    split = parts_of_sums(length, programs(bn), device.cores, each)
    return Tiles("pallas", bm, bn, warps, min(stages, fit), split=split, swap=swap)


def _heuristic_triton(pass_name: str, problem: Problem, out_rows: int, out_cols: int, cores: int) -> Tiles:
    """H200, 2026-11-26, 12 dense shapes and 5 of groups: of 51 products 49 within 0.5 % of the fastest of three to six
    tiles, two within 2 %; of few rows 3 %."""
    recipe, groups = RECIPES[problem.recipe], problem.G or 1
    rows = out_rows if pass_name == "wgrad" else -(-out_rows // groups)  # of a mean group
    blocks = "block" in (recipe.dout if pass_name == "wgrad" else recipe.rhs).scaling

    def rounds(size: tuple[int, int]) -> float:
        """Of tiles on all multiprocessors. In a last round that fills a part of these, each has more power."""
        whole, rest = divmod(groups * -(-rows // size[0]) * -(-out_cols // size[1]), cores)
        return whole + (0.5 + 0.5 * rest / cores if rest else 0)

    def time(size: tuple[int, int]) -> float:
        speed = {(192, 128): 1.05 if blocks else 1.02, (128, 256): 1.03}.get(size, 1.0)
        return rounds(size) * _clocks_of_step(*size) / speed

    if pass_name in recipe.fast and out_cols > 128:
        sizes = [(128, 256)] if problem.G or rounds((128, 256)) > 4 else [(128, 256), (128, 128)]
    else:
        sizes = [(128, 128), (192, 128)]
    if not problem.G and rounds(min(sizes, key=time)) < 1:  # some multiprocessors would have no tile
        sizes.append((128, 64))
    size = min(sizes, key=time)
    if pass_name == "wgrad" and problem.G:
        return Tiles("triton", *size, stages=4)
    outer = pass_name == "wgrad" and blocks
    stages = {(128, 256): 3, (192, 128): 4, (128, 64): 8}.get(size, 4 if outer else 5)
    return Tiles("triton", *size, stages=stages, panel=16 if problem.G or size != (192, 128) else 8)


def _clocks_of_step(bm: int, bn: int) -> float:
    """Of a multiprocessor for a K step of a tile: the slower of its tensor cores, 4,096 products a clock, and its
    loads, taken as 64 bytes a clock. The stores of a tile are proportional, too, and the pipeline fills once a launch:
    neither changes the choice."""
    return BLOCK * max(bm * bn / 4096, (bm + bn) / 64)


_PALLAS_TILES = ((128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4), (32, 128, 4), (16, 128, 4))


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles that fit the device's shared memory."""
    if kernel == "triton":
        fast = pass_name in RECIPES[problem.recipe].fast
        shapes = ((128, 128, 8, (4, 5)), (128, 256, 8, (3,)) if fast else (192, 128, 8, (3, 4)))
        shapes += () if problem.G else ((128, 64, 8, (6, 8)),)
    else:
        shapes = tuple((*shape, (2, 3, 4)) for shape in _PALLAS_TILES)
    panels = (8, 4, 16, 32) if kernel == "triton" else (8,)
    for bm, bn, warps, depths in shapes:
        for stages, panel in itertools.product(depths, panels):
            tiles = Tiles("triton" if kernel == "triton" else "pallas", bm, bn, warps, stages, panel)
            if tiles.shared_bytes <= device.shared_bytes:
                yield tiles


PLANNER = Planner(
    Plan,
    Tiles,
    PASSES,
    heuristic,
    _search,
    _key,
    lambda _: ADA,
    lambda problem, device: runs_gluon(device) and problem.quantize_lhs,
    fit=_fit,
    others=_others,
)
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
