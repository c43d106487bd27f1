"""What tools and tests ask of adaln."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.description import Description, Function, Given, Tuning, names, random, split
from jaxops.ops.adaln.api import adaln, gated_residual, gated_residual_adaln
from jaxops.ops.adaln.plan import PLANNER, Problem
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference


def _norm(a: Given, x: jax.Array, first: str) -> jax.Array:
    offsets, per_row = _rows_of(a, first, "scale")
    options = {name: a[name] for name in ("norm", "weight", "bias", "epsilon", "activation")}
    return adaln_reference(x, a["scale"], a["shift"], offsets, **options, per_row=per_row)


def _gate(a: Given) -> jax.Array:
    offsets, per_row = _rows_of(a, "residual", "gate")
    return gated_residual_reference(a["residual"], a["h"], a["gate"], offsets, per_row=per_row)


def _gate_and_norm(a: Given) -> tuple[jax.Array, jax.Array]:
    new = _gate(a)
    return new, _norm(a, new, "residual")


def _rows_of(a: Given, first: str, modulation: str) -> tuple[jax.Array, bool]:
    """Offsets, and whether the modulation has a vector for each row, as the op decides it."""
    T, count, offsets = a[first].shape[0], a[modulation].shape[0], a["sequence_offsets"]
    B = 1 if offsets is None else offsets.shape[0] - 1
    per_row = a["per"] == "row" or (a["per"] is None and count == T != B)
    return jnp.array([0, T], jnp.int32) if offsets is None else offsets, per_row


def _member_bytes(a: Given) -> int:
    """Of which row is in which sequence."""
    offsets = a["sequence_offsets"]
    return 0 if offsets is None else 4 * a[next(iter(a))].shape[0] * offsets.shape[0]


class _Tuning(Tuning):
    """bwd is measured with the forward."""

    planner, problem, shape, unit = PLANNER, Problem, ("T", "D", "B"), "gbps"
    values = {"gated": ((False, True), (False, True))}  # noqa: RUF012

    def splits(self, problem):
        """Lengths of sequences that differ by up to a factor of seven."""
        shares = 0.25 + 1.5 * np.random.default_rng(0).permutation(problem.B) / max(problem.B - 1, 1)
        return [split(problem.T, shares)]

    def tensors(self, problem):
        """x (with a gate: residual and h) and the cotangents of the results; (gate,) scale and shift."""
        p, gated = problem, problem.gated
        arrays = [random(seed, (p.T, p.D), p.dtype) for seed in range(4 if gated else 2)]
        return arrays, [random(4 + seed, (p.B, p.D), p.dtype) for seed in range(3 if gated else 2)]

    def run(self, name, problem, plan, arrays, modulation, offsets):
        op: Callable = gated_residual_adaln if problem.gated else adaln
        inputs, cotangents = (arrays[:2], tuple(arrays[2:])) if problem.gated else (arrays[:1], arrays[1])

        def forward(*inputs):
            return op(*inputs, offsets, per="sequence", plan=plan)

        if name == "fwd":
            return forward(*inputs, *modulation)
        out, vjp = jax.vjp(forward, *inputs, *modulation)
        return out, vjp(cotangents)

    def work(self, name, problem, *operands):
        arrays = {"fwd": 2, "bwd": 5}[name] * (2 if problem.gated else 1)
        return problem.T * problem.D * jnp.dtype(problem.dtype).itemsize * arrays


DESCRIPTION = Description(
    functions=(
        Function(
            adaln,
            residuals=names("adaln", "out stats"),
            wrt=("x", "scale", "shift", "weight", "bias"),
            reference=lambda a: _norm(a, a["x"], "x"),
            reference_bytes=_member_bytes,
            problem=Problem(65536, 3072, 64, "bfloat16", gated=False),
        ),
        Function(
            gated_residual,
            residuals=names("gated_residual", "out"),
            wrt=("residual", "h", "gate"),
            reference=_gate,
            reference_bytes=_member_bytes,
            problem=Problem(65536, 3072, 64, "bfloat16", gated=True),
        ),
        Function(
            gated_residual_adaln,
            residuals=names("gated_residual_adaln", "residual out stats"),
            wrt=("residual", "h", "gate", "scale", "shift", "weight", "bias"),
            reference=_gate_and_norm,
            reference_bytes=_member_bytes,
            problem=Problem(65536, 3072, 64, "bfloat16", gated=True),
        ),
    ),
    tuning=_Tuning(),
)
