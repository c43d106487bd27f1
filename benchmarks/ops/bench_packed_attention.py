"""Attention within packed sequences: every way of `jaxops.packed_attention`, those that JAX has, and torch's flash
attention. TFLOP/s count the pairs that see each other only.

python -m benchmarks packed_attention                        # everything
python -m benchmarks packed_attention --smoke --out /tmp/x   # a tiny shape; on a CPU without cuDNN's ways
"""

import jax
import jax.numpy as jnp

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.harness.packing import Sequences
from benchmarks.peers import attention as peers_attention
from benchmarks.shapes import AttentionShape

DTYPE, LIMITS = jnp.bfloat16, "bfloat16 attention"
SMOKE = AttentionShape("smoke", 128, 4, 16, 2, 4)
OWN, TORCH = "jaxops", peers_attention.TORCH


def ready_jax(name: str, pass_name: str, args: tuple, want: dict[str, jax.Array]) -> harness.Ready:
    check = lambda results: checks.demand_right(*checks.attention_errors(results, want), LIMITS)
    program = peers_attention.PASSES[pass_name](peers_attention.SIDES[name])
    return harness.checked(name, harness.compile_fits(program, *args), args, check)


def measure(run: harness.Run, shape: AttentionShape, qkv_dout: list[jax.Array], dist: str, mask: str) -> None:
    """All passes of a case, which share the reference, with every way that works."""
    offsets = shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
    sequences = Sequences.of(offsets, mask)
    args = (*qkv_dout, sequences)
    if int(sequences.longest) <= 16_384:
        want = checks.attention_reference(*qkv_dout, sequences)
    else:  # the reference holds a whole sequence's scores of a head: the portable backend, in float32, holds blocks
        wide = [x.astype(jnp.float32) for x in qkv_dout]
        want = jax.jit(peers_attention.fwd_bwd(peers_attention.SIDES["jaxops_blocks"]))(*wide, sequences)
    for pass_name in run.options["passes"]:
        row = harness.case_of("packed_attention", pass_name, shape, DTYPE, dist)
        makers = run.sides(OWN, ready_jax, pass_name, args, want)
        makers |= run.torch_side(TORCH, row, LIMITS, mask=mask, sequences=shape.B)
        row["shape"] |= {"B": len(offsets) - 1}
        flops = shape.flops(pass_name, shapes.visible_pairs(mask, offsets))
        run.measure(OWN, row, makers, "tflops", flops, longest=sequences.longest, mask=mask)


def make_inputs(shape: AttentionShape) -> list[jax.Array]:
    heads = (shape.N, shape.K, shape.K, shape.N)
    return [harness.normal(seed, (shape.T, n, shape.H), DTYPE) for seed, n in enumerate(heads)]


main = command(
    Benchmark(
        name="packed_attention",
        shapes=shapes.ATTENTION,
        smoke=SMOKE,
        inputs=make_inputs,
        options={
            "dists": ("unequal", "single"),
            "masks": shapes.ATTENTION_MASKS,
            "passes": tuple(peers_attention.PASSES),
        },
        known={"dists": shapes.PACKED_DISTS},
        loops=("dists", "masks"),
        measure=measure,
        peers=",".join([*(name for name in peers_attention.SIDES if name != OWN), TORCH]),
        rounds=3,
        ceilings=None,
        torch=(
            TORCH,
            {"op": "packed_attention", "pass": "fwd", "dist": "unequal", "mask": "whole", "sequences": SMOKE.B}
            | {"limits": checks.LIMITS[LIMITS], **SMOKE.dims},
        ),
    )
)
