"""Every choice that `modality_grouped_matmul` makes: tiles of each modality, which of them share a launch, backend."""

import dataclasses
from typing import Any, Literal

from jaxops._lib.plans import BasePlan, Call, Planner
from jaxops.ops.grouped_matmul import Plan as ProductPlan
from jaxops.ops.grouped_matmul import Problem as Product
from jaxops.ops.grouped_matmul import Tiles, kernels_for
from jaxops.ops.grouped_matmul import make_plan as make_product_plan
from jaxops.ops.grouped_matmul.modalities import Shapes

PASSES = ("fwd", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. A pass left None is filled by `make_plan`; the xla backend needs no
    tiles.

    Modalities of equal tiles share a launch, in which each has its own widths.

    Attributes:
      backend: "triton" (on Hopper; its tiles may say kernel="pallas", where that is the faster one), "pallas" or "xla".
      fwd: tiles of the forward pass, those of each modality as of `jaxops.grouped_matmul`.
      dgrad: tiles of the gradient of lhs.
      wgrad: tiles of the gradients of rhs.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: tuple[Tiles, ...] | None = None
    dgrad: tuple[Tiles, ...] | None = None
    wgrad: tuple[Tiles, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: M rows, and each modality's matrices (G, K, N): number, columns of lhs, columns of the
    result; the dtype in which they are multiplied. With transpose_rhs, rhs[i] is [G, N, K]."""

    M: int
    shapes: Shapes
    dtype: str
    transpose_rhs: bool = False


def products(problem: Problem) -> list[Product]:
    """Each modality's own problem. How many rows it has is known on the device only: they are planned as if they had
    as many each."""
    rows = -(-problem.M // len(problem.shapes))
    return [Product(G, rows, K, N, problem.dtype, problem.transpose_rhs) for G, K, N in problem.shapes]


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    """Tiles for each modality; a passed plan's as they are, the others equal where they differ little."""
    each, passes = products(call.problem), {}
    given = {name: getattr(call.plan, name) for name in PASSES}
    for name, tiles in given.items():
        if tiles is not None and len(tiles) != len(each):
            raise ValueError(
                f"plan.{name} has tiles for {len(tiles)} modalities; rhs has {len(each)}: write one Tiles for each."
            )
    if call.backend == "xla":
        return {}
    chosen = []
    for i, product in enumerate(each):
        plan = ProductPlan(call.plan.backend, **{name: tiles and tiles[i] for name, tiles in given.items()})
        # The backend as asked: only "auto" leaves short groups to the Pallas kernel.
        chosen.append(make_product_plan(product, call.device, call.rows, backend=call.asked, plan=plan))
    for name in PASSES:
        passes[name] = given[name] or _shared(tuple(getattr(plan, name) for plan in chosen), call.problem)
    return passes


def _shared(tiles: tuple[Tiles, ...], problem: Problem) -> tuple[Tiles, ...]:
    """Tiles of one size made equal, as the largest matrices have them: their modalities share a launch, whose
    programs are all busy until its end."""
    found: dict[tuple, Tiles] = {}
    by_size = sorted(range(len(tiles)), key=lambda i: -problem.shapes[i][1] * problem.shapes[i][2])
    for i in by_size:
        found.setdefault(_size(tiles[i]), tiles[i])
    return tuple(found[_size(own)] for own in tiles)


def _size(tiles: Tiles) -> tuple:
    return tiles.kernel, tiles.bm, tiles.bn, tiles.bk, tiles.warps, tiles.turns


make_plan = Planner(
    Plan,
    triton=lambda problem, device: all("triton" in kernels_for(product, device) for product in products(problem)),
    others=_others,
).make_plan
