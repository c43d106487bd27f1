"""grouped_matmul: jaxops' three passes beside every peer that can be imported, over named shapes and group sizes.

python -m benchmarks grouped_matmul                       # everything: 6 shapes x 3 distributions x 3 passes
python -m benchmarks grouped_matmul --held-out            # 20 random shapes, each with its own distribution
python -m benchmarks grouped_matmul --smoke --out /tmp/x  # tiny shapes, every code path, CPU too
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.machine import cold, measure_ceilings
from benchmarks.peers.jax_passes import Passes, jax_peer, jaxops_passes
from benchmarks.shapes import GroupedShape
from jaxops.ops.grouped_matmul import Problem, make_plan
from jaxops.tuning import current_device, tuned_rows

DTYPE = jnp.bfloat16
SMOKE = GroupedShape("smoke", 4, 96, 64, 128)
OURS, TORCH = "jaxops", "torch_grouped_mm"
Programs = dict[str, "tuple[Callable, float] | Future[harness.Compiled]"]  # of each side, and seconds of compilation
PEERS = "ragged_dot,tokamax_mosaic,tokamax_triton,torch_grouped_mm,cublas"


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    """passes: of jaxops, first, and of each JAX peer."""

    passes: dict[str, Passes]


@dataclasses.dataclass
class Inputs:
    """One shape's operands, made once; dense is the weight of the dense product with equal operations."""

    lhs: jax.Array
    rhs: jax.Array
    dout: jax.Array
    dense: jax.Array

    @classmethod
    def make(cls, shape: GroupedShape) -> "Inputs":
        G, M, K, N = shape.G, shape.M, shape.K, shape.N
        sizes = [(M, K), (G, K, N), (M, N), (K, N)]
        return cls(*(harness.normal(seed, dims, DTYPE) for seed, dims in enumerate(sizes)))

    def args(self, side: str, offsets: np.ndarray) -> tuple[jax.Array, ...]:
        rhs = self.dense if side == "cublas" else self.rhs
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


def start_compiling_pass(pool: Executor, shape: GroupedShape, passes: dict[str, Passes], pass_name: str) -> Programs:
    """Compiles one pass of all sides in the pool; with JAX's compilation cache on disk the check, too."""
    struct = lambda dims, dtype=DTYPE: jax.ShapeDtypeStruct(dims, dtype)
    G, M, K, N = shape.G, shape.M, shape.K, shape.N
    tensors = struct((M, K)), struct((G, K, N)), struct((M, N))
    offsets, sizes = struct((G + 1,), jnp.int32), struct((G,), jnp.int32)
    sampled = (struct((shapes.SAMPLED_ROWS,), jnp.int32),) * 2
    result = struct({"fwd": (M, N), "dgrad": (M, K), "wgrad": (G, K, N)}[pass_name])

    def tracing(fn: Any, *given) -> Callable[[], Callable[[], Any]]:
        def trace() -> Callable[[], Any]:
            traced = fn.trace(*given)
            return lambda: traced.lower().compile()

        return trace

    harness.start_compiling(pool, tracing(checks.errors_of_rows, pass_name, result, *tensors, offsets, *sampled))
    return {
        name: harness.start_compiling(pool, tracing(jax.jit(own[pass_name]), *tensors, offsets, sizes))
        for name, own in passes.items()
        if name not in ("cublas", "ragged_dot")
    }


def compile_ahead(run: Run, cases: list[tuple[GroupedShape, list[str]]], passes: list[str]) -> dict[str, Programs]:
    """All sides of all cases, compiled beside each other before anything is measured. By shape and pass."""
    with ThreadPoolExecutor(12) as pool:
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


def main(
    shape_names: str = harness.shapes_option(shapes.GROUPED),
    dists: str = typer.Option("balanced,skewed,one_group", help=f"Of {', '.join(shapes.DISTS)}."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    peers: str = typer.Option(PEERS, help='"" for none; also: xla, the portable backend of jaxops.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    held_out: bool = typer.Option(False, help="Random shapes that nobody tuned, instead of shapes and dists."),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    names, m = harness.names(peers), shapes.GROUPED["mixtral_up"]
    first = {"op": "grouped_matmul", "pass": "fwd", "dist": "balanced", "limits": checks.LIMITS["bfloat16"]}
    harness.leave_room_for_torch()
    file = harness.begin("grouped_matmul", out, smoke)
    with harness.torch_beside((TORCH, first | SMOKE.dims), names) as torch:
        wide = (96, 64, 128) if smoke else (m.M, m.K, m.N)
        ceilings = measure_ceilings(file, smoke, dtype=DTYPE, wide=wide, torch=torch)
        backend = "auto" if harness.on_gpu() else "pallas"  # interpreted
        chosen = choose_passes([name for name in names if name != TORCH], backend)
        run = Run(file=file, rounds=rounds, ceiling=None, peers=names, ceilings=ceilings, passes=chosen, torch=torch)
        every = harness.names(dists, shapes.DISTS)
        named = [(shapes.GROUPED[name], every) for name in harness.names(shape_names, shapes.GROUPED)]
        cases = [(SMOKE, every)] if smoke else [(s, [dist]) for s, dist in shapes.held_out()] if held_out else named
        ahead = compile_ahead(run, cases, passes.split(",")) if held_out or harness.on_gpu() else {}
        for shape, own in cases:
            inputs = Inputs.make(shape)
            for pass_name in passes.split(","):
                programs = ahead.get(f"{shape.name} {pass_name}", {})
                for dist in own:
                    measure_case(run, Case(shape, pass_name, dist), programs, inputs)
            del inputs
            run.done(shape.name)
    harness.end(run.left_out)
