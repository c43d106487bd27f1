"""Products across the devices of one host, beside the product alone and the ways of XLA and torch.

python -m benchmarks collective_matmul                            # everything
python -m benchmarks collective_matmul --ops mlp --sides xla      # a part
python -m benchmarks collective_matmul --smoke --out /tmp/x       # a tiny shape on host devices

M rows and N columns are those of all devices; a row's TFLOP/s are of one. A time is the wall clock of programs in
flight, each of several calls, over the number of calls: a training step has its products in one program, too, and to
dispatch a program to two devices takes 100 to 250 us of the host alone. torch's is of ten calls in a row by events, on
the slower card. `of_gemm` is the time over that of XLA's product alone, `host_us` what the host takes to start a call.

Beside the two ops there is `mlp`: a Megatron MLP, forward and backward. `xla` and `jaxops_gathered` keep the gathered
rows for the backward; `jaxops` and `xla_own_rows` keep a device's own rows and gather again.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.ops.collective_sides import (
    AGAIN,
    AXIS,
    GATHER,
    GEMM,
    KEPT,
    MLP,
    OWN,
    SCATTER,
    SIDES,
    XLA,
    Side,
    mesh_of_all,
    operands,
    program,
)
from benchmarks.peers import torch_collective as peers_torch_collective
from benchmarks.peers.torch_collective import TorchCards, sampled
from benchmarks.shapes import DenseShape

DTYPE = jnp.bfloat16
LIMITS = {GATHER: "bfloat16", SCATTER: "bfloat16", MLP: "bfloat16 mlp"}
OPS = (GATHER, SCATTER, MLP)
PEERS = (GEMM, XLA, AGAIN, KEPT, *peers_torch_collective.SIDES)
CALLS = {GATHER: 10, SCATTER: 10, MLP: 3}  # in a program
PRODUCTS = {GATHER: 1, SCATTER: 1, MLP: 6}
SMOKE, SMOKE_DEVICES = DenseShape(1000, 64, 256), 2


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    """until: when the last case may start, in seconds of `time.perf_counter`."""

    over: Mesh
    cards: TorchCards | None
    until: float
    pool: ThreadPoolExecutor = dataclasses.field(default_factory=lambda: ThreadPoolExecutor(8))

    def flops(self, op: str, shape: DenseShape) -> float:
        """Of a call, on one device."""
        return PRODUCTS[op] * shape.flops / self.over.size


@dataclasses.dataclass
class Timed:
    """A program of several calls, and the host's microseconds for each start of it."""

    program: Any
    args: tuple
    calls: int
    starts_us: list[float] = dataclasses.field(default_factory=list)

    def times_us(self, programs: int) -> list[float]:
        """Microseconds a call, the mean of so many programs in flight."""
        jax.block_until_ready(self.program(*self.args))
        result, begin = None, time.perf_counter()
        for _ in range(programs):
            start = time.perf_counter()
            result = self.program(*self.args)
            self.starts_us.append(1e6 * (time.perf_counter() - start))
        jax.block_until_ready(result)
        return [1e6 * (time.perf_counter() - begin) / programs / self.calls]

    @property
    def host_us(self) -> float:
        return statistics.median(self.starts_us) / self.calls


@dataclasses.dataclass
class Case:
    """An op or the MLP at a shape.

    Attributes:
      built: (program, its arguments) a side, when `build` has returned.
    """

    op: str
    shape: DenseShape
    args: tuple[jax.Array, ...]
    sides: dict[str, Side]
    built: "dict[str, Future[harness.Compiled]]" = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, op: str, shape: DenseShape) -> "Case":
        """With the sides that are asked for."""
        sides = {name: side for name, side in SIDES[op].items() if name in (OWN, *run.peers)}
        return cls(op, shape, operands(op, shape, run.over, DTYPE), sides)


def build(run: Run, cases: Sequence[Case]) -> None:
    """Compiles all sides of all cases.

    The products alone come first: what XLA's autotuner chooses for them, while little else runs, XLA's other sides
    take. The others are compiled together, and nothing is measured meanwhile.
    """
    for alone in (True, False):
        for case in cases:
            for name, side in case.sides.items():
                if (name == GEMM) == alone:
                    case.built[name] = start_building(run, side, case)
        wait(future for case in cases for future in case.built.values())


def start_building(run: Run, side: Side, case: Case) -> "Future[harness.Compiled]":
    def trace() -> Callable[[], Any]:
        args = placed(run, side, case.args)
        lowered = program(side, run.over, CALLS[case.op]).lower(*args)
        return lambda: (lowered.compile(), args)

    return harness.start_compiling(run.pool, trace)


def wanted(run: Run, side: Side, args: Sequence[jax.Array]) -> Any:
    """Some columns of a side's results, from the same computation in float32."""

    def local(*operands: jax.Array) -> Any:
        with jax.default_matmul_precision("highest"):
            return samples(side.call(*(x.astype(jnp.float32) for x in operands)))

    exact = jax.shard_map(local, mesh=run.over, in_specs=side.operands, out_specs=side.results, check_vma=False)
    options: Any = {"xla_gpu_autotune_level": 0} if harness.on_gpu() else None
    return jax.block_until_ready(jax.jit(exact).lower(*args).compile(options)(*args))


def samples(results: Any) -> Any:
    return jax.tree.map(lambda x: x[:, sampled(x.shape[1])], results)


def check(run: Run, side: Side, got: tuple, want: Any, limits: str) -> float:
    """The largest error of all calls of a program.

    Raises:
      ArithmeticError: a result is wrong.
    """
    errors = _errors(run.over, side.results, len(got))(got, want)
    max_err, rms_err = np.max(np.asarray(errors), axis=0).tolist()
    return checks.demand_right(max_err, rms_err, limits)


@functools.cache
def _errors(over: Mesh, results: Any, calls: int) -> Callable[[tuple, Any], jax.Array]:
    """[devices, 2] of the results of so many calls and what is wanted of each."""

    def of_all(want: jax.Array, *found: jax.Array) -> jax.Array:
        return jnp.max(jax.vmap(checks.relative_errors, (0, None))(jnp.stack(found), want), axis=0)

    def local(got: tuple, want: Any) -> jax.Array:
        each = jax.tree.leaves(jax.tree.map(of_all, want, *map(samples, got)))
        return jnp.max(jnp.stack(each), axis=0)[None]

    specs = ((results,) * calls, results)
    return jax.jit(jax.shard_map(local, mesh=over, in_specs=specs, out_specs=P(AXIS), check_vma=False))


def ready(devices: int, name: str, timed: Timed, check_results: Callable[[tuple], float], **facts) -> harness.Ready:
    """A program that was right, with as many starts a round as take about 30 ms."""
    results = jax.block_until_ready(timed.program(*timed.args))
    max_err = check_results(results)
    out_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
    del results
    us = timed.calls * timed.times_us(1)[0]
    timed.starts_us.clear()
    # Two programs in flight can starve each other of host devices' threads.
    programs = harness.iterations_for(us, out_bytes) if harness.on_gpu() else 1
    variant = harness.Variant(name, timed.times_us, programs)
    return harness.Ready(variant, max_err, {"devices": devices} | facts)


def measure_case(run: Run, case: Case) -> None:
    """Every side is checked, then all of JAX's are timed together, then torch's."""
    op, shape = case.op, case.shape
    timed: dict[str, Timed] = {}
    want = functools.cache(lambda name: wanted(run, SIDES[op][name], placed(run, SIDES[op][name], case.args)))

    def make(name: str) -> harness.Ready:
        found, side = case.built[name].result(), case.sides[name]
        call, args = found.result
        timed[name] = Timed(call, args, CALLS[op])
        # A product alone, whose devices' parts nobody sums, has another result than XLA's side.
        exact = GEMM if name == GEMM and op == SCATTER else XLA
        right = lambda results: check(run, side, results, want(exact), LIMITS[op])
        return ready(run.over.size, name, timed[name], right, compile_s=found.seconds)

    label = f"{shape.name} {op}"
    if run.cards is not None:
        run.cards.wait_started()
    sides, times = run.time(OWN, label, {name: functools.partial(make, name) for name in case.built})
    for name in times:
        sides[name].facts["host_us"] = timed[name].host_us
    if op != MLP:
        measure_torch(run, op, shape, sides, times)
    if GEMM in times:
        for name, t in times.items():
            sides[name].facts["of_gemm"] = t.us_p50 / times[GEMM].us_p50
    row = harness.case_of(op, "fwd+bwd" if op == MLP else "fwd", shape, DTYPE)
    run.write(OWN, row, sides, times, "tflops", run.flops(op, shape))
    parts = [f"{name} {t.us_p50:.1f} us (host {sides[name].facts['host_us']:.1f})" for name, t in times.items()]
    print(f"{label:52}{' | '.join(parts)}", flush=True)


def measure_torch(
    run: Run, op: str, shape: DenseShape, sides: dict[str, harness.Ready], times: dict[str, harness.Times]
) -> None:
    """Adds its sides, each the fastest of its layouts."""
    for name in peers_torch_collective.SIDES:
        if run.cards is None or name not in run.peers:
            continue
        try:
            answer = run.cards.measure(op=op, side=name, rounds=run.rounds, **shape.dims)
            checks.demand_right(answer["max_err"], answer["rms_err"], LIMITS[op])
        except (RuntimeError, ArithmeticError) as error:
            harness.print_left_out(f"{name} at {shape.name} {op}", error)
            continue
        facts = {"devices": run.over.size, "recipe": answer["recipe"], "host_us": answer["host_us"]}
        sides[name] = harness.Ready(harness.Variant(name, lambda n: []), answer["max_err"], facts)
        times[name] = harness.Times.of(answer["us"])


def placed(run: Run, side: Side, args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """As the side wants them on the axis."""
    return tuple(jax.device_put(x, NamedSharding(run.over, lies)) for x, lies in zip(args, side.operands, strict=True))


def measure_shape(run: Run, shape: DenseShape, ops: Sequence[str]) -> None:
    """All cases of a shape, as far as the time limit lets them start."""
    jobs: dict[str, Callable[[], None]] = {}
    if time.perf_counter() < run.until:
        cases = [Case.of(run, op, shape) for op in ops]
        build(run, cases)
        jobs = {case.op: functools.partial(measure_case, run, case) for case in cases}
    for op in ops:
        if time.perf_counter() >= run.until:
            print(f"  left out: {shape.name} {op}: the time limit", flush=True)
        else:
            jobs[op]()


def main(
    shape_names: str = harness.shapes_option(shapes.COLLECTIVE),
    ops: str = typer.Option(",".join(OPS)),
    sides: str = typer.Option(",".join(PEERS), help=f"What {OWN} is measured beside."),
    rounds: int = typer.Option(5),
    time_limit: float = typer.Option(1e4, help="Seconds after which no further case starts."),
    out: str = harness.OUT,
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; on host devices of a CPU; needs --out."),
) -> None:
    """Appends to <out>/collective_matmul.jsonl after each case; exits with 1 if jaxops itself failed somewhere."""
    begin = time.perf_counter()
    harness.leave_room_for_torch()
    if smoke:
        harness.host_devices(SMOKE_DEVICES)
    over = mesh_of_all()
    file = harness.begin("collective_matmul", out, smoke, over.size)
    peers = [name for name in harness.names(sides) if name != OWN]
    of_torch = set(peers) & set(peers_torch_collective.SIDES) and set(harness.names(ops, OPS)) & {GATHER, SCATTER}
    torch = TorchCards(over.size, str(harness.ROOT)) if of_torch else None
    run = Run(file=file, rounds=rounds, ceiling=None, peers=peers, over=over, cards=torch, until=begin + time_limit)
    for shape in [SMOKE] if smoke else [shapes.COLLECTIVE[name] for name in harness.names(shape_names)]:
        measure_shape(run, shape, harness.names(ops, OPS))
        run.done(shape.name)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)
