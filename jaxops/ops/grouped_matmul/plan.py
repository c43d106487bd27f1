"""Every choice that grouped matmul makes: tiles, pipeline depth, order of the work, backend."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp

from jaxops._lib.device import Device, check_gluon, runs_gluon
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops._lib.powers import power_of_2

PASSES = ("fwd", "dgrad", "wgrad")
Pass = Literal["fwd", "dgrad", "wgrad"]
KERNELS = ("pallas", "triton")
BACKENDS = ("triton", "pallas", "xla")
_HOPPER_BYTES = Device("NVIDIA H200", "gpu").shared_bytes
HOPPER_TILES = ((128, 256, False), (256, 128, False), (128, 128, True), (128, 128, False))  # bm, bn, turns


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass is cut into programs.

    Attributes:
      kernel: "pallas", or "triton": Hopper's own instructions, a grid of as many programs as the card has multiprocessors.
      bm: rows of an output tile (rows of lhs in fwd and dgrad, columns of lhs in wgrad). A power of two, at least 16.
      bn: columns of an output tile. A power of two, at least 16.
      bk: step along the contracted dimension. A power of two, at least 16; "triton": 64.
      warps: warps a program (1, 2, 4, 8 or 16); of "triton", those that multiply: 8.
      stages: depth of the load pipeline; each stage holds one step of both operands in shared memory.
      panel: output tiles are visited in panels of this many tile rows, so that programs that run together share operands in L2.
      turns: "triton" only: its two consumers take turns at whole tiles, instead of half of each tile's rows: one stores while the other multiplies.
      dynamic: "triton" only: programs take tiles as they get free, instead of every 132nd (on an H200). Balances wgrad, whose sums are as long as groups
        (qwen3_30b, Zipf: 474 instead of 398 TFLOP/s) and what the memory bounds (dsv3's forward: 510 instead of 486); costs 3 to 9 % elsewhere (qwen3_30b's
        forward: 594 instead of 614), for programs that share operands drift apart. H200, 2026-11-21.
      peel: "pallas" wgrad only: whole steps run in a loop without row masks, and the rest of the rows behind a branch, outside the pipeline. H200, 2026-11-21,
        balanced and skewed: 735 and 707 against 653 and 669 TFLOP/s at mixtral_up (4,096 rows a group on the mean), 419 and 378 against 410 and
        394 at qwen3_30b (256 rows), where the exposed rest costs more than the masks.
      tail: "pallas" fwd and dgrad only: a group's last rows, where they are at most this many, go through a tile of this height instead of bm; 0 for none.
        A power of two, at least 16, under bm. H200, 2026-11-21: with half of the rows in one group dsmoe16b's forward takes 318 instead of 328 us (290
        balanced), and dsv3_small's 16-row groups run as fast beside tiles of 128 rows as under tiles of 32 (1,657 and 1,648 us), one group of all rows 2.3
        times faster.
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
    turns: bool = False
    dynamic: bool = False

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"Tiles.kernel={self.kernel!r} must be one of {', '.join(map(repr, KERNELS))}.")
        fixed = (self.bk, self.warps, self.tail) == (
            64,
            8,
            0,
        ) and self.stages > 1  # a step starts before the one before is given back
        if self.kernel == "triton" and not (fixed and (self.bm, self.bn, self.turns) in HOPPER_TILES):
            sizes = ", ".join(f"{bm}x{bn}{' in turns' if turns else ''}" for bm, bn, turns in HOPPER_TILES)
            raise ValueError(
                f"{self}: the triton kernel has tiles of {sizes}, with bk=64, warps=8, tail=0 and at least 2 stages."
            )
        for name in ("bm", "bn", "bk"):
            if (size := getattr(self, name)) < 16 or size & (size - 1):
                raise ValueError(f"Tiles.{name}={size} must be a power of two and at least 16.")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"Tiles.warps={self.warps} must be 1, 2, 4, 8 or 16.")
        if self.tail and (self.tail < 16 or self.tail & (self.tail - 1) or self.tail >= self.bm):
            raise ValueError(
                f"Tiles.tail={self.tail} must be 0, or a power of two, at least 16 and under bm={self.bm}."
            )
        if self.stages < 1 or self.panel < 1:
            raise ValueError(f"Tiles.stages={self.stages} and Tiles.panel={self.panel} must be at least 1.")

    def shared_bytes(self, dtype) -> int:
        """Shared memory that the load pipeline takes, and what "triton" stores its tiles from, in bytes."""
        return self._pipeline(jnp.dtype(dtype).itemsize) if self.kernel == "pallas" else self._hopper_bytes(self.stored)

    @property
    def part(self) -> int:
        """Rows of a tile that one of "triton"'s two consumers multiplies."""
        return self.bm if self.turns else self.bm // 2

    @property
    def stored(self) -> int:
        """Columns of a tile that a consumer of "triton" stores at a time: all of them, or half where the pipeline is so deep that there is no room."""
        return self.bn if self._hopper_bytes(self.bn) <= _HOPPER_BYTES else self.bn // 2

    def _pipeline(self, itemsize: int) -> int:
        return self.stages * self.bk * (self.bm + self.bn) * itemsize

    def _hopper_bytes(self, stored: int) -> int:
        return self._pipeline(2) + 2 * self.part * stored * 2 + 512


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. A pass left None is filled by `make_plan`; the xla backend needs no tiles.

    Attributes:
      backend: "triton" (on Hopper; its tiles may say kernel="pallas", where that is the faster one), "pallas" or "xla".
      fwd: tiles of the forward pass.
      dgrad: tiles of the gradient of lhs.
      wgrad: tiles of the gradient of rhs.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    dgrad: Tiles | None = None
    wgrad: Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the forward's static shape `lhs[M, K] @ rhs[G, K, N]` and the dtype in which it is multiplied.

    With transpose_rhs, rhs is [G, N, K]: the forward then reads it as dgrad does, and its dgrad as fwd does.
    """

    G: int
    M: int
    K: int
    N: int
    dtype: str
    transpose_rhs: bool = False


def key_of(pass_name: str, G: int, M: int, K: int, N: int, dtype: str) -> tuple:
    """What tuned rows are looked up by: sizes count up to the next power of two, so that a new sequence length needs no new tuning."""
    return (pass_name, dtype, *(power_of_2(size) for size in (G, M, K, N)))


def key_of_row(row: dict) -> tuple:
    """A shape's rows of either kernel are kept side by side."""
    return (
        *key_of(row["pass"], row["G"], row["M"], row["K"], row["N"], row["dtype"]),
        row["tiles"].get("kernel", "pallas"),
    )


def kernels_for(problem: Problem, device: Device) -> tuple[str, ...]:
    """Those that multiply it on this device, but for "pallas" on a CPU, which is interpreted."""
    return KERNELS if runs_gluon(device) and hopper_can(problem) else ("pallas",)


def hopper_can(problem: Problem) -> bool:
    """Whether the triton kernel multiplies it: TMA wants rows of whole 16 bytes, and the kernel numbers of 16 bits."""
    return jnp.dtype(problem.dtype).itemsize == 2 and problem.K % 8 == problem.N % 8 == 0 < min(problem.K, problem.N)


def check_triton(problem: Problem, device: Device) -> None:
    """
    Raises:
      NotImplementedError: the triton kernel does not multiply this problem, or nothing on this device.
    """
    check_gluon(device)
    if not hopper_can(problem):
        raise NotImplementedError(
            f"the triton backend multiplies bfloat16 and float16, with K and N multiples of 8; this is {problem.dtype}, K={problem.K}, N={problem.N}. "
            f"Use backend='pallas'."
        )


# Of a mean group. H200, 2026-11-21, dsv3_small (16 rows a group): the Pallas kernel has lower tiles, 1,688 against 1,706 us forward and 1,782 against 1,793
# in dgrad; not in wgrad, whose rows are summed over: 2,171 against 1,935.
_LEAST_ROWS = 32


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, then a tuned row's, then the heuristic's.

    Args:
      problem: static shape and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows (`jaxops.tuning.tuned_rows`), best source first.
      backend: "auto" takes on Hopper, where jax-triton is installed, its own kernel but where groups are tiny; Pallas on other GPUs, xla elsewhere. "triton",
        "pallas" or "xla" is obeyed. On a CPU, "pallas" runs in Pallas' interpreter.
      plan: used as it is; only passes that it leaves None are filled.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan.
      NotImplementedError: the triton backend elsewhere than on Hopper, for float32, or for sizes that are no multiples of 8; pallas on a TPU.
    """
    device = plan_device(Plan, plan, device)
    kernels = kernels_for(problem, device)
    if backend == "auto" and plan is None and len(kernels) > 1:
        backend, plan = "triton", Plan("triton")
    elif backend == "triton":
        kernels = ("triton",)
    backend = choose_backend(device, backend, plan, BACKENDS)
    if backend == "xla":
        return Plan("xla", device=device)
    if backend == "triton":
        check_triton(problem, device)
    else:
        kernels = ("pallas",)

    # A transposed rhs swaps which kernel variant a pass is, so its rows are found under the problem that reads rhs the same way.
    p = problem
    read = {"fwd": "dgrad", "dgrad": "fwd", "wgrad": "wgrad"} if p.transpose_rhs else {name: name for name in PASSES}
    K, N = (p.N, p.K) if p.transpose_rhs else (p.K, p.N)
    table = {}
    for row in rows:
        table.setdefault(key_of_row(row), Tiles(**row["tiles"]))
    chosen = {}
    for name in PASSES:
        explicit = getattr(plan, name) if plan is not None else None
        if explicit is not None and explicit.kernel == "triton" != backend:
            raise ValueError(
                f"plan.{name} has kernel='triton' and plan.backend is {backend!r}: write Plan('triton', ...)."
            )
        few = name != "wgrad" and p.M < _LEAST_ROWS * p.G
        # By the problem, not by which tuned row is the faster one: rows of the two kernels may come from cards of other temperatures.
        kernel = "pallas" if "pallas" in kernels and (few or len(kernels) == 1) else "triton"
        tuned = table.get((*key_of(read[name], p.G, p.M, K, N, p.dtype), kernel))
        chosen[name] = explicit or tuned or heuristic(read[name], dataclasses.replace(p, K=K, N=N), device, kernel)
    return Plan(backend, **chosen, device=device)  # pyright: ignore[reportArgumentType]  # choose_backend has checked it


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """Tiles for a shape that nobody tuned: the largest that the problem fills, shrunk until they fit the device."""
    if kernel == "triton":
        return _hopper_heuristic(pass_name, problem, device)
    rows = -(-problem.M // max(problem.G, 1))
    # However short the mean group, tiles are high enough for one group that holds all rows; Tiles.tail serves the short ones.
    out_rows, out_cols = {
        "fwd": (problem.M, problem.N),
        "dgrad": (problem.M, problem.K),
        "wgrad": (problem.K, problem.N),
    }[pass_name]
    step = {"fwd": problem.K, "dgrad": problem.N, "wgrad": rows}[pass_name]
    half = jnp.dtype(problem.dtype).itemsize == 2

    def cover(size: int, most: int) -> int:
        return min(most, max(16, power_of_2(size)))

    # H200, 2026-11-21: 128x256x64 with 8 warps is the fastest wherever a group fills it; wgrad over few rows is bound by its stores, which small
    # pipelines leave room to overlap: 128x128x32, three programs a multiprocessor.
    bm, bn, bk, warps, stages = (128, 256, 64, 8, 4) if half else (64, 128, 32, 4, 3)
    if pass_name == "wgrad" and rows < 1024:
        bm, bn, bk, warps, stages = (128, 128, 32, 4, 3) if half else (64, 128, 32, 4, 2)
    elif half and rows < _LEAST_ROWS:
        # H200, 2026-11-22, groups of 17 to 24 rows against 128x256x64: 39 instead of 49 us, 119 instead of 128 and, with 128 columns, 21 instead of 27.
        bm, bn, bk, warps, stages = (
            64,
            256 if -(-out_cols // 256) * 256 <= 1.05 * -(-out_cols // 128) * 128 else 128,
            32,
            4,
            4,
        )
        if pass_name == "dgrad":
            # Along the sum rhs lies in rows: of 32 numbers each is half a line of memory (H200, 2026-11-22, 90 groups of 23 rows: 22.9 instead of 27.5 us).
            bn, bk, stages = 128, 64, 3
    bm, bn = cover(out_rows, bm), cover(out_cols, bn)
    tiles = Tiles(
        bm,
        bn,
        cover(step, bk),
        warps if bm * bn >= 128 * 256 else 4,
        stages,
        peel=pass_name == "wgrad" and rows >= 1024,
    )
    tiles = dataclasses.replace(tiles, tail=_tail(pass_name, problem, bm))
    while tiles.shared_bytes(problem.dtype) > device.shared_bytes:
        if tiles.stages > 2:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        elif tiles.bn > tiles.bm:
            tiles = dataclasses.replace(tiles, bn=tiles.bn // 2)
        else:
            tiles = dataclasses.replace(tiles, bm=tiles.bm // 2, tail=_tail(pass_name, problem, tiles.bm // 2))
    return tiles


def _hopper_heuristic(pass_name: str, problem: Problem, device: Device) -> Tiles:
    """H200, 2026-11-21 and 22, balanced and Zipf: 128x256 is the fastest but where a model of the chip calls another one faster, as where a last tile is mostly
    empty (10 groups of 1,841 rows by 352 columns: 68 us with 256x128, 83 with 128x128 in turns) or a sum short. Over 30 passes of random shapes its choice
    takes 3 % longer on the mean than the fastest of twelve, 13 % at the most. Panels of 4 row tiles where groups are short, of 8 where they are not
    (mixtral_up: 806 against 782). A pipeline so deep that tiles are stored in halves where groups are short (qwen3_30b: 346, 359 and 402 instead of 360, 386
    and 420 us in the three passes), not where they are not: there the card's power bounds, and three stages draw less (mixtral_up: 10.7 to 11.0 against 11.2 to
    11.4 ms); nor where wgrad's sums are of a step or two (51 rows a group: 145 against 154 us). 256x128 takes four (18,414 rows by 352 columns: 68 against
    77 us), 128x128 in turns as many as leave room for whole tiles (9,697 by 648: 92 with five, 102 with six), and takes them as programs get free: it is for
    few tiles or short sums (11,467 rows by 320 columns in sums of 264: 12.4 against 13.7 us). Where wgrad's sums are of a step or two it stores more than it
    multiplies: 128x128 in place of 128x256 that overhang further (24 rows a group by 344 columns: 24.9 against 27.5 us; 52 by 600: 122 against 134)."""
    rows = -(-problem.M // max(problem.G, 1))
    how = {"panel": 4 if rows < 1024 else 8, "kernel": "triton"}
    dynamic, short = pass_name == "wgrad" or rows <= 128, pass_name == "wgrad" and rows <= 64
    stages = (3 if rows >= 1024 or short else 4, 4, 5, 6)
    usual, *others = (
        Tiles(bm, bn, 64, 8, each, turns=turns, dynamic=dynamic or bm == bn, **how)
        for (bm, bn, turns), each in zip(HOPPER_TILES, stages, strict=True)
    )
    if short and -(-problem.N // 128) % 2:
        return others[-1]
    best = min(others, key=lambda tiles: _clocks(pass_name, problem, tiles, device))
    # Where the usual tiles fill the card once and a little more, the model is kind to them: 152 of them (4,779 rows by 792) took 53 us, 266 half as large 35.
    margin = 1.0 if device.cores < _work(pass_name, problem, usual)[0] < 1.5 * device.cores else 1.06
    return (
        best
        if margin * _clocks(pass_name, problem, best, device) < _clocks(pass_name, problem, usual, device)
        else usual
    )


def _tail(pass_name: str, problem: Problem, bm: int) -> int:
    """The height that covers the mean group, at most half a tile: it serves the ends of long groups, and short groups whole."""
    rows = -(-problem.M // max(problem.G, 1))
    return 0 if pass_name == "wgrad" or bm < 32 else min(bm // 2, max(16, power_of_2(rows)))


# Output tiles (bm, bn, warps): 64 to 128 float32 accumulators a thread for the large ones. 128x128 with 4 warps leaves room for three programs a
# multiprocessor (168 registers, 64 KB), so that one's stores run beside another's products.
_OUTPUT_TILES = (
    (128, 256, 8),
    (256, 128, 8),
    (128, 128, 4),
    (128, 128, 8),
    (64, 256, 4),
    (64, 128, 4),
    (128, 64, 4),
    (32, 256, 4),
    (32, 128, 4),
    (16, 256, 4),
    (16, 128, 4),
)
_STEPS = ((64, 3), (64, 4), (64, 5), (128, 2), (128, 3), (128, 4), (256, 3))  # bytes of one row's step, stages


def candidates(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those that fit the device's shared memory, that the problem's sizes can fill, and that are
    among the best in a model of the chip (`_clocks`)."""
    found = (
        _hopper_tiles(pass_name, problem, device) if kernel == "triton" else _pallas_tiles(pass_name, problem, device)
    )
    clocks = [_clocks(pass_name, problem, tiles, device) for tiles in found]
    most = _AMONG_THE_BEST * min(clocks, default=0)
    return list(
        dict.fromkeys(
            [
                heuristic(pass_name, problem, device, kernel),
                *(tiles for tiles, own in zip(found, clocks, strict=True) if own <= most),
            ]
        )
    )


# H200, 2026-11-22: the fastest tiles at each benchmark shape and pass, of either kernel, are 1.16 times the model's best at the most.
_AMONG_THE_BEST = 1.18


def _clocks(pass_name: str, problem: Problem, tiles: Tiles, device: Device) -> float:
    """About how many clock cycles a pass takes: waves of programs (as many as a multiprocessor's shared memory and registers hold), each as long as the tensor
    cores or the L2 take for its steps, and its stores where nothing runs beside them; at the least, what the memory takes for all arrays once. G groups end in
    half a tile each, on the mean, and wgrad takes as long as two tiles at least: the longest group's is the last one."""
    p, size = problem, jnp.dtype(problem.dtype).itemsize
    rows = p.M / max(p.G, 1)
    count, steps = _work(pass_name, problem, tiles)
    high = tiles.tail if rows <= tiles.tail else tiles.bm
    products, loads, memory = (
        (2048, 48, 19) if device.is_hopper else (1024, 40, 10)
    )  # multiplications and bytes a clock; of one multiprocessor
    step = max(high * tiles.bn * tiles.bk * size / 2 / products, (high + tiles.bn) * tiles.bk * size / loads)
    resident = 1
    if tiles.kernel == "pallas":
        registers = 32 * tiles.warps * min(255, 40 + tiles.bm * tiles.bn // (32 * tiles.warps))
        resident = max(1, min(device.shared_bytes // tiles.shared_bytes(p.dtype), 65_536 // registers))
    store = high * tiles.bn * size / loads
    one = max(steps * step, store) if tiles.turns or resident > 1 else steps * step + store
    moved = size * (p.M * p.K + p.M * p.N + p.G * p.K * p.N)
    waves = max(-(-count // (device.cores * resident)), 2 if pass_name == "wgrad" else 1)
    return max(waves * resident * one, moved / (memory * device.cores))


def _work(pass_name: str, problem: Problem, tiles: Tiles) -> tuple[float, float]:
    """Output tiles, and steps along the sum of each, on the mean."""
    p = problem
    if pass_name == "wgrad":
        return p.G * -(-p.K // tiles.bm) * -(-p.N // tiles.bn), p.M / max(p.G, 1) / tiles.bk + 0.5
    inner, columns = (p.K, p.N) if pass_name == "fwd" else (p.N, p.K)
    return max(p.G, p.M / tiles.bm + p.G / 2) * -(-columns // tiles.bn), -(-inner // tiles.bk)


def _pallas_tiles(pass_name: str, problem: Problem, device: Device) -> list[Tiles]:
    size = jnp.dtype(problem.dtype).itemsize
    rows = 2 * -(-problem.M // max(problem.G, 1))  # a skewed routing has groups of twice the mean and more
    most = {"fwd": (problem.M, problem.N), "dgrad": (problem.M, problem.K), "wgrad": (problem.K, problem.N)}[pass_name]
    few = most[0] if pass_name == "wgrad" else rows
    found = []
    peels = (False, True) if pass_name == "wgrad" and rows >= 512 else (False,)
    for (bm, bn, warps), (step_bytes, stages), panel, peel in itertools.product(_OUTPUT_TILES, _STEPS, (8, 32), peels):
        tiles = Tiles(bm, bn, step_bytes // size, warps, stages, panel, peel, _tail(pass_name, problem, bm))
        too_large = bm > max(16, most[0]) or bn >= 2 * max(64, most[1]) or (size == 4 and bm * bn > 128 * 128)
        too_small = bm < 64 and few >= 1024
        too_deep = step_bytes == 256 and bm > 32
        if not (too_large or too_small or too_deep) and tiles.shared_bytes(problem.dtype) <= device.shared_bytes:
            found.append(tiles)
    return found


def _hopper_tiles(pass_name: str, problem: Problem, device: Device) -> list[Tiles]:
    """Each with as deep a pipeline as fits, and as fits where tiles are stored whole."""
    found = []
    ways = (True,) if pass_name == "wgrad" else (False, True)
    for (bm, bn, turns), panel, dynamic in itertools.product(HOPPER_TILES, (4, 8, 16), ways):
        depths = [
            Tiles(bm, bn, 64, 8, stages, panel, kernel="triton", turns=turns, dynamic=dynamic)
            for stages in (6, 5, 4, 3)
        ]
        fit = [tiles for tiles in depths if tiles.shared_bytes(problem.dtype) <= device.shared_bytes]
        whole = next(tiles for tiles in fit if tiles.stored == bn)
        found += dict.fromkeys((fit[0], whole))
    return found
