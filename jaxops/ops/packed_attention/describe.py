"""What tools and tests ask of packed_attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.description import Description, Function, Given, Tuning, names, random, split
from jaxops.ops.packed_attention.api import packed_attention
from jaxops.ops.packed_attention.plan import PLANNER, Problem
from jaxops.ops.packed_attention.reference import packed_attention_reference

_OPTIONS = ("causal", "kv_offsets", "scale", "window", "visible_until", "sinks", "soft_cap")


def _reference(a: Given) -> jax.Array:
    masks = {name: a[name] for name in _OPTIONS}
    return packed_attention_reference(a["q"], a["k"], a["v"], a["sequence_offsets"], **masks)


class _Tuning(Tuning):
    """Sixteen sequences of up to seven times the shortest; mask "rows" is causal by visible_until. dq and dkv are
    measured with the forward.

    The first rows of a sequence see few keys, so their gradients are many times the RMS of all, and an element of them
    that is nearly zero has the error of large terms: 0.077 at most of 67 million (H200, 2026-11-24; RMS 0.003).
    """

    planner, problem, unit = PLANNER, Problem, "tflops"
    shape = ("T", "S", "heads", "kv_heads", "head_dim")
    largest_error = 0.25
    values = {"mask": (("whole", "causal", "rows"), ("whole", "causal", "rows"))}  # noqa: RUF012

    def splits(self, problem):
        return [split(problem.T, 0.25 + 1.5 * np.random.default_rng(0).permutation(16) / 15)]

    def tensors(self, problem):
        """q, k, v and the cotangent of the result."""
        p = problem
        heads = (p.T, p.heads), (p.S, p.kv_heads), (p.S, p.kv_heads), (p.T, p.heads)
        return [random(seed, (*shape, p.head_dim), p.dtype) for seed, shape in enumerate(heads)]

    def run(self, name, problem, plan, q, k, v, dout, offsets):
        options: dict[str, Any] = {"causal": problem.mask == "causal", "plan": plan}
        in_keys = lambda rows: (rows.astype(jnp.float32) * (problem.S / problem.T)).astype(jnp.int32)
        if problem.cross or problem.S != problem.T:
            options["kv_offsets"] = in_keys(offsets)
        if problem.mask == "rows":
            options["visible_until"] = in_keys(jnp.arange(1, problem.T + 1))

        def forward(q, k, v):
            return packed_attention(q, k, v, offsets, **options)

        if name == "fwd":
            return forward(q, k, v)
        out, vjp = jax.vjp(forward, q, k, v)
        return out, vjp(dout)

    def work(self, name, problem, q, k, v, dout, offsets):
        """Of two products forward and seven with a backward."""
        pairs = float(np.sum(np.diff(np.asarray(offsets)).astype(np.float64) ** 2)) * problem.S / max(problem.T, 1)
        half = 1 if problem.mask == "whole" else 2
        return (2 if name == "fwd" else 7) * 2 * problem.heads * problem.head_dim * pairs / half


DESCRIPTION = Description(
    functions=(
        Function(
            packed_attention,
            residuals=names("attention", "q k v out lse cudnn"),
            wrt=("q", "k", "v", "sinks"),
            reference=_reference,
            reference_bytes=lambda a: 8 * a["q"].shape[0] * a["k"].shape[0] * a["q"].shape[1],
            problem=Problem(16384, 16384, 24, 24, 128, "bfloat16", "causal"),
        ),
    ),
    tuning=_Tuning(),
)
