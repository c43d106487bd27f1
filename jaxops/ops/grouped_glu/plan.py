"""Every choice that `grouped_glu` makes: how the activation passes are cut into programs, the plan of the products, backend."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops._lib.powers import check_powers_of_2, power_of_2
from jaxops.ops.grouped_matmul import Plan as ProductPlan
from jaxops.ops.grouped_matmul import Problem as Product
from jaxops.ops.grouped_matmul import check_triton
from jaxops.ops.grouped_matmul import make_plan as make_product_plan

PASSES = ("fwd", "bwd")
BACKENDS = ("triton", "pallas", "xla")
SAVES = ("preactivations", "nothing")
Pass = Literal["fwd", "bwd"]
# Gate and up, or one array with gate's columns first and then up's: weights [G, K, F] or [G, K, 2 F], pre-activations and their gradients [M, F] or [M, 2 F].
Halves = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes.

    Attributes:
      activation: of the gate.
      save: what the forward keeps for the backward, beside x and the weights in the compute dtype.
      precision: of float32 products.
      compute_dtype: of the operands of the products, and of the pre-activations.
      x_dtype, w_dtype: of the gradients.
      out_dtype: of h.
    """

    activation: str
    save: str
    precision: lax.Precision
    compute_dtype: jnp.dtype
    x_dtype: jnp.dtype
    w_dtype: jnp.dtype
    out_dtype: jnp.dtype

    def inner(self) -> "Spec":
        """For a call inside a differentiation rule, whose operands are in the compute dtype already."""
        return dataclasses.replace(self, x_dtype=self.compute_dtype, w_dtype=self.compute_dtype)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How an activation pass is cut into programs.

    Attributes:
      rows: rows of a program. A power of two.
      columns: columns of a program. A power of two.
      warps: warps a program (1, 2, 4, 8, 16 or 32).
    """

    rows: int
    columns: int
    warps: int = 4

    def __post_init__(self):
        check_powers_of_2(self, "rows", "columns", "warps")


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """How a kernel that multiplies and activates at once goes through its tiles of 128 rows and 128 columns.

    Attributes:
      panel: tiles are visited in panels of this many tile rows, so that programs that run together share operands in L2.
      dynamic: programs take tiles as they get free, instead of every 132nd (on an H200).
    """

    panel: int = 4
    dynamic: bool = False

    def __post_init__(self):
        if self.panel < 1:
            raise ValueError(f"{type(self).__name__}.panel={self.panel} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class FusedTiles(TileOrder):
    """As `TileOrder`, of the forward's kernel.

    Attributes:
      stages: depth of the load pipeline: 3, or 4, which leaves each consumer one buffer to store from instead of two. H200, 2026-11-22, qwen3_30b's 32,768 rows
        as a router fills the groups: 381 us with 4 and dynamic, 391 with 3 and dynamic, 401 with 3 and not; saving what the backward reads, 397, 413
        and 413. Where groups are long, the card's power bounds.
    """

    stages: int = 3

    def __post_init__(self):
        super().__post_init__()
        if self.stages not in (3, 4):
            raise ValueError(f"FusedTiles.stages={self.stages} must be 3 or 4.")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. What is left None is filled by `make_plan`; with the xla backend the activation passes need no blocks.

    Attributes:
      backend: "pallas" or "xla", of the activation passes; "triton" (Hopper): the forward's products and activation are one kernel, the backward's activation
        pass is Pallas'. H200, 2026-11-21, against "pallas": qwen3_30b 354 instead of 387 us, dsmoe16b 564 instead of 619, mixtral_up 10.2 instead of 10.5 ms.
      fwd: blocks of the forward activation pass.
      bwd: blocks of the backward activation pass.
      products: plan of the grouped products, as of `jaxops.grouped_matmul(x, w_gate, group_offsets)`.
      fused: of the "triton" backend's forward.
    """

    backend: Literal["triton", "pallas", "xla"] = "pallas"
    fwd: Tiles | None = None
    bwd: Tiles | None = None
    products: ProductPlan | None = None
    fused: FusedTiles | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the static shape `x[M, K]`, weights `[G, K, F]`, the dtype in which they are multiplied, whether gate and up are one array
    [G, K, 2 F], and whether h is of another dtype than that."""

    G: int
    M: int
    K: int
    F: int
    dtype: str
    joined: bool = False
    recast: bool = False

    @property
    def product(self) -> Product:
        return Product(self.G, self.M, self.K, self.F * (2 if self.joined else 1), self.dtype)


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: what an explicit plan says, then tuned rows of the products, then the heuristics.

    Args:
      problem: static shape and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows of grouped matmul (`jaxops.tuning.tuned_rows("grouped_matmul", device)`), best source first. The activation passes have none: the
        choice is small.
      backend: "auto" takes triton on Hopper where it can and groups are not tiny, Pallas for the activation passes on other GPUs, grouped matmul's own choice
        for the products there, and xla elsewhere; "triton", "pallas" or "xla" is obeyed by both. On a CPU, "pallas" runs in Pallas' interpreter.
      plan: used as it is; only what it leaves None is filled.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan.
      NotImplementedError: the triton backend elsewhere than on Hopper, for float32, for sizes that are no multiples of 8, for one array of weights, or for h in
        another dtype than the products'; pallas on a TPU.
    """
    device = plan_device(Plan, plan, device)
    free = backend == "auto" and plan is None
    products = plan.products if plan is not None else None
    if products is None and free:
        products = make_product_plan(problem.product, device, rows)
    if (
        free
        and products is not None
        and products.fwd is not None
        and products.fwd.kernel == "triton"
        and not (problem.joined or problem.recast)
    ):
        backend = "triton"
    chosen = choose_backend(device, backend, plan, BACKENDS)
    if chosen == "triton":
        check_triton(problem.product, device)
        if problem.joined:
            raise NotImplementedError(
                "the triton backend reads gate's and up's weights as two arrays: pass w_gate and w_up, or use backend='pallas'."
            )
        if problem.recast:
            raise NotImplementedError(
                f"the triton backend gives h in the dtype in which it multiplies, {problem.dtype}: cast x to that, or use 'pallas'."
            )
    products = make_product_plan(
        problem.product, device, rows, backend=chosen if products is None else "auto", plan=products
    )
    if chosen == "xla":
        return Plan("xla", products=products, device=device)
    fwd = plan.fwd if plan is not None and plan.fwd is not None else heuristic("fwd", problem)
    bwd = plan.bwd if plan is not None and plan.bwd is not None else heuristic("bwd", problem)
    if chosen == "pallas":
        return Plan("pallas", fwd, bwd, products, device=device)
    usual = FusedTiles(4, dynamic=True, stages=4) if problem.M < 1024 * problem.G else FusedTiles(8)
    fused = plan.fused if plan is not None and plan.fused is not None else usual
    return Plan("triton", fwd, bwd, products, fused, device=device)


def heuristic(pass_name: Pass, problem: Problem) -> Tiles:
    """32 elements of each array a thread in fwd and 16 in bwd, which holds five arrays instead of three; as few columns to spare as there can be, and of as
    many a row as 16-byte loads of a warp take."""
    least = min(256, power_of_2(problem.F))
    sizes = [size for size in (least, 512, 1024) if size >= least]
    columns = min(sizes, key=lambda size: (-(-problem.F // size) * size, -size))
    return Tiles(max(1, (4096 if pass_name == "fwd" else 2048) // columns), columns, 4)


def candidates(pass_name: Pass, problem: Problem) -> list[Tiles]:
    """Every Tiles worth measuring for one pass: the heuristic's, and those of 8 to 64 elements a thread."""
    found = [heuristic(pass_name, problem)]
    widest = max(32, power_of_2(problem.F))
    for rows, columns, warps in itertools.product((1, 2, 4, 8, 16, 32), (128, 256, 512, 1024, 2048), (1, 2, 4, 8)):
        block = Tiles(rows, columns, warps)
        if columns <= widest and 8 <= rows * columns / (32 * warps) <= 64 and block not in found:
            found.append(block)
    return found
