"""What the tuner needs of each op that has tuned rows: operands, a call with given tiles, how much work that is."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.device import Device, current_device, runs_gluon
from jaxops._lib.fp8 import SCALINGS
from jaxops._lib.plans import Planner
from jaxops.ops import adaln, fp8_matmul, grouped_matmul, quantize
from jaxops.ops.adaln.plan import PLANNER as ADALN
from jaxops.ops.fp8_matmul import product as fp8_product
from jaxops.ops.fp8_matmul.plan import PLANNER as FP8_MATMUL
from jaxops.ops.grouped_matmul.plan import PLANNER as GROUPED_MATMUL
from jaxops.ops.quantize.plan import LAYOUTS
from jaxops.ops.quantize.plan import PLANNER as QUANTIZE

Splits = Sequence[np.ndarray] | list[None]


@dataclasses.dataclass(frozen=True)
class Tunable:
    """How an op is tuned.

    Attributes:
      planner: of its plans.
      problem: class of its problems.
      operands: (pass, problem, offsets) -> the operands of one call; offsets [G + 1] of the rows, or None.
      run: (pass, problem, plan, *operands) -> results.
      shape: fields of the problem that the command's --shape gives, in this order.
      work: (pass, problem, *operands) -> floating-point operations (unit "tflops") or bytes (unit "gbps") of a call.
      unit: "tflops" or "gbps".
      splits: problem -> the default group sizes, one array each; None where there are no groups.
      passes: problem -> passes to measure, in this order; each is measured beside the fastest tiles of those before it.
      kernels: (problem, device) -> kernels to measure.
      values: field -> (what the command takes for it, its default): it tunes each of them.
    """

    planner: Planner
    problem: type
    operands: Callable[[str, Any, Any], tuple]
    run: Callable
    shape: tuple[str, ...]
    work: Callable[..., float]
    unit: str
    splits: Callable[[Any], Splits] = lambda problem: [None]
    passes: Callable[[Any], tuple[str, ...]] = lambda problem: ("fwd", "dgrad", "wgrad")
    kernels: Callable[[Any, Device], tuple[str, ...]] = lambda problem, device: ("pallas",)
    values: dict[str, tuple[Sequence, Sequence]] = dataclasses.field(default_factory=dict)


def split(rows: int, shares: np.ndarray) -> np.ndarray:
    """Group sizes in proportion to shares; they add up to rows."""
    ends = np.concatenate([[0], np.cumsum(shares / shares.sum())])
    return np.diff(np.floor(ends * rows + 0.5).astype(int))


def default_group_sizes(problem) -> list[np.ndarray]:
    """An even split of M over G groups, and a Zipf split in shuffled order."""
    even = np.diff(np.arange(problem.G + 1) * problem.M // problem.G)
    return [even, split(problem.M, np.random.default_rng(0).permutation(1 / np.arange(1, problem.G + 1)))]


def _random(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _tensors(p) -> dict[str, jax.Array]:
    """Random operands of a product and of its gradients."""
    rhs = (p.G, p.K, p.N) if p.G else (p.K, p.N)
    shapes = {"lhs": (p.M, p.K), "rhs": rhs, "dout": (p.M, p.N)}
    return {name: _random(seed, shape, p.dtype) for seed, (name, shape) in enumerate(shapes.items())}


def _product_operands(name: str, problem: grouped_matmul.Problem, offsets) -> tuple:
    tensors = _tensors(problem)
    a, b = {"fwd": ("lhs", "rhs"), "dgrad": ("dout", "rhs"), "wgrad": ("lhs", "dout")}[name]
    return tensors[a], tensors[b], offsets


def _run_product(name: str, problem: grouped_matmul.Problem, plan: grouped_matmul.Plan, a, b, offsets):
    if name == "wgrad":
        return grouped_matmul.grouped_wgrad(a, b, offsets, plan=plan)
    # dgrad alone: the forward pass of a transposed rhs runs the same kernel.
    plan = dataclasses.replace(plan, fwd=getattr(plan, name))
    return grouped_matmul.grouped_matmul(a, b, offsets, transpose_rhs=name == "dgrad", plan=plan)


def _product_work(name: str, problem, *operands) -> float:
    rows = problem.M if operands[-1] is None else int(operands[-1][-1])
    return 2 * rows * problem.K * problem.N


def _adaln_operands(name: str, problem: adaln.Problem, offsets) -> tuple:
    """x (with a gate: residual and h), then the cotangents of the results; then (gate,) scale and shift."""
    rows, modulations = (4, 3) if problem.gated else (2, 2)
    arrays = [_random(seed, (problem.T, problem.D), problem.dtype) for seed in range(rows)]
    modulation = [_random(rows + seed, (problem.B, problem.D), problem.dtype) for seed in range(modulations)]
    return arrays, modulation, offsets


def _run_adaln(name: str, problem: adaln.Problem, plan: adaln.Plan, arrays, modulation, offsets):
    """bwd: the forward, too."""
    op: Callable = adaln.gated_residual_adaln if problem.gated else adaln.adaln
    inputs, cotangents = (arrays[:2], tuple(arrays[2:])) if problem.gated else (arrays[:1], arrays[1])

    def forward(*inputs):
        return op(*inputs, offsets, per="sequence", plan=plan)

    if name == "fwd":
        return forward(*inputs, *modulation)
    out, vjp = jax.vjp(forward, *inputs, *modulation)
    return out, vjp(cotangents)


def _adaln_work(name: str, problem: adaln.Problem, *operands) -> float:
    arrays = {"fwd": 2, "bwd": 5}[name] * (2 if problem.gated else 1)
    return problem.T * problem.D * jnp.dtype(problem.dtype).itemsize * arrays


def _sequences(problem: adaln.Problem) -> list[np.ndarray]:
    """Lengths that differ by up to a factor of seven."""
    shares = 0.25 + 1.5 * np.random.default_rng(0).permutation(problem.B) / max(problem.B - 1, 1)
    return [split(problem.T, shares)]


def _quantize_operands(name: str, problem: quantize.Problem, offsets) -> tuple:
    return (_random(0, (problem.M, problem.K), problem.dtype),)


def _run_quantize(name: str, problem: quantize.Problem, plan: quantize.Plan, x):
    """A whole call, whichever pass is tuned."""
    how: dict[str, Any] = {"scaling": problem.scaling, "layouts": problem.layouts}
    return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(quantize.quantize(x, **how, plan=plan))]


def _quantize_work(name: str, problem: quantize.Problem, x) -> float:
    return x.size * (x.dtype.itemsize + (2 if problem.layouts == "both" else 1))


_FP8_SIDES = {
    "fwd": (("lhs", "row"), ("rhs", "col")),
    "dgrad": (("dout", "row"), ("rhs", "row")),
    "wgrad": (("lhs", "col"), ("dout", "col")),
}


def _fp8_operands(name: str, problem: fp8_matmul.Problem, offsets) -> tuple:
    recipe, tensors, sides = fp8_matmul.RECIPES[problem.recipe], _tensors(problem), []
    for tensor, layout in _FP8_SIDES[name]:
        form = getattr(recipe, tensor)
        how: dict[str, Any] = {"scaling": form.scaling, "dtype": form.dtype, "layouts": layout}
        ragged = offsets if layout == "col" and tensor != "rhs" else None
        sides.append(quantize.quantize(tensors[tensor], **how, group_offsets=ragged))
    return *sides, offsets


def _run_fp8(name: str, problem: fp8_matmul.Problem, plan: fp8_matmul.Plan, a, b, offsets):
    """The product alone, without its casts."""
    plan, dtype = fp8_matmul.make_plan(problem, current_device(), plan=plan), problem.dtype
    spec = fp8_product.Spec(fp8_matmul.RECIPES[problem.recipe], plan, dtype, dtype, dtype, False)
    a, b = (
        fp8_product.rows_of(side) if layout == "row" else fp8_product.cols_of(side)
        for side, (_, layout) in zip((a, b), _FP8_SIDES[name], strict=True)
    )
    return fp8_product.multiply(spec, name, a, b, offsets, dtype, problem.M if name == "wgrad" else None)


_PRODUCT = (("G", "M", "K", "N"), _product_work, "tflops")
OPS = {
    "grouped_matmul": Tunable(
        *(GROUPED_MATMUL, grouped_matmul.Problem, _product_operands, _run_product, *_PRODUCT),
        splits=default_group_sizes,
        kernels=grouped_matmul.kernels_for,
    ),
    "adaln": Tunable(
        *(ADALN, adaln.Problem, _adaln_operands, _run_adaln, ("T", "D", "B"), _adaln_work, "gbps"),
        splits=_sequences,
        passes=lambda problem: ("fwd", "bwd"),
        values={"gated": ((False, True), (False, True))},
    ),
    "quantize": Tunable(
        *(QUANTIZE, quantize.Problem, _quantize_operands, _run_quantize, ("M", "K"), _quantize_work, "gbps"),
        passes=lambda problem: ("amax", "cast") if problem.looks_first else ("cast",),
        values={"scaling": (SCALINGS, SCALINGS), "layouts": (LAYOUTS, LAYOUTS)},
    ),
    "fp8_matmul": Tunable(
        *(FP8_MATMUL, fp8_matmul.Problem, _fp8_operands, _run_fp8, *_PRODUCT),
        splits=lambda problem: default_group_sizes(problem) if problem.G else [None],
        kernels=lambda problem, device: ("triton",) if runs_gluon(device) else ("pallas",),
        values={"recipe": (tuple(fp8_matmul.RECIPES), ("tensorwise", "rowwise", "blockwise"))},
    ),
}
