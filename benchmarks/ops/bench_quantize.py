"""quantize: jaxops' kernels beside jnp and torch.compile, in GB/s beside the copy bandwidth.

python -m benchmarks quantize                         # everything: 5 shapes, 4 scalings, one layout and both
python -m benchmarks quantize --shapes m8192_k4096 --scalings block_1x128 --layouts both --peers xla
python -m benchmarks quantize --smoke --out /tmp/x    # tiny shapes, every code path, CPU too

GB/s count the bfloat16 tensor once and every value and scale once, also if a tensorwise scale needs a second read:
`passes` has the number of reads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.ops import fp8_machine, quantized_bytes
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.peers.torch_process import TorchProcess
from benchmarks.shapes import MatrixShape

SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
LAYOUTS = ("row", "both")
PEERS = "xla,torch_compile"
SMOKE = MatrixShape(256, 128)
LIMITS = "fp8 cast"
_CHECKED_ROWS = 1024


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    torch: TorchProcess | None


@dataclasses.dataclass
class Case:
    shape: MatrixShape
    scaling: Any
    layouts: Any

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.scaling} {self.layouts}"

    @property
    def moved(self) -> int:
        return quantized_bytes.moved_bytes(self.scaling, self.shape.M, self.shape.K, self.layouts)

    @property
    def facts(self) -> dict:
        return {
            "scaling": self.scaling,
            "layouts": self.layouts,
            "passes": quantized_bytes.reads_needed(self.scaling, self.layouts),
        }


def jaxops_side(case: Case, backend: str) -> Callable[[jax.Array], peers_fp8.Named]:
    def call(x):
        q = jaxops.quantize(x, scaling=case.scaling, layouts=case.layouts, backend=backend)
        parts = {"values": q.values, "scales": q.scales, "values_t": q.values_t, "scales_t": q.scales_t}
        return {name: part for name, part in parts.items() if part is not None}

    return call


@jax.jit
def differing(got: peers_fp8.Named, want: peers_fp8.Named) -> dict[str, jax.Array]:
    """The number of elements with other bits, of each part."""
    bits = {1: jnp.uint8, 4: jnp.uint32}
    as_bits = functools.partial(
        jax.tree.map, lambda part: jax.lax.bitcast_convert_type(part, bits[part.dtype.itemsize])
    )
    return jax.tree.map(lambda a, b: jnp.sum(a != b, dtype=jnp.int32), as_bits(got), as_bits(want))


def demand_same_bits(got: peers_fp8.Named, want: peers_fp8.Named) -> None:
    """
    Raises:
      ArithmeticError: a value or a scale differs.
    """
    for name, part in want.items():
        if name not in got or got[name].shape != part.shape or got[name].dtype != part.dtype:
            raise ArithmeticError(f"wrong result: {name} must be {part.dtype}{part.shape}")
    counts = differing({name: got[name] for name in want}, want)
    if wrong := {name: int(count) for name, count in counts.items() if int(count)}:
        raise ArithmeticError(f"wrong result: other bits than the xla backend's: {wrong}")


def peer_errors(case: Case, got: peers_fp8.Named, x: jax.Array) -> tuple[float, float]:
    """(largest, RMS) error over the RMS of some rows and, with both layouts, some columns.

    Scales are [rows, blocks].
    """
    worst = [_relative_errors(got["values"][:_CHECKED_ROWS], got["scales"], x[:_CHECKED_ROWS], case.scaling)]
    if "values_t" in got:
        worst.append(
            _relative_errors(got["values_t"][:_CHECKED_ROWS], got["scales_t"], x[:, :_CHECKED_ROWS].T, case.scaling)
        )
    return max(float(errors[0]) for errors in worst), max(float(errors[1]) for errors in worst)


@functools.partial(jax.jit, static_argnums=3)
def _relative_errors(values, scales, x, scaling: str):
    rows, columns = values.shape
    if scaling == "block_128x128":
        scales = jnp.repeat(scales, peers_fp8.BLOCK, axis=0)
    if scaling.startswith("block"):
        scales = jnp.repeat(scales, peers_fp8.BLOCK, axis=1)[:rows, :columns]
    elif scaling == "rowwise":
        scales = scales[:rows]
    return checks.relative_errors(values.astype(jnp.float32) * scales, x.astype(jnp.float32))


def ready_side(name: str, case: Case, x: jax.Array, want: Callable[[], peers_fp8.Named]) -> harness.Ready:
    peer = functools.partial(peers_fp8.quantize, scaling=case.scaling, layouts=case.layouts)
    side = peer if name == "xla" else jaxops_side(case, name.removeprefix("jaxops_"))

    def check(got: peers_fp8.Named) -> float:
        if name == "xla":
            return checks.demand_right(*peer_errors(case, got, x), LIMITS)
        demand_same_bits(got, want())
        return 0.0

    return harness.checked(name, harness.compile_fits(side, x), (x,), check)


def ready_torch(torch: TorchProcess, case: Case) -> harness.Ready:
    answer = torch.ask(do="prepare", op="quantize", limits=checks.LIMITS[LIMITS], **case.shape.dims)
    return harness.torch_ready("torch_compile", torch, answer)


def measure_case(run: Run, case: Case, x: jax.Array) -> None:
    """Checks, times and writes every side of one case."""
    want = functools.cache(lambda: jax.jit(jaxops_side(case, "xla"))(x))  # without it no side of jaxops can be checked
    makers = run.sides("pallas", ready_side, case, x, want)
    if run.torch is not None and (case.scaling, case.layouts) == ("block_1x128", "row"):
        makers["torch_compile"] = functools.partial(ready_torch, run.torch, case)
    row = harness.case_of("quantize", "fwd", case.shape, "bfloat16")
    run.measure("pallas", case.label, row, makers, "gbps", case.moved, cold=harness.cold(case.moved), **case.facts)


def main(
    shape_names: str = harness.shapes_option(shapes.MATRICES),
    scalings: str = typer.Option(",".join(SCALINGS)),
    layouts: str = typer.Option(",".join(LAYOUTS)),
    peers: str = typer.Option(PEERS, help='"" for none; also: jaxops_xla, the portable backend of jaxops.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/quantize.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    file = harness.begin("quantize", out, smoke)
    sides = harness.names(peers)
    torch = fp8_machine.start_torch(sides, op="quantize", **SMOKE.dims).get("torch_compile")
    sides = [name for name in sides if name != "torch_compile"]
    run = Run(file=file, rounds=rounds, ceiling=harness.write_copy(file, smoke), peers=sides, torch=torch)
    for shape in [SMOKE] if smoke else [shapes.MATRICES[name] for name in shape_names.split(",")]:
        x = harness.normal(0, (shape.M, shape.K), jnp.bfloat16)
        for scaling in scalings.split(","):
            for layout in layouts.split(","):
                measure_case(run, Case(shape, scaling, layout), x)
        del x
        run.done(shape.name)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
