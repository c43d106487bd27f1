"""Every choice that `moe_mlp` makes: the plans of the ops that it is made of, and of the backward's own kernel."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp
from jax import lax

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops.ops.grouped_glu import Plan as UnitPlan
from jaxops.ops.grouped_glu import Problem as Unit
from jaxops.ops.grouped_glu import TileOrder
from jaxops.ops.grouped_glu import make_plan as make_unit_plan
from jaxops.ops.grouped_matmul import Plan as ProductPlan
from jaxops.ops.grouped_matmul import Problem as Product
from jaxops.ops.grouped_matmul import check_triton
from jaxops.ops.grouped_matmul import make_plan as make_product_plan
from jaxops.ops.permute import Plan as RowsPlan
from jaxops.ops.permute import Problem as Rows
from jaxops.ops.permute import make_plan as make_rows_plan

_WIDEST_GATHERED = 2048  # of an expert
BACKENDS = ("triton", "pallas", "xla")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`.

    Attributes:
      backend: "triton" (Hopper): the backward through the down projection and the activation is one kernel; else "pallas" or "xla": a product, and a pass that
        XLA compiles.
      unit: plan of the gated unit, as of `jaxops.grouped_glu`.
      down: plan of the down projection, as of `jaxops.grouped_matmul`.
      rows: plan of `jaxops.permute` and `jaxops.combine`.
      fused: how the "triton" backend's kernel of the backward goes through its tiles of 128 rows and 128 columns.
      gather: "triton" only, D a multiple of 64: the forward's first kernel reads tokens' rows where they lie, instead of a copy in the order of experts. H200,
        2026-11-22: at qwen3_30b (F = 768) that costs it 2 to 4 %, and the copy 10 to 14 % of its time; at mixtral (F = 14,336) 1 % and 1 %.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    unit: UnitPlan | None = None
    down: ProductPlan | None = None
    rows: RowsPlan | None = None
    fused: TileOrder | None = None
    gather: bool | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: T tokens [T, D] with k choices each, E experts' weights [E, D, F] and [E, F, N], and the dtype in which they are multiplied."""

    T: int
    k: int
    E: int
    D: int
    F: int
    N: int
    dtype: str

    @property
    def R(self) -> int:
        return self.T * self.k


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes."""

    plan: Plan
    activation: str
    save: str
    precision: lax.Precision
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: what an explicit plan says, then what the ops that it is made of choose.

    Args:
      problem: static shape and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows of grouped matmul (`jaxops.tuning.tuned_rows("grouped_matmul", device)`), best source first.
      backend: "auto" takes triton on Hopper where it can and groups are not tiny, Pallas on other GPUs, xla elsewhere; "triton", "pallas" or "xla" is obeyed,
        by the ops that this one is made of, too.
      plan: used as it is; only what it, or a plan in it, leaves None is filled.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan.
      NotImplementedError: the triton backend elsewhere than on Hopper, for float32, or for sizes that are no multiples of 8; pallas on a TPU.
    """
    device = plan_device(Plan, plan, device)
    p, rows = problem, list(rows)
    unit_problem, down_problem = Unit(p.E, p.R, p.D, p.F, p.dtype), Product(p.E, p.R, p.F, p.N, p.dtype)
    unit, down, row_plan, fused, gather = (
        getattr(plan, name) if plan is not None else None for name in ("unit", "down", "rows", "fused", "gather")
    )
    free = backend == "auto" and plan is None
    if free:
        unit, down = make_unit_plan(unit_problem, device, rows), make_product_plan(down_problem, device, rows)
        if unit.backend == "triton" and down.dgrad is not None and down.dgrad.kernel == "triton":
            backend = "triton"
    chosen = choose_backend(device, backend, plan, BACKENDS)
    if chosen == "triton":
        for product in (unit_problem.product, down_problem):
            check_triton(product, device)
        small = p.R <= 128 * p.E  # groups
        gather = p.D % 64 == 0 and p.F <= _WIDEST_GATHERED and not small if gather is None else gather
        if gather and p.D % 64:
            raise NotImplementedError(
                f"rows are gathered by 64 columns at a time, and x has D = {p.D}: leave plan.gather away."
            )
        fused = fused or TileOrder(4 if p.R < 1024 * p.E else 8, dynamic=small)
    return Plan(
        backend=chosen,  # pyright: ignore[reportArgumentType]  # choose_backend has checked it
        unit=make_unit_plan(unit_problem, device, rows, backend=chosen if unit is None else "auto", plan=unit),
        down=make_product_plan(down_problem, device, rows, backend=chosen if down is None else "auto", plan=down),
        rows=make_rows_plan(
            Rows(p.T, p.D, p.k, p.dtype),
            device,
            backend=("pallas" if chosen == "triton" else chosen) if row_plan is None else "auto",
            plan=row_plan,
        ),
        fused=fused if chosen == "triton" else None,
        gather=gather if chosen == "triton" else None,
        device=device,
    )
