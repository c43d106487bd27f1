"""Plans of the grouped products: tiles, pipeline depth, order of the work, backend."""

import dataclasses
import itertools
from typing import Any, Literal

import jax.numpy as jnp

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning.device import HOPPER_SHARED_BYTES, LINE_BYTES, Device, check_gluon, runs_gluon
from jaxops._lib.planning.plans import BasePlan, Call, Planner, check_fields
from jaxops._lib.ragged.work_list import MOST_PANEL, MOST_PARTS, STEP_ROWS, least_rows_of_part

PASSES = ("fwd", "dgrad", "wgrad")
KERNELS = ("pallas", "triton")
HOPPER_TILES = ((128, 256, False), (256, 128, False), (128, 128, True), (256, 256, False))  # bm, bn, ping_pong


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      kernel: "pallas", or "triton": a persistent kernel for Hopper, one program a multiprocessor.
      bm, bn: rows and columns of an output tile. Powers of two, at least 16; "triton": see `HOPPER_TILES`; 256x256 is
        computed by a cluster of two programs, each of which has 128 rows. They load rhs (wgrad: dout) once.
      bk: step along the contracted dimension. A power of two, at least 16; "triton": 64.
      warps: warps a program (1, 2, 4, 8 or 16); "triton": 8 consumer warps.
      stages: pipeline stages; each holds one step of both operands in shared memory.
      panel: output tiles are visited in panels of this many tile rows, so that concurrent programs share operands in
        L2; "triton": of about so many, at most MOST_PANEL, each panel within a group.
      ping_pong: "triton" only: each of the two consumer warp groups computes whole tiles, and one stores while the
        other multiplies; otherwise they are cooperative: each computes half of a tile's rows.
      peel: "pallas" wgrad only: whole steps run in a loop without row masks; the remaining rows run behind a branch,
        outside the pipeline. H200, 2026-11-21: 735 instead of 653 TFLOP/s at mixtral_up; 378 instead of 394 at
        qwen3_30b with skewed groups.
      tail: "pallas" fwd and dgrad only: a group's last rows, if at most this many, use a tile of this height instead of
        bm; 0 for none. A power of two, at least 16, less than bm. H200, 2026-11-21: dsv3_small's 16-row groups are as
        fast beside tiles of 128 rows as with tiles of 32, and one group of all rows is 2.3 times faster.
      split: "triton" wgrad: a group of all M rows is summed in at most this many parts (at most 63), each by its own
        program. A part has whole steps of 64 rows and at least ceil(M / split) rows, so there may be fewer parts, and
        a group of less than two parts' rows is not split. All parts take up to split * K * N float32 (K and N rounded
        up to tiles). If plan.wgrad is not given, `choose_split` decides, for tuned tiles, too. In `grouped_glu`'s
        kernel for few rows: parts of each sum, added by a second pass. 1 elsewhere.
    """

    bm: int
    bn: int
    bk: int
    warps: int = 4
    stages: int = 3
    panel: int = 8
    peel: bool = False
    tail: int = 0
    kernel: Literal["pallas", "triton"] = "pallas"
    ping_pong: bool = False
    split: int = 1

    def __post_init__(self):
        check_fields(self, "kernel", among=KERNELS)
        check_fields(self, "split", most=MOST_PARTS - 1)
        # The mainloop issues a step before it releases the stage of the previous one: two stages at least.
        fixed = (self.bk, self.warps, self.tail) == (64, 8, 0) and self.stages > 1
        if self.kernel == "triton" and not (fixed and (self.bm, self.bn, self.ping_pong) in HOPPER_TILES):
            sizes = ", ".join(f"{bm}x{bn}{' ping-pong' if ping_pong else ''}" for bm, bn, ping_pong in HOPPER_TILES)
            raise ValueError(
                f"{self}: the triton kernel has tiles of {sizes}, with bk=64, warps=8, tail=0 and at least 2 stages."
            )
        check_fields(self, "bm", "bn", "bk", power_of_2=True, least=16)
        check_fields(self, "warps", power_of_2=True, most=16)
        check_fields(self, "stages")
        check_fields(self, "panel", most=MOST_PANEL if self.kernel == "triton" else None)
        if self.tail:
            check_fields(self, "tail", power_of_2=True, least=16, most=self.bm // 2)

    def shared_bytes(self, dtype) -> int:
        """Shared memory in bytes: the load pipeline, and for "triton" the buffers that tiles are stored from."""
        return self._pipeline(jnp.dtype(dtype).itemsize) if self.kernel == "pallas" else self._hopper_bytes(self.stored)

    @property
    def programs(self) -> int:
        """Programs of "triton" that compute a tile, as a cluster."""
        return 2 if self.kernel == "triton" and (self.bm, self.bn) == (256, 256) else 1

    @property
    def part(self) -> int:
        """Rows of a tile that one of "triton"'s two consumer warp groups multiplies."""
        return self.bm if self.ping_pong else self.bm // 2

    @property
    def stored(self) -> int:
        """Columns that a consumer of "triton" stores at a time: a tile's, or half where shared memory is short."""
        return self.bn if self._hopper_bytes(self.bn) <= HOPPER_SHARED_BYTES else self.bn // 2

    def _pipeline(self, itemsize: int) -> int:
        return self.stages * self.bk * (self.bm // self.programs + self.bn) * itemsize

    def _hopper_bytes(self, stored: int) -> int:
        return self._pipeline(2) + 2 * self.part // self.programs * stored * 2 + 512


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward pass and of the gradients of lhs (dgrad) and rhs (wgrad).

    With backend="triton" (Hopper), tiles may have kernel="pallas" where that is faster.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    dgrad: Tiles | None = None
    wgrad: Tiles | None = None

    @property
    def swapped(self) -> "Plan":
        """The plan of the gradient of lhs: the product that reads rhs the other way."""
        return dataclasses.replace(self, fwd=self.dgrad, dgrad=self.fwd)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the forward's static shape `lhs[M, K] @ rhs[G, K, N]` and the dtype of the products.

    With transpose_rhs, rhs is [G, N, K]: the forward reads it as dgrad otherwise does, and dgrad as the forward does.
    whole_sums: wgrad's sums cannot be split, as in a launch of several modalities.
    """

    G: int
    M: int
    K: int
    N: int
    dtype: str
    transpose_rhs: bool = False
    whole_sums: bool = False

    @property
    def rows(self) -> int:
        """Rows of the mean group, rounded up."""
        return -(-self.M // max(self.G, 1))

    def output(self, pass_name: str) -> tuple[int, int]:
        """Rows and columns of a pass' result, all groups' together."""
        return {"fwd": (self.M, self.N), "dgrad": (self.M, self.K), "wgrad": (self.K, self.N)}[pass_name]


_TRANSPOSED = {"fwd": "dgrad", "dgrad": "fwd", "wgrad": "wgrad"}  # the pass that reads rhs [G, K, N] as [G, N, K]


def _as_measured(pass_name: str, problem: Problem) -> tuple[str, Problem]:
    """The pass and problem that read rhs in the same way without transpose_rhs."""
    if not problem.transpose_rhs:
        return pass_name, problem
    return _TRANSPOSED[pass_name], dataclasses.replace(problem, K=problem.N, N=problem.K, transpose_rhs=False)


def _key(pass_name: str, *, G: int, M: int, K: int, N: int, dtype: str, transpose_rhs: bool = False, **_: Any) -> tuple:
    """Sizes count up to the next power of two: a new length needs no tuning. Rows of whole cache lines are apart."""
    if transpose_rhs:
        pass_name, K, N = _TRANSPOSED[pass_name], N, K
    lines = "whole lines" if 2 * K % LINE_BYTES == 2 * N % LINE_BYTES == 0 else "partial lines"  # of 16-bit numbers
    return pass_name, dtype, lines, *(power_of_2(size) for size in (G, M, K, N))


def runs_triton(problem: Problem, device: Device) -> bool:
    """Whether the Triton kernel runs on the device and multiplies this problem."""
    return runs_gluon(device) and hopper_can(problem)


def hopper_can(problem: Problem) -> bool:
    """Whether the Triton kernel multiplies it: 16-bit numbers, and rows of a multiple of 16 bytes, for TMA."""
    return jnp.dtype(problem.dtype).itemsize == 2 and problem.K % 8 == problem.N % 8 == 0 < min(problem.K, problem.N)


def check_triton(problem: Problem, device: Device) -> None:
    """
    Raises:
      NotImplementedError: the Triton kernel does not run on this device, or does not multiply this problem.
    """
    check_gluon(device)
    if not hopper_can(problem):
        raise NotImplementedError(
            "the triton backend multiplies bfloat16 and float16, with K and N multiples of 8; this is "
            f"{problem.dtype}, K={problem.K}, N={problem.N}. Use backend='pallas'."
        )


# Rows of a mean group. Fewer, as of decoding, are faster with the Pallas kernel, whose tiles can be lower. From 8 to 32
# rows the Triton kernel takes 0.91 to 1.01 times as long (few_* in profiles/tiles.csv, H100, 2026-11-26).
_LEAST_ROWS = 8
LEAST_ROWS_OF_UNIT = 32  # likewise of products fused with an activation; fewer have not been measured
_SHORT, _SLOW_GBPS = 32, 4000  # rows of a mean group of wgrad; memory slower than an H200's


def takes_triton(pass_name: str, problem: Problem, device: Device, least_rows: int = _LEAST_ROWS) -> bool:
    """Whether "auto" takes the Triton kernel for a pass: where it can, except for groups of few rows.

    By the shape, not by which tuned row is faster: rows of the two kernels may come from cards of different
    temperature. wgrad of few rows only writes. The Pallas kernel takes 1.08 times as long on an H200, but 0.93 to 0.96
    times up to 32 rows a group on an H100, whose memory is slower (few_00 to few_02 in profiles/tiles.csv).
    """
    if pass_name == "wgrad":
        few = problem.rows <= _SHORT and (device.memory_gbps or _SLOW_GBPS) < _SLOW_GBPS
    else:
        few = problem.rows < least_rows
    return not few and runs_triton(problem, device)


def _kernel(pass_name: str, call: Call[Problem, Plan]) -> str:
    triton = call.backend == "triton" and (call.asked != "auto" or takes_triton(pass_name, call.problem, call.device))
    return "triton" if triton else "pallas"


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    if tiles.kernel == "triton" != call.backend:
        raise ValueError(
            f"plan.{pass_name} has kernel='triton' and plan.backend is {call.backend!r}: write Plan('triton', ...)."
        )
    if tiles.split > 1 and (pass_name, tiles.kernel) != ("wgrad", "triton"):
        only = "only wgrad with kernel='triton', and grouped_glu's kernel for few rows, have split"
        raise ValueError(f"plan.{pass_name}={tiles}: {only}; leave it out.")
    if tiles.split > 1 and call.problem.whole_sums:
        raise ValueError(f"plan.{pass_name}={tiles}: sums of several modalities have no split; leave it out.")
    # Tuned rows were measured with groups of like lengths: the split serves others.
    if (pass_name, tiles.kernel) == ("wgrad", "triton") and call.plan.wgrad is None and tiles.split == 1:
        return dataclasses.replace(tiles, split=choose_split(tiles, call.problem, call.device))
    return tiles


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    if call.backend == "triton":
        check_triton(call.problem, call.device)
    return {}


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """The largest tiles that the problem fills, shrunk until they fit the device."""
    pass_name, problem = _as_measured(pass_name, problem)
    if kernel == "triton":
        return _hopper_heuristic(pass_name, problem, device)
    rows, (out_rows, out_cols) = problem.rows, problem.output(pass_name)
    # Tiles are high enough for one group of all rows, however short the mean group; Tiles.tail serves short groups.
    step = {"fwd": problem.K, "dgrad": problem.N, "wgrad": rows}[pass_name]
    half = jnp.dtype(problem.dtype).itemsize == 2

    def cover(size: int, most: int) -> int:
        return min(most, max(16, power_of_2(size)))

    def padded(size: int, tile: int) -> int:
        return -(-size // tile) * tile

    # H200, 2026-11-21: 128x256x64 with 8 warps is the fastest wherever a group fills it. wgrad over few rows is bound
    # by its stores, which overlap better with small pipelines: 128x128x32, three programs a multiprocessor.
    bm, bn, bk, warps, stages = (128, 256, 64, 8, 4) if half else (64, 128, 32, 4, 3)
    if pass_name == "wgrad" and rows < 1024:
        bm, bn, bk, warps, stages = (128, 128, 32, 4, 3) if half else (64, 128, 32, 4, 2)
    elif half and rows < 32:
        # H200, 2026-11-22, groups of 17 to 24 rows against 128x256x64: 39 instead of 49 us, 119 instead of 128.
        wide = padded(out_cols, 256) <= 1.05 * padded(out_cols, 128)
        bm, bn, bk, warps, stages = 64, 256 if wide else 128, 32, 4, 4
        if pass_name == "dgrad":
            # rhs is contiguous along the sum: 32 numbers are half a cache line (H200, 2026-11-22, 90 groups of 23 rows:
            # 22.9 instead of 27.5 us).
            bn, bk, stages = 128, 64, 3
        # A few rows, as of decoding, whose tiles hardly fill the card: narrower ones, of which a multiprocessor loads
        # more ahead. H200, 2026-11-24, 128 experts, each of 8 rows another's: 22.9 instead of 29.9 us (K 2048, N 768)
        # and 20.6 instead of 24.2 (K 768, N 2048), with the schedule; 32 rows: 40 instead of 47, 39 instead of 43.
        # H200, 2026-11-25, 8 rows (K 768, N 2048): 9.9 us with four stages, 10.2 with five.
        if bn == 256 and 2 * min(problem.G, problem.M) * -(-out_cols // bn) < 5 * device.cores:
            bn, bk, stages = 128, *((128, 4) if problem.M <= 16 else (64, 3))
    whole, bm, bn = bm * bn, cover(out_rows, bm), cover(out_cols, bn)
    peel, tail = pass_name == "wgrad" and rows >= 1024, _tail(pass_name, problem, bm)
    tiles = Tiles(bm, bn, cover(step, bk), warps if bm * bn == whole else 4, stages, peel=peel, tail=tail)
    while tiles.shared_bytes(problem.dtype) > device.shared_bytes:
        if tiles.stages > 2:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        elif tiles.bn > tiles.bm:
            tiles = dataclasses.replace(tiles, bn=tiles.bn // 2)
        else:
            tiles = dataclasses.replace(tiles, bm=tiles.bm // 2, tail=_tail(pass_name, problem, tiles.bm // 2))
    return tiles


_LONG = 1024  # rows of a mean group, and of a panel
LONG_SUM = 4096  # longer sums in tiles of 128x256 have three stages: the fourth can cost more than it hides


def _hopper_tiles(bm: int, bn: int, stages: int) -> Tiles:
    return Tiles(bm, bn, 64, 8, stages, _LONG // bm, kernel="triton", ping_pong=bm == bn == 128)


def _hopper_heuristic(pass_name: str, problem: Problem, device: Device) -> Tiles:
    """The tiles with the smallest worst case over even groups, a router's, Zipf's and one of nearly all rows
    (profiles/model_tiles.csv of an H200: 40 layers of models and slices of them).

    - 128x128 where there are so few that each multiprocessor has one at most (wgrad, whose sums are split: half of
      them, with one group of all rows), and for short groups where 256 columns would leave a sixth of the tiles empty.
    - 256x128, from half as many rows on, where 256 columns would leave more than 8 % of the tiles empty (N 1,408).
    - 256x256 by clusters for long groups elsewhere: they load the least from L2. Not where collectives hold some of the
      multiprocessors.
    - 128x256 for short groups, whose last tiles are half empty. With three stages for a forward's long sums: with four
      they take up to 1.1 times as long (DeepSeek-V3), and short ones 0.92 to 1.0 times.
    """
    rows, (high, wide) = problem.rows, problem.output(pass_name)
    across = -(-wide // 128)
    count = across * (2 * -(-high // 128) if pass_name == "wgrad" else problem.G * -(-rows // 128))
    padded = 2 * -(-wide // 256) / across  # columns in tiles of 256, over those in tiles of 128
    if count <= device.cores or wide <= 128:
        return _hopper_tiles(128, 128, 5)
    if 2 * rows >= _LONG and padded > 1.08:
        return _hopper_tiles(256, 128, 4)
    if padded >= 1.2:
        return _hopper_tiles(128, 128, 5)
    if rows >= _LONG and not device.shared:
        return _hopper_tiles(256, 256, 4)
    return _hopper_tiles(128, 256, 3 if pass_name == "fwd" and problem.K > LONG_SUM else 4)


_PART_STEPS = 13  # that a program multiplies in the time in which it writes a part and reads it again (H200)


def choose_split(tiles: Tiles, problem: Problem, device: Device) -> int:
    """Parts of wgrad's sums over all rows: the least within 5 % of the best, counting balanced groups and one group of
    nearly all rows alike, since rows of groups are known on the device only. On the mean of 186 cases the choice takes
    1.02 times as long as the best split (H100, 2026-11-27, tiles.csv in profiles/)."""
    p = _as_measured("wgrad", problem)[1]
    if 0 in (p.G, p.M, p.K, p.N) or p.whole_sums:
        return 1
    cores, count = device.cores // tiles.programs, -(-p.K // tiles.bm) * -(-p.N // tiles.bn)

    def steps(split: int, groups: int) -> int:
        """Of the busiest program, if so many groups share all rows."""
        rows, least = -(-p.M // groups), least_rows_of_part(p.M, split)
        parts = rows // least if rows >= 2 * least else 1  # sums of less than two parts' rows stay whole
        waves = -(-groups * count * parts // cores)
        return waves * -(-rows // (STEP_ROWS * parts)) + (parts * _PART_STEPS if parts > 1 else 0)

    tried = [s for s in range(1, MOST_PARTS) if s == 1 or (count * s <= 3 * cores and 4 * STEP_ROWS * s <= p.M)]
    times = {split: (steps(split, 1), steps(split, p.G)) for split in tried}
    least = [min(column) for column in zip(*times.values(), strict=True)]
    cost = {split: sum(t / best for t, best in zip(row, least, strict=True)) for split, row in times.items()}
    return next(split for split in tried if cost[split] <= 1.05 * min(cost.values()))


def _tail(pass_name: str, problem: Problem, bm: int) -> int:
    """The height that covers the mean group, at most half a tile: for the ends of long groups, and for short groups."""
    return 0 if pass_name == "wgrad" or bm < 32 else min(bm // 2, max(16, power_of_2(problem.rows)))


# Output tiles (bm, bn, warps). 128x128 with 4 warps leaves room for three programs a multiprocessor.
_OUTPUT_TILES = (
    *((128, 256, 8), (256, 128, 8), (128, 128, 4), (128, 128, 8), (64, 256, 4), (64, 128, 4)),
    *((128, 64, 4), (32, 256, 4), (32, 128, 4), (16, 256, 4), (16, 128, 4)),
)
_STEPS = ((64, 3), (64, 4), (128, 3), (128, 4))  # bytes of one row's step, stages


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> list[Tiles]:
    """Tiles that fit the shared memory, and that the problem's sizes can fill; "triton": each size in higher and lower
    panels, 128x256 with three stages, too, which store whole tiles."""
    pass_name, problem = _as_measured(pass_name, problem)
    if kernel == "pallas":
        return _pallas_tiles(pass_name, problem, device)
    sizes = ((128, 256, 4), (128, 256, 3), (256, 128, 4), (256, 256, 4), (128, 128, 5))
    fitting = [_hopper_tiles(*size) for size in sizes if size[1] == 128 or problem.output(pass_name)[1] > 128]
    return [dataclasses.replace(t, panel=panel) for t in fitting for panel in (t.panel, t.panel // 2, 2 * t.panel)]


def _pallas_tiles(pass_name: str, problem: Problem, device: Device) -> list[Tiles]:
    size = jnp.dtype(problem.dtype).itemsize
    rows = 2 * problem.rows  # a skewed routing has groups of twice the mean and more
    high, wide = problem.output(pass_name)
    few = high if pass_name == "wgrad" else rows
    fitting = []
    peels = (False, True) if pass_name == "wgrad" and rows >= 512 else (False,)
    for (bm, bn, warps), (step_bytes, stages), peel in itertools.product(_OUTPUT_TILES, _STEPS, peels):
        tail = _tail(pass_name, problem, bm)
        tiles = Tiles(bm, bn, step_bytes // size, warps, stages, 8, peel, tail)
        too_large = bm > max(16, high) or bn >= 2 * max(64, wide) or (size == 4 and bm * bn > 128 * 128)
        too_small = bm < 64 and few >= 1024
        if not (too_large or too_small) and tiles.shared_bytes(problem.dtype) <= device.shared_bytes:
            fitting.append(tiles)
    return fitting


PLANNER = Planner(
    Plan, Tiles, PASSES, heuristic, _search, _key, triton=runs_triton, kernel=_kernel, fit=_fit, others=_others,
    symbolic=("M",), splits=True,
)  # fmt: skip
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
