"""grouped_matmul: jaxops' three passes beside every peer that can be imported, over named shapes and group sizes.

python -m benchmarks grouped_matmul                       # everything: 6 shapes x 3 distributions x 3 passes
python -m benchmarks grouped_matmul --shapes held_out     # 20 random shapes, each with its own distribution
python -m benchmarks grouped_matmul --shapes models --peers torch_grouped_mm --rounds 3 --work-us 10000
                                                          # a sample of 60 products of models x 4 routings x 3 passes
python -m benchmarks grouped_matmul --smoke --out /tmp/x  # tiny shapes, every code path, CPU too

A case that reaches less than 0.97 of torch's speed is timed once more. The second times count; its rows have "again".
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.machine import cold, measure_ceilings
from benchmarks.peers.jax_passes import Passes, jax_peer, jaxops_passes
from benchmarks.shapes import GroupedShape, models
from jaxops.ops.grouped_matmul import Problem, make_plan
from jaxops.tuning import current_device, tuned_rows

DTYPE = jnp.bfloat16
SMOKE = GroupedShape("smoke", 4, 96, 64, 128)
OURS, TORCH = "jaxops", "torch_grouped_mm"
Programs = dict[str, "tuple[Callable, float] | Future[harness.Compiled]"]  # of each side, and seconds of compilation
AGAIN_BELOW = {TORCH: 0.97}
SETS = ("held_out", "models", "all_models")
DISTS = ("balanced", "skewed", "one_group")
Cases = Sequence[tuple[GroupedShape, Sequence[str]]]  # shapes, each with its distributions
PEERS = "ragged_dot,tokamax_mosaic,tokamax_triton,torch_grouped_mm,cublas"


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    """passes: of jaxops, first, and of each JAX peer."""

    passes: dict[str, Passes]


def operands(shape: GroupedShape) -> list[tuple[int, ...]]:
    """Sizes of lhs, rhs and dout."""
    return [(shape.M, shape.K), (shape.G, shape.K, shape.N), (shape.M, shape.N)]


@dataclasses.dataclass
class Inputs:
    """One shape's operands, made once."""

    lhs: jax.Array
    rhs: jax.Array
    dout: jax.Array

    @classmethod
    def make(cls, shape: GroupedShape) -> "Inputs":
        return cls(*(harness.normal(seed, dims, DTYPE) for seed, dims in enumerate(operands(shape))))

    def args(self, side: str, offsets: np.ndarray) -> tuple[jax.Array, ...]:
        """cublas multiplies one matrix, with equal operations."""
        rhs = harness.normal(3, self.rhs.shape[1:], DTYPE) if side == "cublas" else self.rhs
        return self.lhs, rhs, self.dout, jnp.asarray(offsets), jnp.asarray(np.diff(offsets))


class Case(NamedTuple):
    """One shape, pass and distribution."""

    shape: GroupedShape
    pass_name: str
    dist: str

    @property
    def offsets(self) -> np.ndarray:
        return shapes.group_offsets(shapes.group_sizes(self.dist, self.shape.G, self.shape.M))


def kernel_of(case: Case) -> str:
    """Which of jaxops' kernels the case runs."""
    if not harness.on_gpu():
        return "pallas"
    s, device = case.shape, current_device()
    plan = make_plan(Problem(s.G, s.M, s.K, s.N, jnp.dtype(DTYPE).name), device, tuned_rows("grouped_matmul", device))
    return getattr(plan, case.pass_name).kernel


def start_compiling_inputs(pool: Executor, shape: GroupedShape) -> None:
    for dims in operands(shape):
        harness.start_compiling(pool, harness.tracing(harness.normal, 0, dims, DTYPE))


def start_compiling_pass(pool: Executor, shape: GroupedShape, passes: dict[str, Passes], pass_name: str) -> Programs:
    """Compiles one pass of all sides in the pool, and its check."""
    struct = lambda dims, dtype=DTYPE: jax.ShapeDtypeStruct(dims, dtype)
    tensors = lhs, rhs, dout = [struct(dims) for dims in operands(shape)]
    offsets, sizes = struct((shape.G + 1,), jnp.int32), struct((shape.G,), jnp.int32)
    sampled = (struct((shapes.SAMPLED_ROWS,), jnp.int32),) * 2
    result = {"fwd": dout, "dgrad": lhs, "wgrad": rhs}[pass_name]
    check = harness.tracing(checks.errors_of_rows, pass_name, result, *tensors, offsets, *sampled)
    harness.start_compiling(pool, check)
    return {
        name: harness.start_compiling(pool, harness.tracing(jax.jit(own[pass_name]), *tensors, offsets, sizes))
        for name, own in passes.items()
        if name not in ("cublas", "ragged_dot")
    }


def compile_ahead(run: Run, cases: Cases, passes: list[str]) -> dict[str, Programs]:
    """All sides of all cases, compiled beside each other before anything is measured. By shape and pass."""
    with ThreadPoolExecutor(12) as pool:
        for shape, _ in cases:
            start_compiling_inputs(pool, shape)
        return {
            f"{shape.name} {pass_name}": start_compiling_pass(pool, shape, run.passes, pass_name)
            for (shape, _), pass_name in itertools.product(cases, passes)
        }


def largest_error(pass_name: str, shape: GroupedShape, inputs: Inputs, offsets: np.ndarray, out: jax.Array) -> float:
    """Of a pass' result, against float32.

    Raises:
      ArithmeticError: the result is wrong.
    """
    errors = checks.grouped_errors(pass_name, shape, out, (inputs.lhs, inputs.rhs, inputs.dout), offsets)
    return checks.demand_right(*errors, jnp.dtype(DTYPE).name)


def ready_jax(side: str, run: Run, case: Case, programs: Programs, inputs: Inputs) -> harness.Ready:
    """programs: compiled once a shape and pass: the group sizes are data.

    Raises:
      Exception: the side takes no part, failed, or is wrong.
    """
    if side == "ragged_dot":
        if case.dist != "balanced":
            raise ValueError("its time does not depend on the sizes, and it is the slowest by far")
        # jax.lax.ragged_dot multiplies every row by every group's matrix on a GPU.
        seconds = case.shape.G * case.shape.flops / (0.5e12 * run.ceilings.dense_tflops)
        if harness.on_gpu() and seconds > 2:
            raise TimeoutError(f"one call would take about {seconds:.0f} s")
    args = inputs.args(side, case.offsets)
    if side not in programs:
        programs[side] = harness.compile_fits(run.passes[side][case.pass_name], *args, cublas=side == "cublas")
    found = programs[side]
    program = found.result() if isinstance(found, Future) else found
    check = functools.partial(largest_error, case.pass_name, case.shape, inputs, case.offsets)
    if side == "cublas":  # JAX's own product needs no check
        check = lambda out: None
    facts = {"backend": kernel_of(case)} if side == OURS else {}
    return harness.checked(side, program, args, check, **facts)


def measure_case(run: Run, case: Case, programs: Programs, inputs: Inputs) -> None:
    """Checks, times and writes every side of one case."""
    makers = {side: functools.partial(ready_jax, side, run, case, programs, inputs) for side in run.passes}
    if not case.shape.name.startswith(("mixtral", "smoke")):
        makers.pop("cublas", None)
    row = harness.case_of("grouped_matmul", case.pass_name, case.shape, DTYPE, case.dist)
    makers |= run.torch_side(TORCH, row, jnp.dtype(DTYPE).name)
    moved, flops = case.shape.moved_bytes(case.pass_name, np.diff(case.offsets)), case.shape.flops
    run.measure(OURS, row, makers, "tflops", flops, least_us=run.ceilings.least_us(flops, moved), cold=cold(moved))


def choose_passes(names: list[str], backend: str) -> dict[str, Passes]:
    passes = {OURS: jaxops_passes(backend)}
    for name in names:
        try:
            passes[name] = jax_peer(name)
        except ImportError as error:
            harness.print_left_out(name, error)
    return passes


def cases_of(shape_names: str, dists: Sequence[str]) -> Cases:
    """Named shapes, or those of one of SETS; with dists, or else the distributions that are meant for them."""
    if shape_names == "held_out":
        cases = shapes.held_out()
    elif shape_names in SETS:
        found = models.models() if shape_names == "models" else models.all_models()
        cases = [(shape, models.DISTS) for shape in found]
    else:
        found = [shapes.GROUPED[name] for name in harness.names(shape_names, shapes.GROUPED)]
        cases = [(shape, DISTS) for shape in found]
    return [(shape, tuple(dists) or own) for shape, own in cases]


def main(
    shape_names: str = harness.shapes_option(shapes.GROUPED, SETS),
    dists: str = typer.Option("", help=f"Of {', '.join(shapes.DISTS)}; by default those of the shapes."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    peers: str = typer.Option(PEERS, help='"" for none; also: xla, the portable backend of jaxops.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    work_us: float = typer.Option(harness.WORK_US, help="Measured microseconds a side and round."),
    first: int = typer.Option(0, help="The first of the shapes, from 0: a set can be split among machines."),
    count: int | None = typer.Option(None, help="How many of the shapes; by default all."),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    given = harness.names(dists, shapes.DISTS)
    names, m = harness.names(peers), shapes.GROUPED["mixtral_up"]
    small = {"op": "grouped_matmul", "pass": "fwd", "dist": "balanced", "limits": checks.LIMITS["bfloat16"]}
    harness.leave_room_for_torch()
    file = harness.begin("grouped_matmul", out, smoke)
    with harness.torch_beside((TORCH, small | SMOKE.dims), names) as torch:
        wide = (96, 64, 128) if smoke else (m.M, m.K, m.N)
        ceilings = measure_ceilings(file, smoke, dtype=DTYPE, wide=wide, torch=torch)
        backend = "auto" if harness.on_gpu() else "pallas"  # interpreted
        chosen = choose_passes([name for name in names if name != TORCH], backend)
        run = Run(file=file, rounds=rounds, ceiling=None, peers=names, ceilings=ceilings, passes=chosen, torch=torch)
        run.work_us, run.again_below = work_us, AGAIN_BELOW
        cases = [(SMOKE, given or DISTS)] if smoke else cases_of(shape_names, given)[first:][:count]
        ahead = compile_ahead(run, cases, passes.split(","))
        run.done("compiling")
        for shape, own in cases:
            inputs = Inputs.make(shape)
            for pass_name in passes.split(","):
                programs = ahead.pop(f"{shape.name} {pass_name}")
                for dist in own:
                    measure_case(run, Case(shape, pass_name, dist), programs, inputs)
            del inputs
            run.done(shape.name)
    harness.end(run.left_out)
