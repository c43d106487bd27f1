"""Attention within packed sequences: every way of `jaxops.packed_attention`, those that JAX has, and torch's flash
attention.

python -m benchmarks packed_attention                        # everything
python -m benchmarks packed_attention --smoke --out /tmp/x   # a tiny shape; on a CPU without cuDNN's ways
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import typer

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.packing import Sequences
from benchmarks.peers import attention as peers_attention
from benchmarks.peers.torch_process import TorchProcess
from benchmarks.shapes import AttentionShape

DTYPE, LIMITS = jnp.bfloat16, "bfloat16 attention"
SMOKE = AttentionShape("smoke", 128, 4, 16, 2, 4)
OWN = "jaxops"


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    torch: TorchProcess | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape with lengths and a mask."""

    shape: AttentionShape
    dist: str
    mask: str

    @property
    def offsets(self):
        return shapes.group_offsets(shapes.sequence_lengths(self.dist, self.shape.B, self.shape.T))


def ready_jax(name: str, pass_name: str, args: tuple, want: dict[str, jax.Array]) -> harness.Ready:
    check = lambda results: checks.demand_right(*checks.attention_errors(results, want), LIMITS)
    program = peers_attention.PASSES[pass_name](peers_attention.SIDES[name])
    return harness.checked(name, harness.compile_fits(program, *args), args, check)


def ready_torch(torch: TorchProcess, case: Case, pass_name: str) -> harness.Ready:
    request = {"op": "packed_attention", "pass": pass_name, "dist": case.dist, "mask": case.mask}
    request |= {"sequences": case.shape.B, "limits": checks.LIMITS[LIMITS], **case.shape.dims}
    answer = torch.ask(do="prepare", **request)
    for refusal in answer["refusals"]:
        print(f"  {peers_attention.TORCH} at {case.shape.name}: refused: {refusal}", flush=True)
    return harness.torch_ready(peers_attention.TORCH, torch, answer)


def measure_case(run: Run, case: Case, passes: list[str]) -> None:
    """Checks, times and writes every way that works."""
    shape, offsets = case.shape, case.offsets
    heads = (shape.N, shape.K, shape.K, shape.N)
    qkv_dout = [harness.normal(seed, (shape.T, n, shape.H), DTYPE) for seed, n in enumerate(heads)]
    sequences = Sequences.of(offsets, case.mask)
    args = (*qkv_dout, sequences)
    want = checks.attention_reference(*qkv_dout, sequences)
    for pass_name in passes:
        row = harness.case_of("packed_attention", pass_name, shape, DTYPE, case.dist)
        row["shape"] |= {"B": len(offsets) - 1}
        makers = run.sides(OWN, ready_jax, pass_name, args, want)
        if run.torch is not None:
            makers[peers_attention.TORCH] = functools.partial(ready_torch, run.torch, case, pass_name)
        flops = shape.flops(pass_name, shapes.visible_pairs(case.mask, offsets))
        label = f"{shape.name} {case.dist} {case.mask} {pass_name}"
        run.measure(OWN, label, row, makers, "tflops", flops, longest=sequences.longest, mask=case.mask)


def main(
    shape_names: str = harness.shapes_option(shapes.ATTENTION),
    dists: str = typer.Option("unequal,single", help=f"Of {', '.join(shapes.PACKED_DISTS)}."),
    masks: str = typer.Option(",".join(shapes.ATTENTION_MASKS)),
    passes: str = typer.Option(",".join(peers_attention.PASSES)),
    ways: str = typer.Option(
        ",".join([*peers_attention.SIDES, peers_attention.TORCH]), help=f"What {OWN} is measured beside."
    ),
    out: str = harness.OUT,
    rounds: int = typer.Option(3),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/packed_attention.jsonl; exits with 1 if jaxops itself failed somewhere. TFLOP/s count the pairs
    that see each other only. One sequence of all rows is measured up to 16,384 rows."""
    harness.leave_room_for_torch()
    file = harness.begin("packed_attention", out, smoke)
    known = [*peers_attention.SIDES, peers_attention.TORCH]
    sides = [name for name in harness.names(ways, known) if name != OWN]
    first = lambda torch: ready_torch(torch, Case(SMOKE, "unequal", "whole"), "fwd")
    torch = harness.start_torch(peers_attention.TORCH, first) if peers_attention.TORCH in sides else None
    peers = [name for name in sides if name != peers_attention.TORCH]
    run = Run(file=file, rounds=rounds, ceiling=None, peers=peers, torch=torch)
    for shape in [SMOKE] if smoke else [shapes.ATTENTION[name] for name in harness.names(shape_names)]:
        for dist in harness.names(dists):
            for mask in harness.names(masks):
                if dist != "single" or shape.T <= 16_384:  # the check holds a whole sequence's scores of a head
                    measure_case(run, Case(shape, dist, mask), harness.names(passes))
        run.done(shape.name)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
