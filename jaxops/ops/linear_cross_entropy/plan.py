"""Plans of `linear_cross_entropy`: who makes the logits and their statistics, and how many rows at a time."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jaxops._lib.arrays.symbolic import is_symbolic
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import BasePlan, Call, Planner, check_fields
from jaxops.ops import grouped_matmul

LIMIT_BYTES = 10**9  # of the logits of a chunk of some rows
WHOLE_BYTES = 2 * 10**9  # of all logits and their gradients: up to here they are one chunk, without a float32 sum
TILE = 128  # rows of a product's tile


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """How logits are made.

    Attributes:
      backend: "triton" (Hopper): a product whose epilogue has each row's statistics, and a pass that makes the
        gradients in the logits' memory; "xla": XLA's product, and passes over the logits.
      rows: whose logits are in memory at a time; None, of a symbolic size, for all.
      products: of a chunk's rows; "triton" takes the tiles of the forward and of w's gradient.
    """

    backend: Literal["triton", "xla"] = "triton"
    rows: int | None = None
    products: grouped_matmul.Plan | None = None

    def __post_init__(self):
        if self.rows is not None:
            check_fields(self, "rows")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: x [T, D], V words (of this device), dtypes of the products and of the logits in memory,
    whether w is [V, D], and its dtype, if that is not the products'."""

    T: int
    D: int
    V: int
    dtype: str
    logits_dtype: str
    transpose_w: bool = False
    w_dtype: str | None = None

    def product(self, rows: int) -> grouped_matmul.Problem:
        return grouped_matmul.Problem(1, rows, self.D, self.V, self.dtype, self.transpose_w)


def stores_bfloat16(dtype: str, w_dtype: str) -> bool:
    """Whether w's gradient is stored in bfloat16 where all rows are one chunk, by dtypes of the products and of w.
    float16 has not the range: the gradient is not divided by the number of tokens yet."""
    return dtype == w_dtype == "bfloat16"


def rows_at_a_time(problem: Problem, in_place: bool) -> int | None:
    """Rows of a chunk: None for all, or a multiple of `TILE`; the first chunk may have fewer.

    in_place: whether the gradients overwrite the logits.

    All rows at once need no float32 sum where w's gradient can be stored in bfloat16: the sum's bytes may be logits
    instead, with their gradients. T 4,096, D 7,168, V 129,280 takes 34.5 ms so, 36.7 in chunks of 2,048 (H200,
    2026-11-29).

    Each chunk reads and writes that sum, so few are better: T 32,768, D 5,120, V 152,064 takes 235.0 ms in chunks of
    2,048 rows, 232.5 in chunks of 3,072; T 16,384, D 2,048, V 151,936 48.9 in chunks of 2,048, 48.0 of 2,816 (H200,
    2026-11-29).
    """
    T, row_bytes = problem.T, problem.V * jnp.dtype(problem.logits_dtype).itemsize
    sum_bytes = 4 * problem.D * problem.V if stores_bfloat16(problem.dtype, problem.w_dtype or problem.dtype) else 0
    all_bytes = row_bytes if in_place else 2 * row_bytes
    most = max(TILE, LIMIT_BYTES // row_bytes // TILE * TILE)
    if is_symbolic(T) or T * all_bytes <= max(WHOLE_BYTES, LIMIT_BYTES + sum_bytes):
        return None
    chunks = -(-T // most)
    return -(-T // (chunks * TILE)) * TILE


def _triton(problem: Problem, device: Device) -> bool:
    whole = problem.logits_dtype == problem.dtype and problem.T > 0
    return whole and grouped_matmul.runs_triton(problem.product(problem.T), device)


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    p = call.problem
    if call.plan.rows and is_symbolic(p.T):
        raise NotImplementedError(
            f"T={p.T} is symbolic, and plan.rows is {call.plan.rows}: leave it out, for all rows."
        )
    rows = call.plan.rows or rows_at_a_time(p, call.backend == "triton")
    if call.backend == "xla":
        return {"rows": rows}
    grouped_matmul.check_triton(p.product(p.T), call.device)
    if p.logits_dtype != p.dtype:
        raise NotImplementedError(
            f"the triton backend keeps logits in the dtype of the products, {p.dtype}; logits_dtype is "
            f"{p.logits_dtype}: leave it out, or use backend='xla'."
        )
    problem = p.product(min(rows or p.T, p.T))
    products = grouped_matmul.make_plan(problem, call.device, call.rows, backend="triton", plan=call.plan.products)
    if products.fwd is not None and products.fwd.kernel != "triton":
        raise ValueError(f"plan.products.fwd={products.fwd}: backend='triton' needs tiles with kernel='triton'.")
    return {"rows": rows, "products": products}


make_plan = Planner(Plan, pallas=False, triton=_triton, others=_others, symbolic=("T",)).make_plan
