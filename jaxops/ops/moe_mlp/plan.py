"""Plans of `moe_mlp`: the plans of the ops that it is made of, and of the backward's own kernel."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jaxops._lib.numerics.fp8 import BLOCK
from jaxops._lib.planning.device import Device, runs_gluon
from jaxops._lib.planning.plans import ADA, AMPERE, BasePlan, Call, Planner
from jaxops.ops import fp8_matmul, grouped_glu, grouped_matmul, permute

TileOrder = grouped_glu.TileOrder
_WIDEST_GATHERED = 2048  # F of an expert


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Plans of the ops that `moe_mlp` is made of.

    With backend="triton" (Hopper) the backward through the down projection and the activation is one kernel; otherwise
    it is a product, and a pass that XLA compiles. With an FP8 recipe all is products, casts, and passes that XLA
    compiles; on Hopper the forward's unit may be cast by the kernel of its products.

    Attributes:
      unit: plan of the gated unit, as of `jaxops.grouped_glu`; without a gate of the up projection, as of
        `jaxops.grouped_matmul`, beside which XLA compiles the activation; with a recipe of its products, as of
        `jaxops.fp8_grouped_matmul`.
      down: plan of the down projection, as of `jaxops.grouped_matmul`, or of `jaxops.fp8_grouped_matmul`.
      rows: plan of `jaxops.permute` and `jaxops.combine`.
      fused: order of the tiles of the "triton" backend's backward kernel; not with a recipe, and not without a gate.
      gather: the forward's first kernel gathers tokens' rows itself, instead of reading a copy in the order of experts.
        With a recipe where `unit_inside` holds. Without, with "triton" for D a multiple of 64. H200, 2026-11-22: at
        qwen3_30b (F = 768) that costs it 2 to 4 %, and the copy 10 to 14 % of its time; at mixtral (F = 14,336) 1 % and
        1 %. With "pallas" for few rows, where the unit is one kernel (its plan's `fused`; with weights stored in FP8 of
        tiles `fwd`, with bn columns of gate and as many of up).
      unit_inside: with a recipe of block scales. The kernel that multiplies by gate's and up's weights also computes
        the unit and casts it; gate and up are written only for a backward. "triton", bfloat16, F a multiple of 128; its
        tiles are `unit.fwd`, with bn columns of gate and as many of up.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    unit: Any = None  # the recipe says of which class, and the classes' own make_plan checks it
    down: Any = None
    rows: permute.Plan | None = None
    fused: TileOrder | None = None
    gather: bool | None = None
    unit_inside: bool | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: T tokens [T, D] with k choices each, E experts' weights [E, D, F] and [E, F, N], the
    dtype of the products, and the FP8 recipe or None; whether the weights are stored in FP8 and the rows not quantized
    (recipe "blockwise"); and whether gate and up are two arrays, one [E, D, 2 F] ("joined"), or there is no gate
    ("alone")."""

    T: int
    k: int
    E: int
    D: int
    F: int
    N: int
    dtype: str
    recipe: str | None = None
    stored: bool = False
    form: Literal["two", "joined", "alone"] = "two"

    @property
    def R(self) -> int:
        return self.T * self.k

    @property
    def unit(self) -> grouped_glu.Problem:
        return grouped_glu.Problem(self.E, self.R, self.D, self.F, self.dtype, self.form == "joined")

    @property
    def products(self) -> tuple[tuple[str, grouped_matmul.Problem], ...]:
        """Of the "triton" backend: passes and products that its kernels must multiply."""
        up = dataclasses.replace(self.unit, joined=False).product  # halves of joined weights, too, start at 16 bytes
        return ("fwd", up), ("dgrad" if self.form != "alone" else "fwd", self.down)

    @property
    def down(self) -> grouped_matmul.Problem:
        return grouped_matmul.Problem(self.E, self.R, self.F, self.N, self.dtype)

    @property
    def fp8(self) -> tuple[fp8_matmul.Problem, fp8_matmul.Problem]:
        """Of the unit's products, with gate and up side by side unless they are stored in FP8, and of the down
        projection."""
        assert self.recipe is not None
        sizes = ((self.D, self.F if self.stored else 2 * self.F), (self.F, self.N))
        options = {"recipe": self.recipe, "dtype": self.dtype, "G": self.E, "quantize_lhs": not self.stored}
        unit, down = (fp8_matmul.Problem(self.R, K, N, **options) for K, N in sizes)
        return unit, down


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call, beside shapes. compute_dtype is that of all values that are not in FP8, x_dtype and
    w_dtype are those of the gradients, precision is that of float32 products, form is `Problem.form`."""

    plan: Plan
    activation: str
    save: str
    compute_dtype: jnp.dtype
    out_dtype: jnp.dtype
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype
    precision: lax.Precision = lax.Precision.DEFAULT
    form: Literal["two", "joined", "alone"] = "two"


def _triton(problem: Problem, device: Device) -> bool:
    if problem.recipe is not None:
        return runs_gluon(device) and not problem.stored
    least = grouped_matmul.LEAST_ROWS_OF_UNIT
    return all(grouped_matmul.takes_triton(name, product, device, least) for name, product in problem.products)


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    p, plan, triton = call.problem, call.plan, call.backend == "triton"
    if plan.unit_inside and (p.recipe is None or p.stored):
        raise NotImplementedError("only with an FP8 recipe is the unit cast: leave unit_inside out.")
    copies = permute.Problem(p.T, p.D, p.k, p.dtype), plan.rows, "pallas" if triton else call.backend
    if p.stored:
        return _stored_parts(call) | {"rows": call.part(permute.make_plan, *copies)}
    if p.recipe is not None:
        if plan.fused is not None:
            raise ValueError(f"recipe={p.recipe!r} has no kernel for the plan's fused: leave it out.")
        return _recipe_parts(call) | {"rows": call.part(permute.make_plan, *copies)}
    if triton:
        for _, product in p.products:
            grouped_matmul.check_triton(product, call.device)
    if p.form == "alone":
        if plan.fused is not None or plan.gather:
            raise NotImplementedError("experts without a gate have no kernel for fused or gather: leave them out.")
        unit, down = ((grouped_matmul.make_plan, *part) for part in ((p.unit.product, plan.unit), (p.down, plan.down)))
        parts = {"unit": call.part(*unit), "down": call.part(*down), "rows": call.part(permute.make_plan, *copies)}
        return parts | {"gather": False}
    unit = call.part(grouped_glu.make_plan, p.unit, plan.unit)
    fused, gathers = None, unit.fused is not None
    if triton:
        short = p.R <= 128 * p.E  # groups
        gathers = gathers and p.D % 64 == 0 and p.F <= _WIDEST_GATHERED and not short
        if plan.gather and p.D % 64:
            raise NotImplementedError(f"rows are gathered 64 columns at a time, and x has D = {p.D}: leave out gather.")
        fused = plan.fused or TileOrder()
    if plan.gather and unit.fused is None:
        raise NotImplementedError("the unit's one kernel gathers rows, and plan.unit has none: leave out gather.")
    return {
        "unit": unit,
        "down": call.part(grouped_matmul.make_plan, p.down, plan.down),
        "rows": call.part(permute.make_plan, *copies),
        "fused": fused,
        "gather": gathers if plan.gather is None else plan.gather,
    }


def _recipe_parts(call: Call[Problem, Plan]) -> dict[str, Any]:
    """The plans of the products, whether the unit is cast by the kernel of its products, and that one gathers rows."""
    p, plan = call.problem, call.plan
    unit, down = (call.part(fp8_matmul.make_plan, *part) for part in zip(p.fp8, (plan.unit, plan.down), strict=True))
    given, inside = None if plan.unit is None else plan.unit.fwd, plan.unit_inside
    takes = fp8_matmul.takes_unit(p.fp8[0], unit.backend, given)
    if inside and not takes:
        raise NotImplementedError(
            "unit_inside=True has a kernel for backend 'triton', block scales, bfloat16, F a multiple of 128, and "
            f"tiles of 128x128 with at most 4 stages; this is {unit.backend!r}, {p.recipe!r}, {p.dtype}, F = {p.F}"
            f"{'' if given is None else f', {given}'}: leave unit_inside out."
        )
    tiles = fp8_matmul.UNIT_TILES
    if inside is None:  # not where there are too few of its tiles, half as many as of the product alone
        enough = -(-p.R // tiles.bm) * (p.F // tiles.bn) >= call.device.cores
        inside = takes and (bool(plan.gather) or enough)
    if inside and given is None:
        unit = dataclasses.replace(unit, fwd=tiles)
    # H200, 2026-11-26, 262,144 rows of 32,768 tokens, D 2,048, F 768: 1,408 us; 1,541 with a copy of the rows.
    gather = inside and p.F <= _WIDEST_GATHERED if plan.gather is None else plan.gather
    if gather and not inside:
        raise NotImplementedError(
            "with a recipe only the kernel that casts the unit (unit_inside) gathers rows: leave out gather."
        )
    return {"unit": unit, "down": down, "gather": gather, "unit_inside": inside}


def _stored_parts(call: Call[Problem, Plan]) -> dict[str, Any]:
    """The plans of the products with stored weights, and whether the unit is one kernel that gathers."""
    p, plan = call.problem, call.plan
    if plan.fused is not None:
        raise ValueError("weights stored in FP8 have no kernel for the plan's fused: leave it out.")
    unit, down = (call.part(fp8_matmul.make_plan, *part) for part in zip(p.fp8, (plan.unit, plan.down), strict=True))
    tiles, few = unit.fwd, grouped_glu.few_rows(p.R, p.E)
    gather = tiles is not None and few if plan.gather is None else plan.gather
    if tiles is None and gather:
        raise NotImplementedError(f"backend={call.backend!r} has no kernel that gathers rows: leave out gather.")
    if tiles is not None and gather and (plan.unit is None or plan.unit.fwd is None):
        # H200, 2026-11-25, 128 experts of 2048x768, 2,048 rows: 136 us with 16 rows, 147 with 32.
        bm, (bn, split) = 16 if few else max(16, tiles.bm), grouped_glu.few_rows_cut(p.R, p.E, p.D, p.F, call.device)
        # Two programs a multiprocessor, of stages with both weights' columns and rows of two bytes.
        fit = call.device.shared_bytes // 2 // (BLOCK * (2 * bm + 2 * bn))
        tiles = fp8_matmul.Tiles("pallas", bm, bn, 4, max(2, min(4, fit)), split=split)
        unit = dataclasses.replace(unit, fwd=tiles)
    return {"unit": unit, "down": down, "gather": gather}


make_plan = Planner(
    Plan, needs=lambda problem: ADA if problem.recipe else AMPERE, triton=_triton, others=_others, symbolic=("T",)
).make_plan
