"""Plans of `grouped_glu`: how the activation passes are cut into programs, the plan of the products, backend."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.powers import covering, power_of_2
from jaxops._lib.arrays.sums import parts_of_sums
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import BasePlan, Call, Planner, check_fields
from jaxops._lib.ragged.work_list import MOST_PANEL
from jaxops.ops import grouped_matmul

PASSES = ("fwd", "bwd")
SAVES = ("preactivations", "nothing")
# Gate and up, or one array with gate's columns first and then up's: weights [G, K, F] or [G, K, 2 F], pre-activations
# and their gradients [M, F] or [M, 2 F].
Halves = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]  # of each array of weights


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows, columns and warps of a program of an activation pass: powers of two, at most 32 warps."""

    rows: int
    columns: int
    warps: int = 4

    def __post_init__(self):
        check_fields(self, "rows", "columns", power_of_2=True)
        check_fields(self, "warps", power_of_2=True, most=32)


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """The order of the 128x128 tiles of a kernel that multiplies and activates.

    Attributes:
      panel: tiles are visited in panels of about this many tile rows of a group, so that concurrent programs share
        operands in L2.
    """

    panel: int = 8

    def __post_init__(self):
        check_fields(self, "panel", most=MOST_PANEL)


@dataclasses.dataclass(frozen=True)
class FusedTiles(TileOrder):
    """As `TileOrder`, for the forward's kernel.

    Attributes:
      stages: pipeline stages: 3, or 4, which leaves each consumer warp group one buffer to store from instead of two.
        With long sums the fourth stage can cost more than it hides (docs/notes/2026-11-26_moe_layer.md).
    """

    stages: int = 4

    def __post_init__(self):
        super().__post_init__()
        check_fields(self, "stages", among=(3, 4))


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the activation passes, and the products' plan.

    With backend="triton" (Hopper) the forward's products and activation are one kernel; the backward's activation pass
    is Pallas'. H200, 2026-11-21, against "pallas": qwen3_30b 354 instead of 387 us, dsmoe16b 564 instead of 619,
    mixtral_up 10.2 instead of 10.5 ms. With "pallas" they are one kernel where the rows are few (`few_rows`).

    Attributes:
      products: plan of the grouped products, as of `jaxops.grouped_matmul(x, w_gate, group_offsets)`.
      fused: of the forward's one kernel: `FusedTiles` with "triton"; with "pallas" tiles of `jaxops.grouped_matmul`,
        with bn columns of gate and as many of up. With "pallas", None where the plan has tiles for fwd or products, or
        rows are many: then the forward is products and an activation pass.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None
    products: grouped_matmul.Plan | None = None
    fused: FusedTiles | grouped_matmul.Tiles | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call.

    Attributes:
      save: whether gate and up are kept for the backward.
      compute_dtype: of the operands of the products, and of the pre-activations.
      x_dtype, w_dtype: of the gradients.
      out_dtype: of h.
    """

    plan: Plan
    activation: str
    save: bool
    precision: lax.PrecisionLike
    compute_dtype: jnp.dtype
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype
    out_dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape `x[M, K]`, weights `[G, K, F]`, the dtype of the products, whether
    gate and up are one array [G, K, 2 F], and whether h has another dtype than the products."""

    G: int
    M: int
    K: int
    F: int
    dtype: str
    joined: bool = False
    recast: bool = False

    @property
    def product(self) -> grouped_matmul.Problem:
        return grouped_matmul.Problem(self.G, self.M, self.K, self.F * (2 if self.joined else 1), self.dtype)


def few_rows(M: int, G: int) -> bool:
    """Whether reading the weights takes most of a forward over M rows in G groups.

    A group of r rows does r operations for each byte of bfloat16 weights, where an H200 does about 200 in the time of a
    byte. Each further tile of a group reads the group's weights again. With at most 16 rows in a mean group, no routing
    has more than twice as many tiles as there are groups.
    """
    return M <= 2048 and M <= 16 * G


def few_rows_cut(M: int, G: int, K: int, F: int, device: Device) -> tuple[int, int]:
    """Columns of gate of a program of the kernel for few rows, and parts of its sums.

    H200, 2026-11-25, 128 experts of 2048x768, a token with eight: in bfloat16 17.6 us with 64 columns and four parts,
    19.0 in one part, 21.7 with 32 columns; in FP8 12.1, 17.9 and 15.2.
    """
    columns = min(64, max(16, power_of_2(F)))
    return columns, parts_of_sums(K, min(G, M) * -(-F // columns), device.cores)


def _few_rows_tiles(problem: Problem, fwd: grouped_matmul.Tiles, device: Device) -> grouped_matmul.Tiles:
    """fwd: of the products, whose height the tiles have."""
    p, size = problem, jnp.dtype(problem.dtype).itemsize
    bm, (bn, split) = min(fwd.bm, 64), few_rows_cut(p.M, p.G, p.K, p.F, device)
    bk = min(128 // size, max(16, power_of_2(p.K)))
    tiles = grouped_matmul.Tiles(bm, bn, bk, 4, 4, tail=min(fwd.tail, bm // 2), split=split)
    # Two programs a multiprocessor: while one fills its pipeline, or stores, the other loads.
    while tiles.stages > 2 and 2 * dataclasses.replace(tiles, bn=2 * bn).shared_bytes(p.dtype) > device.shared_bytes:
        tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
    return tiles


def _triton(problem: Problem, device: Device) -> bool:
    takes = grouped_matmul.takes_triton("fwd", problem.product, device, grouped_matmul.LEAST_ROWS_OF_UNIT)
    return takes and not problem.recast and problem.F % 8 == 0


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    p = call.problem
    if call.backend == "triton":
        grouped_matmul.check_triton(p.product, call.device)
        if p.F % 8:
            raise NotImplementedError(
                f"the triton backend's halves of a row start at multiples of 16 bytes, and F is {p.F}, no multiple of "
                "8: use backend='pallas'."
            )
        if p.recast:
            raise NotImplementedError(
                f"the triton backend writes h in the dtype of its products, {p.dtype}: cast x to that, or use 'pallas'."
            )
    products = call.part(grouped_matmul.make_plan, p.product, call.plan.products)
    return {"products": products, "fused": None if call.backend == "xla" else _fused(call, products)}


def _fused(call: Call[Problem, Plan], products: grouped_matmul.Plan) -> FusedTiles | grouped_matmul.Tiles | None:
    p, plan, triton = call.problem, call.plan, call.backend == "triton"
    if plan.fused is not None:
        needed = FusedTiles if triton else grouped_matmul.Tiles
        if not isinstance(plan.fused, needed) or getattr(plan.fused, "kernel", "pallas") != "pallas":
            what = "grouped_glu.FusedTiles" if triton else "grouped_matmul.Tiles with kernel='pallas'"
            raise ValueError(f"plan.fused={plan.fused}: backend={call.backend!r} takes {what}.")
        if not triton and (p.joined or p.recast):
            raise NotImplementedError(
                "the kernel for few rows reads gate's and up's weights as two arrays and writes h in the dtype of its "
                "products: leave out plan.fused."
            )
        return plan.fused
    if triton:
        return FusedTiles(stages=3 if p.K > grouped_matmul.LONG_SUM else 4)
    apart = p.joined or p.recast or plan.fwd is not None or plan.products is not None
    if apart or products.fwd is None or not few_rows(p.M, p.G):
        return None
    return _few_rows_tiles(p, products.fwd, call.device)


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """32 elements of each array a thread in fwd, and 16 in bwd, which holds five arrays instead of three; as few excess
    columns as possible, and as many columns of a row as a warp loads by 16 bytes a thread."""
    columns = covering(problem.F, min(256, power_of_2(problem.F)), 1024)
    return Tiles(max(1, (4096 if pass_name == "fwd" else 2048) // columns), columns, 4)


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles of 8 to 64 elements a thread."""
    widest = max(32, power_of_2(problem.F))
    for rows, columns, warps in itertools.product((1, 2, 4, 8, 16, 32), (128, 256, 512, 1024, 2048), (1, 2, 4, 8)):
        if columns <= widest and 8 <= rows * columns / (32 * warps) <= 64:
            yield Tiles(rows, columns, warps)


def _key(pass_name: str, *, F: int, dtype: str, **_: Any) -> tuple:
    """Programs are independent: the number of rows changes nothing."""
    return pass_name, F, dtype


PLANNER = Planner(
    Plan, Tiles, PASSES, heuristic, _search, key=_key, triton=_triton, kernel=lambda *_: "pallas", others=_others,
    symbolic=("M",),
)  # fmt: skip
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
