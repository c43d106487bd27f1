"""Plans of `moe_mlp`: the plans of the ops that it is made of, and of the backward's own kernel."""

import dataclasses
from typing import Any, Literal

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, Call, Planner
from jaxops.ops import grouped_glu, grouped_matmul, permute

TileOrder = grouped_glu.TileOrder
_WIDEST_GATHERED = 2048  # F of an expert


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Plans of the ops that `moe_mlp` is made of.

    With backend="triton" (Hopper) the backward through the down projection and the activation is one kernel; otherwise
    it is a product, and a pass that XLA compiles.

    Attributes:
      unit: plan of the gated unit, as of `jaxops.grouped_glu`.
      down: plan of the down projection, as of `jaxops.grouped_matmul`.
      rows: plan of `jaxops.permute` and `jaxops.combine`.
      fused: order of the tiles of the "triton" backend's backward kernel.
      gather: "triton" only, D a multiple of 64: the forward's first kernel gathers tokens' rows itself, instead of
        reading a copy in the order of experts. H200, 2026-11-22: at qwen3_30b (F = 768) that costs it 2 to 4 %, and the
        copy 10 to 14 % of its time; at mixtral (F = 14,336) 1 % and 1 %.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    unit: grouped_glu.Plan | None = None
    down: grouped_matmul.Plan | None = None
    rows: permute.Plan | None = None
    fused: TileOrder | None = None
    gather: bool | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: T tokens [T, D] with k choices each, E experts' weights [E, D, F] and [E, F, N], and the
    dtype of the products."""

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

    @property
    def unit(self) -> grouped_glu.Problem:
        return grouped_glu.Problem(self.E, self.R, self.D, self.F, self.dtype)

    @property
    def down(self) -> grouped_matmul.Problem:
        return grouped_matmul.Problem(self.E, self.R, self.F, self.N, self.dtype)


def _triton(problem: Problem, device: Device) -> bool:
    products = (("fwd", problem.unit.product), ("dgrad", problem.down))
    return all(grouped_matmul.takes_triton(name, product, device) for name, product in products)


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    p, plan, triton = call.problem, call.plan, call.backend == "triton"
    fused = gather = None
    if triton:
        for product in (p.unit.product, p.down):
            grouped_matmul.check_triton(product, call.device)
        short = p.R <= 128 * p.E  # groups
        gather = p.D % 64 == 0 and p.F <= _WIDEST_GATHERED and not short if plan.gather is None else plan.gather
        if gather and p.D % 64:
            raise NotImplementedError(f"rows are gathered 64 columns at a time, and x has D = {p.D}: leave out gather.")
        fused = plan.fused or TileOrder(4 if p.R < 1024 * p.E else 8, dynamic=short)
    rows = permute.Problem(p.T, p.D, p.k, p.dtype)
    return {
        "unit": call.part(grouped_glu.make_plan, p.unit, plan.unit),
        "down": call.part(grouped_matmul.make_plan, p.down, plan.down),
        "rows": call.part(permute.make_plan, rows, plan.rows, "pallas" if triton else call.backend),
        "fused": fused,
        "gather": gather,
    }


make_plan = Planner(Plan, triton=_triton, others=_others).make_plan
