"""Random problems for the AdaLN ops, with NaN wherever nothing may be read, and the three ways to run them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.adaln import Plan, Tiles
from jaxops.ops.adaln.reference import adaln_reference, gated_residual_reference
from tests.arrays import put
from tests.compare import assert_close

# "interpret" runs the kernels in Pallas' interpreter on the CPU, "gpu" compiles the same kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
KERNELS = RUNS[1:]

OPERANDS = {
    "adaln": ("x", "scale", "shift"),
    "gated_residual": ("x", "h", "gate"),
    "gated_residual_adaln": ("x", "h", "gate", "scale", "shift"),
}
MODULATION = ("gate", "scale", "shift")

# Tiles smaller than the tests' sizes, different in each pass, with each loop over rows. A second register array a row
# doubles the interpreter's compilation: at 37 columns only "ahead" (forward) and "single" (backward) have one.
PLANS = {
    "ahead": Plan("pallas", Tiles(4, 1, 32, 4, ahead=True), Tiles(8, 1, 64, 4, ahead=True), save_stats=False),
    "steps": Plan("pallas", Tiles(8, 2, 64, 4), Tiles(4, 2, 64, 2), save_stats=True),
    "ahead-steps": Plan("pallas", Tiles(8, 4, 64, 4, ahead=True), Tiles(16, 2, 64, 4, ahead=True), save_stats=True),
    "whole": Plan("pallas", Tiles(4, 4, 128, 4), Tiles(8, 8, 64, 4), save_stats=False),
    "single": Plan("pallas", Tiles(1, 1, 64, 1), Tiles(1, 1, 32, 1), save_stats=True),
    "wide": Plan("pallas", Tiles(4, 2, 512, 4), Tiles(4, 2, 512, 4)),
    "auto": Plan("pallas"),  # what a user gets
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is static in a call: the op, its options, and the kernels' plan by name."""

    op: str = "adaln"
    norm: str = "layer"
    activation: str | None = None
    affine: bool = False
    per_row: bool = False
    epsilon: float = 1e-6
    plan: str = "ahead"

    @property
    def names(self) -> tuple[str, ...]:
        return (*OPERANDS[self.op], *(("weight", "bias") if self.affine else ()))

    @property
    def options(self) -> dict:
        names = () if self.op == "gated_residual" else ("norm", "activation", "epsilon")
        return {name: getattr(self, name) for name in names}

    def plan_for(self, run: str) -> Plan:
        return Plan("xla") if run == "xla" else PLANS[self.plan]


def make_case(
    sizes, D: int, *, dtype="float32", modulation_dtype=None, per_row: bool = False, before: int = 0, after: int = 0,
    seed: int = 0,
) -> dict:  # fmt: skip
    """x, h [T, D], gate, scale, shift [B, D] or [T, D], weight, bias [D], offsets, cotangents dy and dresidual.

    Rows outside the sequences hold NaN (and, in odd columns, numbers) in everything that has a row for each of them.
    """
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    T, B = int(offsets[-1]) + after, len(sizes)
    outside = (np.arange(T) < offsets[0]) | (np.arange(T) >= offsets[-1])
    rows, case = ("x", "h", "dy", "dresidual"), {"offsets": put(offsets, jnp.int32)}
    for name in (*rows, *MODULATION, "weight", "bias"):
        of_rows = name in rows or (per_row and name in MODULATION)
        value = rng.normal(size=(T, D) if of_rows else (B, D) if name in MODULATION else (D,))
        if of_rows:
            value[outside, ::2] = np.nan
        case[name] = put(value, dtype if name in rows else modulation_dtype or dtype)
    return case


def outside_of(case: dict):
    """In numpy where the offsets are."""
    row = np.arange(case["x"].shape[0])
    return ((row < case["offsets"][0]) | (row >= case["offsets"][-1]))[:, None]


def apply(variant: Variant, plan: Plan | None, given: dict, offsets) -> dict:
    """The op's results by name: residual, y, or both."""
    affine = {name: given[name] for name in ("weight", "bias") if name in given}
    per = "row" if variant.per_row else "sequence"
    operands = (given[name] for name in OPERANDS[variant.op])
    found = getattr(jaxops, variant.op)(*operands, offsets, **affine, **variant.options, per=per, plan=plan)
    names = {"adaln": ("y",), "gated_residual": ("residual",)}.get(variant.op, ("residual", "y"))
    return dict(zip(names, found if len(names) > 1 else (found,), strict=True))


def apply_reference(variant: Variant, given: dict, offsets, dtype) -> dict:
    """As `apply`, by reference.py. The new residual is rounded to dtype before the norm, not so gradients."""
    found, x = {}, given["x"]
    if variant.op != "adaln":
        x = gated_residual_reference(x, given["h"], given["gate"], offsets, per_row=variant.per_row)
        # reduce_precision and not a cast there and back, which XLA may leave out on a GPU.
        bits = jnp.finfo(dtype)
        rounded = jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
        x = found["residual"] = x + jax.lax.stop_gradient(rounded - x)
    if variant.op != "gated_residual":
        affine = {name: given[name] for name in ("weight", "bias") if name in given}
        found["y"] = adaln_reference(
            x, given["scale"], given["shift"], offsets, **affine, **variant.options, per_row=variant.per_row
        )
    return found


def _results_and_gradients(function, given: dict, case: dict) -> dict:
    found, vjp = jax.vjp(function, given)
    (gradients,) = vjp({name: case[f"d{name}"].astype(value.dtype) for name, value in found.items()})
    return found | {f"d{name}": value for name, value in gradients.items()}


@functools.cache
def compiled(run: str, variant: Variant):
    """A jitted function from a case to results and gradients by name; one compilation a shape, whatever the offsets."""

    def run_all(case: dict) -> dict:
        plan, given = variant.plan_for(run), {name: case[name] for name in variant.names}
        return _results_and_gradients(lambda given: apply(variant, plan, given, case["offsets"]), given, case)

    return jax.jit(run_all)


@functools.cache
def compiled_forward(run: str, variant: Variant):
    """As `compiled`, without gradients, of a case and its offsets or None. "reference" is reference.py."""
    if run == "reference":
        return jax.jit(lambda case, offsets: apply_reference(variant, case, offsets, "float32"))
    return jax.jit(lambda case, offsets: apply(variant, variant.plan_for(run), case, offsets))


def run_all(case: dict, variant: Variant, run: str) -> dict:
    return compiled(run, variant)(case)


@functools.partial(jax.jit, static_argnames=("variant",))
def reference_all(case: dict, variant: Variant) -> dict:
    rows = {"x", "h", "dy", "dresidual", *(MODULATION if variant.per_row else ())}
    clean = {
        name: jnp.where(outside_of(case), 0, value.astype(jnp.float32)) if name in rows else value
        for name, value in case.items()
    }
    given = {name: clean[name].astype(jnp.float32) for name in variant.names}
    return _results_and_gradients(
        lambda given: apply_reference(variant, given, case["offsets"], case["x"].dtype), given, clean
    )


def check(case: dict, variant: Variant, run: str, *, reference: Variant | None = None) -> None:
    """Results and gradients are the reference's; exact zeros for empty sequences; outside rows zero or passed on."""
    got, want = run_all(case, variant, run), reference_all(case, dataclasses.replace(reference or variant, plan=""))
    assert set(got) == set(want)
    outside = outside_of(case | {"offsets": np.asarray(case["offsets"])})[:, 0]
    empty = np.diff(np.asarray(case["offsets"])) == 0
    passed = {} if variant.op == "adaln" else {"residual": "x", "dx": "dresidual"}
    for name, value in got.items():
        primal = case["x"] if name in ("residual", "y") else case[name[1:]]
        assert value.dtype == primal.dtype, f"{name} is {value.dtype}"
        assert value.shape == primal.shape, f"{name} is {value.shape}"
        found = np.array(value)
        if name in ("residual", "y", "dx", "dh") or (variant.per_row and name[1:] in MODULATION):
            there = np.asarray(case[passed[name]])[outside] if name in passed else np.zeros_like(found[outside])
            assert found[outside].tobytes() == there.tobytes() if name in passed else not found[outside].any(), (
                f"{name} outside: {found[outside]}"
            )
            found[outside] = 0
        elif name[1:] in MODULATION:
            assert not found[empty].any(), f"{name} of an empty sequence"
        # Of plain adaln only the last step rounds: what is float32 there is so to the last few bits, whatever x is.
        kind = value.dtype.name if variant.op == "adaln" or value.dtype != jnp.float32 else case["x"].dtype.name
        assert_close(found, want[name], kind, name)
