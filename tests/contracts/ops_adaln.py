"""The list's ops of AdaLN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from jaxops.ops import adaln
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference
from tests.contracts.entry import Arguments, Dims, Op, f32, i32, offsets, rows_outside, ways_of
from tests.ops.adaln.cases import PLANS

ADALN = ("x", "scale", "shift", "weight", "bias")
GATED = ("x", "h", "gate")


def adaln_plan(run: str) -> adaln.Plan:
    return adaln.Plan("xla") if run == "xla" else PLANS["whole"]


def adaln_shapes(names: tuple[str, ...]) -> Callable[[Dims], Arguments]:
    def shapes(d: Dims) -> Arguments:
        T, D, B = d["T"], d["D"], d["B"]
        found = (
            dict.fromkeys(("x", "h"), f32(T, D))
            | dict.fromkeys(("gate", "scale", "shift"), f32(B, D))
            | dict.fromkeys(("weight", "bias"), f32(D))
        )
        return {name: found[name] for name in names} | {"offsets": i32(B + 1)}

    return shapes


def adaln_op(name: str, names: tuple[str, ...], call, reference, outside, **more) -> Op:
    return Op(
        name, call, adaln_shapes(names), {"T": 23, "D": 10, "B": 4}, ways_of(adaln_plan), reference,
        wrt=names, local=tuple(name for name in (*names, "offsets") if name in ("x", "h", "offsets")),
        integers=lambda rng, d: {"offsets": offsets(rng, d["T"], d["B"])}, outside=outside,
        module=adaln, **more,
    )  # fmt: skip


def affine(a: Arguments) -> dict[str, Any]:
    return {"weight": a["weight"], "bias": a["bias"], "epsilon": 0.1}


def activated(a: Arguments) -> dict[str, Any]:
    return affine(a) | {"activation": "gelu_tanh"}


def both_reference(a: Arguments) -> tuple[jax.Array, jax.Array]:
    x = gated_residual_reference(a["x"], a["h"], a["gate"], a["offsets"])
    return x, adaln_reference(x, a["scale"], a["shift"], a["offsets"], **activated(a))


FP8_RESULT = {"out_dtype": jnp.float8_e4m3fn}
ADALN_OPS = [
    adaln_op(
        "adaln", ADALN, lambda a, **how: jaxops.adaln(a["x"], a["scale"], a["shift"], a["offsets"], **affine(a), **how),
        lambda a: adaln_reference(a["x"], a["scale"], a["shift"], a["offsets"], **affine(a)),
        rows_outside(("x",), (True,)),
        large=(({"T": 600_000, "D": 4096, "B": 64}, FP8_RESULT), ({"T": 1_200_000, "D": 4096, "B": 64}, {})),
    ),
    adaln_op(
        "gated_residual", GATED, lambda a, **how: jaxops.gated_residual(a["x"], a["h"], a["gate"], a["offsets"], **how),
        lambda a: gated_residual_reference(a["x"], a["h"], a["gate"], a["offsets"]), rows_outside(("x", "h"), (True,)),
        passes=True,
        large=(({"T": 600_000, "D": 4096, "B": 64}, {}),),
    ),
    adaln_op(
        "gated_residual_adaln", (*GATED, *ADALN[1:]),
        lambda a, **how: jaxops.gated_residual_adaln(
            a["x"], a["h"], a["gate"], a["scale"], a["shift"], a["offsets"], **activated(a), **how
        ),
        both_reference, rows_outside(("x", "h"), (True, True)), passes=True,
        large=(({"T": 600_000, "D": 4096, "B": 64}, FP8_RESULT), ({"T": 600_000, "D": 4096, "B": 64}, {})),
    ),
]  # fmt: skip
