"""A model of the card: how many clocks a pass takes with given tiles. The heuristics compare by it."""

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxops._lib.device import Device
from jaxops.ops.grouped_matmul.long_sums import Sums

if TYPE_CHECKING:
    from jaxops.ops.grouped_matmul.plan import Problem, Tiles


def clocks(pass_name: str, problem: "Problem", tiles: "Tiles", device: Device) -> float:
    """A model of a pass' clock cycles: waves of programs, each as long as the tensor cores or L2 need for its steps,
    plus its stores where nothing overlaps them; at least the time of moving all arrays through memory once.

    A multiprocessor holds as many programs as fit its shared memory and registers. Each group ends in half a tile on
    average. wgrad counts at least two waves: the longest group's tile runs last."""
    p, size = problem, jnp.dtype(problem.dtype).itemsize
    rows = p.M / max(p.G, 1)
    count, steps = work(pass_name, problem, tiles)
    high = tiles.tail if rows <= tiles.tail else tiles.bm
    step, memory, store = tile_clocks(high, tiles, p.dtype, device)
    resident = 1
    if tiles.kernel == "pallas":
        registers = 32 * tiles.warps * min(255, 40 + tiles.bm * tiles.bn // (32 * tiles.warps))
        resident = max(1, min(device.shared_bytes // tiles.shared_bytes(p.dtype), 65_536 // registers))
    one = max(steps * step, store) if tiles.ping_pong or resident > 1 else steps * step + store
    moved = size * (p.M * p.K + p.M * p.N + p.G * p.K * p.N)
    waves = max(-(-count // (device.cores * resident)), 2 if pass_name == "wgrad" else 1)
    return max(waves * resident * one, moved / (memory * device.cores))


def tile_clocks(high: int, tiles: "Tiles", dtype: str, device: Device) -> tuple[float, float, float]:
    """Of a multiprocessor: clocks of a step of a tile of so many rows, bytes a clock from memory, clocks of a store."""
    size = jnp.dtype(dtype).itemsize  # next, a clock: multiplications, bytes from L2, bytes from memory
    # 19 is an H200's. With an H100's own 13.5, the plans of 8 of 120 passes over random shapes changed, and took 1.08
    # times as long (geometric mean; at most 1.65, at least 0.97; H100 80GB HBM3, 2026-11-26, profiles/h100_plans.csv).
    products, loads, memory = (2048, 48, 19) if device.is_hopper else (1024, 40, 10)
    step = max(high * tiles.bn * tiles.bk * size / 2 / products, (high + tiles.bn) * tiles.bk * size / loads)
    return step, memory, high * tiles.bn * size / loads


def work(pass_name: str, problem: "Problem", tiles: "Tiles") -> tuple[float, float]:
    """Output tiles, and the steps along the sum of each, on average."""
    p = problem
    if pass_name == "wgrad":
        return p.G * -(-p.K // tiles.bm) * -(-p.N // tiles.bn), p.M / max(p.G, 1) / tiles.bk + 0.5
    inner, columns = (p.K, p.N) if pass_name == "fwd" else (p.N, p.K)
    return max(p.G, p.M / tiles.bm + p.G / 2) * -(-columns // tiles.bn), -(-inner // tiles.bk)


def sums_of(problem: "Problem", tiles: "Tiles", device: Device) -> Sums:
    p, (step, _, store) = problem, tile_clocks(tiles.bm, tiles, problem.dtype, device)
    how = tiles.ping_pong, p.whole_sums, device.cores
    return Sums(p.G, p.M, p.K, p.N, tiles.bm, tiles.bn, step, store, *how)
