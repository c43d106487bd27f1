"""A model of the card: how many clocks a pass takes with given tiles. The heuristics compare by it."""

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.device import LINE_BYTES, SECTOR_BYTES, Device
from jaxops.ops.grouped_matmul.long_sums import Sums

if TYPE_CHECKING:
    from jaxops.ops.grouped_matmul.plan import Problem, Tiles


def clocks(pass_name: str, problem: "Problem", tiles: "Tiles", device: Device) -> float:
    """A model of a pass' clock cycles, at least the time of moving all arrays through memory once."""
    p, size = problem, jnp.dtype(problem.dtype).itemsize
    moved = size * (p.M * p.K + p.M * p.N + p.G * p.K * p.N)
    _, memory, _ = tile_clocks(tiles.bm, tiles, p.dtype, device)
    of_tiles = hopper_clocks if tiles.kernel == "triton" else _pallas_clocks
    return max(of_tiles(pass_name, problem, tiles, device), moved / (memory * device.cores))


def _pallas_clocks(pass_name: str, problem: "Problem", tiles: "Tiles", device: Device) -> float:
    """Waves of programs, each as long as the tensor cores or L2 need for its steps, plus its stores where nothing
    overlaps them.

    A multiprocessor holds as many programs as fit its shared memory and registers. Each group ends in half a tile on
    average. wgrad counts at least two waves: the longest group's tile runs last."""
    p, rows = problem, problem.M / max(problem.G, 1)
    count, steps = work(pass_name, problem, tiles)
    high = tiles.tail if rows <= tiles.tail else tiles.bm
    step, _, store = tile_clocks(high, tiles, p.dtype, device)
    registers = 32 * tiles.warps * min(255, 40 + tiles.bm * tiles.bn // (32 * tiles.warps))
    resident = max(1, min(device.shared_bytes // tiles.shared_bytes(p.dtype), 65_536 // registers))
    one = max(steps * step, store) if resident > 1 else steps * step + store
    waves = max(-(-count // (device.cores * resident)), 2 if pass_name == "wgrad" else 1)
    return waves * resident * one


def unaligned(width: int) -> bool:
    """Whether rows of so many 16-bit numbers are no multiple of a sector, so that some start inside of one."""
    return 2 * width % SECTOR_BYTES > 0


def whole_lines(*widths: int) -> bool:
    """Whether rows of so many 16-bit numbers are whole cache lines, which L2 delivers faster."""
    return all(2 * width % LINE_BYTES == 0 for width in widths)


# Of Hopper's kernels, fitted to 96 passes of random shapes, each with even and uneven groups and up to ten tiles (H100
# 80GB HBM3, 2026-11-26, profiles/tiles.csv). What the model chooses takes 1.023 times as long as the fastest tiles
# (geometric mean), at most 1.33 times.
# Clocks between a tile's last step and the next tile.
_AFTER = {(128, 256): 200, (256, 128): 600, (128, 128): 50, (256, 256): 1000}
_LOADS = 57  # bytes a clock from L2
_UNALIGNED_LOADS = 1.75  # times the bytes of aligned rows
_UNALIGNED_STORES = 3  # times _AFTER; not of clusters
_SQUARE = 1.1  # times a step of 128x128, of which two do the work of a step of 128x256
# Of clusters, with their _AFTER: fitted to 243 cases of all passes with even and uneven groups (H100, 2026-11-27,
# clusters.csv in profiles/). The model's choice takes 1.01 times as long as the faster of cluster and program; without
# clusters it is 1.10 times.
_CLUSTER_STARTS = 3000  # clocks


def hopper_clocks(pass_name: str, problem: "Problem", tiles: "Tiles", device: Device) -> float:
    """Of the persistent kernels: the geometric mean of even groups and of Zipf's, since a plan serves both.

    A tile's step takes as long as the tensor cores or L2 need, and a little longer if both need about the same. In half
    a tile of rows only one of two warp groups multiplies.
    """
    p = problem
    if 0 in (p.G, p.M, p.K, p.N):
        return 0.0
    even = np.full(p.G, p.M // p.G) + (np.arange(p.G) < p.M % p.G)
    zipf = 1 / np.arange(1, p.G + 1)
    both = even, p.M / zipf.sum() * zipf
    return math.prod(_hopper_clocks(pass_name, p, tiles, device.cores, sizes) for sizes in both) ** 0.5


def _hopper_clocks(pass_name: str, p: "Problem", tiles: "Tiles", cores: int, sizes: np.ndarray) -> float:
    """With groups of these sizes: waves of equally long tiles; of wgrad, whose tiles are not, an even share."""
    wgrad = pass_name == "wgrad"
    rows, columns, inner, width_of_a = {
        "fwd": (sizes, p.N, p.K, p.K),
        "dgrad": (sizes, p.K, p.N, p.N),
        "wgrad": (p.K, p.N, np.maximum(sizes, 1), p.K),
    }[pass_name]
    a, b = (_UNALIGNED_LOADS if unaligned(width) else 1 for width in (width_of_a, p.N))  # B's rows have N numbers
    programs = tiles.programs
    at_once, starts = cores // programs, _CLUSTER_STARTS if programs > 1 else 0
    after = _AFTER[tiles.bm, tiles.bn] * (_UNALIGNED_STORES if unaligned(columns) and programs == 1 else 1)
    square = _SQUARE if tiles.bm == tiles.bn == 128 else 1
    steps = np.ceil(inner / tiles.bk)

    def of_tile(high: int) -> np.ndarray:
        products, loads = high * tiles.bn / 32, 2 * tiles.bk * (high * a + tiles.bn * b) / _LOADS
        multiplied = steps * square * (products**4 + loads**4) ** 0.25 / programs
        return np.maximum(multiplied, after) if tiles.ping_pong else multiplied + after

    down, across = np.ceil(rows / tiles.bm), -(-columns // tiles.bn)
    half = (rows > 0) & (rows - (down - 1) * tiles.bm <= tiles.bm // 2)  # a group's last tile
    halves = across * half * (not (wgrad or tiles.ping_pong))
    count, whole = down * across * np.ones_like(sizes), of_tile(tiles.bm)
    total = np.sum((count - halves) * whole + halves * of_tile(tiles.bm // 2))
    if not wgrad:
        return total / count.sum() * -(-count.sum() // at_once) + starts
    # The longest come first: at the end a program waits for half of a short one.
    return max(whole.max(), total / at_once + 0.5 * whole.min() if count.sum() > at_once else 0.0) + starts


def tile_clocks(high: int, tiles: "Tiles", dtype: str, device: Device) -> tuple[float, float, float]:
    """Of a multiprocessor: clocks of a step of a tile of so many rows, bytes a clock from memory, clocks of a store."""
    size = jnp.dtype(dtype).itemsize  # next, a clock: multiplications, bytes from L2, bytes from memory
    # 19 is an H200's, for an H100, too: which tiles are fastest depends little on it.
    products, loads, memory = (2048, 48, 19) if device.is_hopper else (1024, 40, 10)
    step = max(high * tiles.bn * tiles.bk * size / 2 / products, (high + tiles.bn) * tiles.bk * size / loads)
    return step, memory, high * tiles.bn * size / loads


def has_thin_tile(pass_name: str, problem: "Problem", device: Device) -> bool:
    """Whether groups have 8 to 31 rows, and end in a tile of at most 64 of 256 columns, the last of two to four.

    Loads of such a tile are small. The Pallas kernel's tiles share a multiprocessor with others. H100, 24 cases: those
    of 64x256 take 0.88 to 1.12 times as long, 0.95 times on the mean. H200, 16 cases: those of 128x128 take 0.74 to
    1.04 times as long, 0.85 times on the mean (2026-11-27, profiles/few_rows.csv of both).
    """
    short = device.is_hopper and pass_name == "fwd" and jnp.dtype(problem.dtype).itemsize == 2
    thin = 256 < problem.N < 1024 and 0 < problem.N % 256 <= 64
    return short and 8 <= problem.rows < 32 and problem.K >= 2048 and thin


def takes_clusters(pass_name: str, problem: "Problem") -> bool:
    """Whether clusters may pay: where rows are no whole cache lines, so that L2's loads bound most products.

    They have four stages and take tiles dynamically. On the geometric mean of 93 to 99 cases the forward takes 0.96
    times as long as with three stages and in static order, dgrad 0.98 times as long as in static order, wgrad 0.91
    times, with uneven groups 0.87 (profiles/clusters.csv). Not measured with mean groups of less than half a tile.

    Not for wgrad where more than half of the tiles would be padding: 36 groups, one of them with half of 45,570 rows, K
    280 by N 840, took 143 instead of 113 us (H200, 2026-11-27; H100: 137 instead of 130).
    """
    K, N = problem.K, problem.N
    padded = pass_name == "wgrad" and 256**2 * -(-K // 256) * -(-N // 256) > 2 * K * N
    return not padded and problem.rows >= 128 and not whole_lines(K, N)


def work(pass_name: str, problem: "Problem", tiles: "Tiles") -> tuple[float, float]:
    """Output tiles, and the steps along the sum of each, on average."""
    p = problem
    if pass_name == "wgrad":
        return p.G * -(-p.K // tiles.bm) * -(-p.N // tiles.bn), p.M / max(p.G, 1) / tiles.bk + 0.5
    inner, columns = (p.K, p.N) if pass_name == "fwd" else (p.N, p.K)
    return max(p.G, p.M / tiles.bm + p.G / 2) * -(-columns // tiles.bn), -(-inner // tiles.bk)


# Bytes a clock of whole cache lines from L2, to one multiprocessor and to all of them: six shapes of one to four long
# groups (parts_* in profiles/tiles.csv, H100, 2026-11-27). At widths that are no multiple of 16 all multiprocessors
# together load 5.5 TB/s, however the sums are split. `hopper_clocks` keeps the factors that it was fitted with.
_LOADS_OF_ONE, _LOADS_OF_ALL = 72, 6400


def sums_of(problem: "Problem", tiles: "Tiles", device: Device) -> Sums:
    """What the rule for splits needs of a weight gradient of 16-bit numbers."""
    p, (_, _, store) = problem, tile_clocks(tiles.bm, tiles, problem.dtype, device)
    own = tiles.bm // tiles.programs  # rows of a cluster's program
    products = own * tiles.bn / 32 * (_SQUARE if tiles.bm == tiles.bn == 128 else 1)
    a, b = (2 * tiles.bk * _lines(width) for width in (p.K, p.N))  # bytes of a row of a step
    return Sums(
        *(p.G, p.M, p.K, p.N, tiles.bm, tiles.bn),
        step=max(products, (own * a + tiles.bn // tiles.programs * b) / _LOADS_OF_ONE),
        loads=(tiles.bm * a + tiles.bn * b) / _LOADS_OF_ALL,
        store=store / tiles.programs,
        overlaps=tiles.ping_pong,
        whole=p.whole_sums,
        cores=device.cores // tiles.programs,
    )


def _lines(width: int) -> float:
    """Cache lines that TMA reads for 64 of a row's 16-bit numbers, on average: two where they cross a line's end."""
    return 2 - math.gcd(2 * width, LINE_BYTES) / LINE_BYTES
