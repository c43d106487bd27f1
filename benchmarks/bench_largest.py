"""The largest batch and the deepest model whose training step fits, on one device and on meshes of all devices.

python -m benchmarks.bench_largest                        # the preset 3b of `models.train lm`, every mesh
python -m benchmarks.bench_largest --meshes one,fsdp      # some of them
python -m benchmarks.bench_largest --meshes tensor --what rows
python -m benchmarks.bench_largest --smoke --out /tmp/x   # a tiny model on host devices, with a made-up limit

A compiled step tells the bytes that a device needs. They are linear in the layers and in the rows of a batch: four
small steps give the line. The largest that it lets expect is compiled and run, or, should it not fit, the next smaller
one. A step also needs one free block of memory for all of its temporaries, which is checked before each step of a run.
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import typer

from benchmarks import bench_scaling, bench_train_step, harness
from benchmarks.bench_offload import RESERVED
from benchmarks.bench_scaling import ONE, SMOKE_DEVICES, Case, grown
from benchmarks.bench_train_step import WARMUP, run_steps, speeds, state_of
from benchmarks.free_memory import checked
from jaxops.offload.reports import needed_bytes
from models.distributed.mesh import AXES, make_mesh
from models.training.presets import Preset
from models.training.schedule import with_steps

What = Literal["rows", "layers"]
WHAT: tuple[What, ...] = ("rows", "layers")
MESHES = (ONE, *AXES)
STEPS = WARMUP + 3
SMOKE_BYTES = 3e7


class Size(NamedTuple):
    """Rows of a device's batch, and layers."""

    rows: int
    layers: int


def largest(sizes: Sequence[Size], needed: Sequence[float], start: Size, what: What, budget: float) -> Size:
    """start with as many rows or layers as fit into budget bytes, given what four sizes need."""
    terms = lambda size: (1, size.rows, size.layers, size.rows * size.layers)
    line = np.linalg.solve(np.array([terms(size) for size in sizes], float), np.array(needed, float))
    expected = lambda n: float(np.dot(terms(start._replace(**{what: n})), line))
    more = expected(2) - expected(1)
    return start._replace(**{what: max(1, int((budget - expected(0)) // more))})


@dataclasses.dataclass
class Run:
    """The sizes of one preset.

    Attributes:
      depths: layers of the small steps.
      budget: bytes of a device.
      what: is grown.
    """

    cases: bench_scaling.Run
    preset: Preset
    depths: tuple[int, int]
    budget: float
    pool: ThreadPoolExecutor
    what: Sequence[What] = WHAT

    def build(self, mesh: str, size: Size) -> "Future[harness.Compiled]":
        """Starts to compile a step."""
        jax.clear_caches()
        model = dataclasses.replace(self.preset.model, layers=size.layers)
        preset = dataclasses.replace(with_steps(self.preset, STEPS), batch=size.rows, model=model)
        over = None if mesh == ONE else make_mesh(mesh)
        preset = preset if over is None else grown(preset, over.size)
        make = lambda: bench_train_step.lm(preset, "auto", self.cases.precision, STEPS, over)
        return self.cases.build(Case(mesh, mesh, make), self.pool)

    def all(self, meshes: Sequence[str]) -> int:
        """The number of meshes that failed."""
        start, failed = Size(self.preset.batch, self.preset.model.layers), 0
        small = [Size(*each) for each in itertools.product((start.rows, 2 * start.rows), self.depths)]
        self.build(meshes[0], small[0]).result()  # the others take what XLA's autotuner chose for it
        building = {mesh: [self.build(mesh, size) for size in small] for mesh in meshes}
        large: list[tuple[str, What, Size, Future[harness.Compiled]]] = []
        for mesh, futures in building.items():
            needed = [needed_bytes(future.result().result[1])[0] for future in futures]
            for what in self.what:
                size = largest(small, needed, start, what, self.budget)
                print(f"{mesh}: {size} is expected to fit, {self.cases.left():.0f} s left", flush=True)
                large.append((mesh, what, size, self.build(mesh, size)))
        for _, _, _, future in large:
            future.exception()  # nothing is measured while something is compiled
        while large:  # a program's memory is free when its size is done
            mesh, what, size, future = large.pop(0)
            try:
                self.measure(mesh, what, size, future.result())
            except Exception as error:
                harness.print_left_out(f"{mesh} {size}", error)
                failed += not isinstance(error, TimeoutError)
        return failed

    def measure(self, mesh: str, what: What, size: Size, built: harness.Compiled) -> None:
        """Runs a size, or the largest smaller one that fits, and writes the row.

        Raises:
          MemoryError: not even one fits.
        """
        while (found := self.run(built)) is None:
            if getattr(size, what) == 1:
                raise MemoryError(f"not one of the {what} fits into {self.budget / 1e9:.1f} GB")
            size = size._replace(**{what: getattr(size, what) - 1})
            built = self.build(mesh, size).result()
        (us, losses), (workload, step, _) = found, built.result
        needed, params = needed_bytes(step)[0], sum(x.size for x in jax.tree.leaves(state_of(workload).params))
        times, devices = harness.Times.of(us), 1 if workload.mesh is None else workload.mesh.size
        facts: dict[str, Any] = {"mesh": mesh, "devices": devices, "grown": what, **size._asdict()}
        facts |= {"parameters": params, "peak_bytes": needed, "budget_bytes": int(self.budget)}
        facts |= speeds(workload, times) | {"loss": losses}
        facts["mfu"] /= devices
        row = {"op": "train_step", "pass": "step", "name": self.cases.sizes.name, "shape": workload.shape}
        row |= {"dtype": self.cases.precision, "dist": "", "backend": "jaxops"}
        harness.append_row(self.cases.file, harness.make_row(row, times, None, {}, None, **facts))
        print(
            f"{self.cases.sizes.name} {mesh}, {what}: {size.rows} rows of {self.preset.context:,} tokens a device, "
            f"{size.layers} layers, {params / 1e9:.2f} billion parameters, {needed / 1e9:.1f} of "
            f"{self.budget / 1e9:.1f} GB, {times.us_p50 / 1e3:.0f} ms, {facts['tokens_per_s']:,.0f} tokens/s, "
            f"{self.cases.left():.0f} s left",
            flush=True,
        )

    def run(self, built: harness.Compiled) -> tuple[list[float], list[float]] | None:
        """(microseconds, losses) of the steps; None where they do not fit."""
        workload, step, start = built.result
        if needed_bytes(step)[0] > self.budget:
            return None
        try:
            _, us, losses = run_steps(checked(step), start(), workload, self.cases.left())
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            # A free block may be cut by a later step's results: then all devices of a mesh fail alike.
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(str(error).splitlines()[0], flush=True)
            return None
        return us, losses


def main(
    meshes: str = typer.Option(",".join(MESHES), help="Each over all devices, but one, which is one device."),
    what: str = typer.Option(",".join(WHAT), help="Rows of a batch, layers, or both."),
    time_limit: float = typer.Option(1e4, help="Seconds after which no further step starts."),
    workers: int = typer.Option(8, help="Steps that are compiled together."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="A tiny model on host devices, every code path; needs --out."),
) -> None:
    """Appends to <out>/largest.jsonl; exits with 1 if a mesh failed."""
    begin = time.perf_counter()
    harness.take_memory()
    if smoke:
        harness.host_devices(SMOKE_DEVICES)
    file: pathlib.Path = harness.begin("largest", out, smoke, jax.device_count())
    sizes = (bench_scaling.SMOKE if smoke else bench_scaling.WORKLOADS)["lm"]
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    budget, depths = (SMOKE_BYTES, (1, 2)) if smoke or limit is None else (limit - RESERVED, (3, 7))
    cases = bench_scaling.Run(sizes, file, "float32" if smoke else "bfloat16", begin + time_limit)
    names = [mesh if mesh == ONE else f"{mesh}={jax.device_count()}" for mesh in harness.names(meshes, MESHES)]
    grown_sizes: Any = harness.names(what, WHAT)
    with ThreadPoolExecutor(workers) as pool:
        harness.end(Run(cases, sizes.preset, depths, budget, pool, grown_sizes).all(names))


if __name__ == "__main__":
    typer.run(main)
