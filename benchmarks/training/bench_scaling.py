"""Training steps over all devices of one process against one device: speed, exposed communication, memory, losses.

python -m benchmarks scaling                                     # lm 3b and dit 1b on every mesh
python -m benchmarks scaling --workloads lm --meshes data,fsdp=2+tensor=2   # some, and a mixture of axes
python -m benchmarks scaling --workloads 30b --meshes fsdp       # too large for one device
python -m benchmarks scaling --smoke --out /tmp/x                # tiny models on host devices
CUDA_VISIBLE_DEVICES=I python -m benchmarks scaling --process I/2@localhost:1234   # for I 0 and 1: two processes

A mesh is over all N devices, and has N times the batch of one device. Three kinds of steps are measured:

- `one`: one device, its own batch. `scaling` of the others is their tokens/s over N times its.
- `whole`: one device, the whole batch of the mesh if it fits. A mesh's losses are compared with its.
- a mesh, such as `data=2`.

`--set model.layers=24` and other settings change the preset, whose batch is that of one device. The profile of each
mesh of one axis is written beside the rows, and that of the only mesh.

Of a workload that does not fit on one device only meshes are measured, and each step waits for the one before: see
`free_memory`.
"""

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Annotated, Any, NamedTuple

import jax
import typer

from benchmarks import harness
from benchmarks.harness.traces import named, write_trace
from benchmarks.training import bench_train_step
from benchmarks.training.bench_train_step import APART, WARMUP, Workload, key_of, run_steps, speeds, state_of
from benchmarks.training.free_memory import check_fits, checked
from benchmarks.training.meshes import axes_of, file_name, meshes_of
from jaxops.offload.reports import needed_bytes
from jaxops.profiling.trace import Event, exposed_us, recorded, union_us
from models.distributed import processes as distributed
from models.distributed.mesh import AXES, make_mesh, parts_of
from models.precision import PRECISIONS
from models.training import config
from models.training.presets import DIT_PRESETS, PRESETS, DiTPreset
from models.training.schedule import with_steps

ONE, WHOLE = "one", "whole"
SMOKE_DEVICES = 4
WORKERS = 8  # steps that are compiled together

# Sets of XLA's options, over those of the models' steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "nccl": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PRIVATE_MEMORY"},  # see models.layers.options_for
    "synchronous": {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"},  # nothing runs beside a collective
}


class Case(NamedTuple):
    """A step to measure.

    Attributes:
      mesh: of `make_mesh`, such as "data=2"; ONE or WHOLE on one device.
      make: its workload.
      whole: for a mesh the case on one device with the same losses, by name.
      options: of OPTIONS.
    """

    name: str
    mesh: str
    make: Callable[[], Workload]
    whole: str = ""
    options: str = "default"


class Sizes(NamedTuple):
    """A workload.

    Attributes:
      name: in rows.
      preset: with the batch of one device.
      axes: of the meshes that are measured.
      alone: the most devices whose whole batch fits on one H200; 0: not even a device's own does.
    """

    name: str
    preset: Any
    axes: tuple[str, ...]
    alone: int = 8


WORKLOADS = {
    "lm": Sizes("moe_3b", PRESETS["3b"], AXES, alone=4),
    "dit": Sizes("dit_1b", DIT_PRESETS["1b"], ("data", "tensor"), alone=2),
    "30b": Sizes("moe_30b", dataclasses.replace(PRESETS["30b"], batch=PRESETS["30b"].batch // 8), AXES, alone=0),
}
SMOKE = {
    "lm": Sizes("moe_smoke", bench_train_step.SMOKE["moe_smoke"][1], AXES),
    "dit": Sizes("dit_smoke", dataclasses.replace(bench_train_step.SMOKE["dit_smoke"][1], heads=4), ("data", "tensor")),
    "30b": Sizes("large_smoke", bench_train_step.SMOKE["moe_smoke"][1], AXES, alone=0),
}
DEFAULT = ("lm", "dit")


def changed(sizes: Sizes, settings: Sequence[str]) -> Sizes:
    """With settings KEY=VALUE as of `models.train --set`. Another depth is a part of the name.

    Raises:
      typer.BadParameter: an unknown or impossible setting.
    """
    with config.errors_of_options():
        preset = config.resolve(sizes.preset, config.assignments(settings))
    before, layers = (getattr(given, "model", given).layers for given in (sizes.preset, preset))
    name = sizes.name if layers == before else f"{sizes.name}_{layers}_layers"
    return sizes._replace(name=name, preset=preset)


def grown(preset: Any, devices: int) -> Any:
    """With the batch of so many devices."""
    if isinstance(preset, DiTPreset):
        return dataclasses.replace(preset, tokens=devices * preset.tokens, images=devices * preset.images)
    return dataclasses.replace(preset, batch=devices * preset.batch)


def cases_of(sizes: Sizes, meshes: Sequence[str], options: Sequence[str], precision: str, steps: int) -> list[Case]:
    """In the order in which they run: what others are compared with comes first. Meshes with other axes than
    `sizes.axes` are left out.
    """
    devices = jax.device_count()
    one = with_steps(sizes.preset, steps)  # the learning rate rises at once: the losses depend on the gradients
    whole, images = grown(one, devices), isinstance(one, DiTPreset)
    make = bench_train_step.dit if images else bench_train_step.lm
    of = lambda preset, **more: lambda: make(preset, "auto", precision, steps, **more)
    most = sizes.alone if distributed.is_first() else 0  # the other processes measure nothing alone
    found, over = {ONE: Case(ONE, ONE, of(one))} if most else {}, []
    for name in meshes:
        if not set(axes_of(name)) <= set(sizes.axes):
            continue
        mesh = make_mesh(name)
        # The parts of a batch of images are packed, and draw their noise, by themselves.
        parts = {"parts": parts_of(mesh)} if images else {}
        alone = f"{WHOLE} in {parts_of(mesh)}" if images else WHOLE
        if devices <= most:
            found.setdefault(alone, Case(alone, WHOLE, of(whole, **parts)))
        over += [Case(f"{name} {chosen}", name, of(whole, mesh=mesh), alone, chosen) for chosen in options]
    return [*found.values(), *over]


class Shares(NamedTuple):
    """A profiled step, in milliseconds; of several devices the largest.

    Attributes:
      exposed: while a collective runs, and no kernel and no copy of the same device.
      collectives: while a collective runs. It runs from its start on one device, so it may wait for the others.
      kernels: while a kernel runs.
      idle: while nothing runs, from the first event to the last one.
    """

    exposed: float
    collectives: float
    kernels: float
    idle: float


def shares_of(events: Sequence[Event]) -> Shares:
    found = [Shares(0.0, 0.0, 0.0, 0.0)]
    for device in {event.device for event in events}:
        own = [event for event in events if event.device == device]
        collectives = [event for event in own if event.kind == "communication"]
        others = [event for event in own if event.kind != "communication"]
        kernels = [event for event in own if event.kind == "kernel"]
        span = max(event.end_us for event in own) - min(event.start_us for event in own)
        us = exposed_us(collectives, others), union_us(collectives), union_us(kernels), span - union_us(own)
        found.append(Shares(*(each / 1e3 for each in us)))
    return Shares(*map(max, zip(*found, strict=True)))


class Built(NamedTuple):
    """A compiled case.

    Attributes:
      start: makes the state before the first step.
      seconds: of tracing and compiling, beside other compilations.
    """

    workload: Workload
    step: Any
    start: Callable[[], Any]
    seconds: float


@dataclasses.dataclass
class Run:
    """The cases of one workload.

    Attributes:
      until: when the last step may start, in seconds of `time.perf_counter`.
      traces: meshes whose profiles are written.
      settings: over those of the preset, for the rows.
      one: tokens a second of one device.
      losses: of the cases so far, by name.
    """

    sizes: Sizes
    file: pathlib.Path
    precision: str
    until: float
    traces: Sequence[str] = ()
    settings: Sequence[str] = ()
    one: float | None = None
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: int = 0

    def all(self, cases: Sequence[Case]) -> None:
        """The first case is compiled and measured alone: what XLA's autotuner chose for it, the others take. They are
        compiled together. Nothing is measured while something is compiled.
        """
        with ThreadPoolExecutor(WORKERS) as pool:
            self.case(cases[0], self.build(cases[0], pool))
            building = [(case, self.build(case, pool)) for case in cases[1:]]
            wait(future for _, future in building)
        while building:  # the program and the batches of a case are freed when it is done
            self.case(*building.pop(0))

    def left(self) -> float:
        return self.until - time.perf_counter()

    def build(self, case: Case, pool: ThreadPoolExecutor) -> "Future[harness.Compiled]":
        def trace() -> Callable[[], Any]:
            if self.left() <= 0:
                raise TimeoutError("the time limit")
            workload = case.make()
            state = state_of(workload)
            split = None if workload.mesh is None else jax.tree.map(lambda x: x.sharding, state)
            start = jax.jit(workload.start, out_shardings=split).lower()
            lowered = workload.step.lower(state, workload.batches[0], key_of(workload))
            return lambda: (workload, lowered.compile(OPTIONS[case.options] or None), start.compile())

        return harness.start_compiling(pool, trace)

    def case(self, case: Case, built: "Future[harness.Compiled]") -> None:
        """Measures and writes a case; of one that fails the error is printed."""
        try:
            found = built.result()
            if self.left() <= 0:
                raise TimeoutError("the time limit")
            workload, step, start = found.result
            self.measure(case, Built(workload, step, start, found.seconds))
        except Exception as error:
            harness.print_left_out(f"{self.sizes.name} {case.name}", error)
            self.failed += not isinstance(error, TimeoutError)

    def measure(self, case: Case, built: Built) -> None:
        workload, step = built.workload, built.step
        check_fits(step)
        if not self.sizes.alone:
            step = checked(step)
        state, us, losses = run_steps(step, built.start(), workload, self.left())
        with recorded() as events:
            state = jax.block_until_ready(step(state, workload.batches[0], key_of(workload)))
        del state
        self.losses[case.name] = losses
        self.write(case, built, us, shares_of(events))
        if case.mesh in self.traces and harness.on_gpu() and distributed.is_first():
            name = f"train_step_{self.sizes.name}_{file_name(case.mesh)}_{case.options}"
            first = named(event for event in events if event.device == 0)
            write_trace(first, self.file.with_name(f"{name}.trace.json.gz"))

    def write(self, case: Case, built: Built, us: list[float], shares: Shares) -> None:
        """The row, after a check of the first loss.

        Raises:
          ArithmeticError: the first loss is not that of one device.
        """
        workload, losses = built.workload, self.losses[case.name]
        devices = 1 if workload.mesh is None else workload.mesh.size
        times = harness.Times.of(us)
        facts: dict[str, Any] = {"recipe": PRECISIONS[self.precision].recipe, "mesh": case.mesh, "devices": devices}
        facts |= speeds(workload, times)
        facts |= {"mfu": facts["mfu"] / devices, "tflops_per_device": facts["tflops"] / devices}
        if case.mesh == ONE:
            self.one = facts["tokens_per_s"]
        if self.one is not None:
            facts["scaling"] = facts["tokens_per_s"] / (devices * self.one)
        facts |= {f"{name}_ms": each for name, each in shares._asdict().items()}
        facts |= {"peak_bytes": needed_bytes(built.step)[0], "options": case.options}
        facts |= {"set": list(self.settings)} if self.settings else {}
        if not jax.config.values["jax_compilation_cache_dir"]:  # a cached program takes no time
            facts["compile_s"] = built.seconds
        facts["processes"] = jax.process_count()
        facts["loss"] = [round(loss, 6) for loss in losses]
        if case.whole in self.losses:
            facts["loss_apart"] = largest_difference(losses, self.losses[case.whole])
            first = self.losses[case.whole][0]
            if not abs(losses[0] / first - 1) < APART:
                raise ArithmeticError(f"the first loss is {losses[0]}, that of one device {first}")
        workload_named, dtype = harness.Named(self.sizes.name, workload.shape), PRECISIONS[self.precision].dtype
        named_case = harness.case_of("train_step", "step", workload_named, dtype) | {"backend": "jaxops"}
        if not distributed.is_first():
            return
        harness.append_row(self.file, harness.make_row(named_case, times, None, {}, None, **facts))
        line = f"{times.us_p50 / 1e3:.1f} ms a step, {facts['tokens_per_s']:,.0f} tokens/s"
        shown = ("tflops_per_device", "scaling", *(f"{name}_ms" for name in Shares._fields))
        shown += ("loss_apart",)
        line += "".join(f", {name} {facts[name]:.3g}" for name in shown if name in facts)
        line += f", {facts['peak_bytes'] / 1e9:.1f} GB, compiled in {built.seconds:.0f} s"
        print(f"{self.sizes.name} {case.name}: {line}, {self.left():.0f} s left", flush=True)


def told(process: str) -> tuple[str, int, int]:
    """(HOST:PORT, processes, this one's index) of I/N@HOST:PORT.

    Raises:
      typer.BadParameter: it is something else.
    """
    if found := re.fullmatch(r"(\d+)/(\d+)@(.+:\d+)", process):
        return found[3], int(found[2]), int(found[1])
    raise typer.BadParameter(f"{process}: write I/N@HOST:PORT, such as 0/2@localhost:1234.", param_hint="--process")


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Of the steps that both have."""
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=False))


def main(
    workloads: str = typer.Option(",".join(DEFAULT), help=f"Of {', '.join(WORKLOADS)}."),
    meshes: str = typer.Option(
        ",".join(AXES),
        help="Each over all devices: an axis, or several with their sizes as in fsdp=2+tensor=2. Of dit only those of "
        "data and tensor are measured.",
    ),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As of models.train, over the preset with one device's batch."),
    ] = None,
    precision: str = typer.Option("bfloat16", help="Of " + ", ".join(PRECISIONS) + "."),
    steps: int = typer.Option(10, min=WARMUP + 2, help="Of each case: two warm up, and the last is not timed."),
    options: str = typer.Option("default", help=f"XLA's, of {', '.join(OPTIONS)}; each mesh runs with each."),
    process: str = typer.Option(
        "",
        help="I/N@HOST:PORT: this is process I of N that run together, each with its own devices; 0 writes the rows.",
    ),
    time_limit: float = typer.Option(1e4, help="Seconds after which no further step starts."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="Tiny models on host devices, every code path; needs --out."),
) -> None:
    """Appends to <out>/train_step.jsonl after each case; exits with 1 if a case failed."""
    begin = time.perf_counter()
    harness.take_memory()
    if smoke:
        harness.host_devices(SMOKE_DEVICES)
    if process:
        distributed.initialize(*told(process))
    file = harness.begin("train_step", out, smoke, jax.device_count())
    over = meshes_of(meshes)
    traced = [mesh for mesh in over if len(over) == 1 or len(axes_of(mesh)) == 1]
    precision, failed = "float32" if smoke else precision, 0
    for name in harness.names(workloads, WORKLOADS):
        sizes = changed((SMOKE if smoke else WORKLOADS)[name], settings or ())
        run = Run(sizes, file, precision, begin + time_limit, traced, settings or ())
        run.all(cases_of(sizes, over, harness.names(options, OPTIONS), precision, steps))
        failed += run.failed
        jax.clear_caches()
    harness.end(failed)
