"""Every choice that `modality_grouped_matmul` makes: tiles of each modality, which of them share a launch, backend."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jaxops._lib.device import Device
from jaxops._lib.plans import BasePlan, choose_backend, plan_device
from jaxops.ops.grouped_matmul import Plan as ProductPlan
from jaxops.ops.grouped_matmul import Problem as Product
from jaxops.ops.grouped_matmul import Tiles, kernels_for
from jaxops.ops.grouped_matmul import make_plan as make_product_plan
from jaxops.ops.modality_grouped_matmul.parts import Shapes

PASSES = ("fwd", "dgrad", "wgrad")
BACKENDS = ("triton", "pallas", "xla")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """What `make_plan` chose; print it to see. A pass left None is filled by `make_plan`; the xla backend needs no tiles.

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
    """What a plan depends on: M rows, and each modality's matrices (G, K, N): number, columns of lhs, columns of the result; the dtype in which they are
    multiplied. With transpose_rhs, rhs[i] is [G, N, K]."""

    M: int
    shapes: Shapes
    dtype: str
    transpose_rhs: bool = False


def products(problem: Problem) -> list[Product]:
    """Each modality's own problem. How many rows it has is known on the device only: they are planned as if they had as many each."""
    rows = -(-problem.M // len(problem.shapes))
    return [Product(G, rows, K, N, problem.dtype, problem.transpose_rhs) for G, K, N in problem.shapes]


def make_plan(
    problem: Problem, device: Device, rows: Iterable[dict] = (), *, backend: str = "auto", plan: Plan | None = None
) -> Plan:
    """Decides how to run `problem` on `device`: an explicit plan's tiles, else those that `jaxops.grouped_matmul` would take for each modality.

    Args:
      problem: static shapes and dtype.
      device: see `jaxops.tuning.current_device()`.
      rows: tuned rows of grouped_matmul (`jaxops.tuning.tuned_rows`), best source first.
      backend: "auto" takes on Hopper, where jax-triton is installed, its own kernel, but Pallas' for modalities whose groups are tiny; Pallas on other GPUs,
        xla elsewhere. "triton", "pallas" or "xla" is obeyed. On a CPU, "pallas" runs in Pallas' interpreter.
      plan: used as it is; only passes that it leaves None are filled.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan; tiles for another number of modalities.
      NotImplementedError: the triton backend elsewhere than on Hopper, for float32, or for widths that are no multiples of 8; pallas on a TPU.
    """
    device = plan_device(Plan, plan, device)
    each, rows = products(problem), tuple(rows)
    for name in PASSES:
        tiles = None if plan is None else getattr(plan, name)
        if tiles is not None and len(tiles) != len(each):
            raise ValueError(
                f"plan.{name} has tiles for {len(tiles)} modalities; rhs has {len(each)}: write one Tiles for each."
            )
    asked = backend
    if backend == "auto" and plan is None and all("triton" in kernels_for(product, device) for product in each):
        backend = "triton"
    backend = choose_backend(device, backend, plan, BACKENDS)
    if backend == "xla":
        return Plan("xla", device=device)
    chosen = []
    for i, product in enumerate(each):
        given = {
            name: None if plan is None or getattr(plan, name) is None else getattr(plan, name)[i] for name in PASSES
        }
        # As it was asked for: only "auto" leaves tiny groups to the Pallas kernel.
        chosen.append(make_product_plan(product, device, rows, backend=asked, plan=ProductPlan(backend, **given)))  # pyright: ignore[reportArgumentType]
    passes = {}
    for name in PASSES:
        tiles = tuple(getattr(found, name) for found in chosen)
        passes[name] = tiles if plan is not None and getattr(plan, name) is not None else _shared(tiles, problem)
    return Plan(backend, **passes, device=device)  # pyright: ignore[reportArgumentType]  # choose_backend has checked it


def _shared(tiles: tuple[Tiles, ...], problem: Problem) -> tuple[Tiles, ...]:
    """Tiles of one size made equal, as the largest matrices have them: their modalities share a launch, whose programs are all busy until its end."""
    found: dict[tuple, Tiles] = {}
    by_size = sorted(range(len(tiles)), key=lambda i: -problem.shapes[i][1] * problem.shapes[i][2])
    for i in by_size:
        found.setdefault(_size(tiles[i]), tiles[i])
    return tuple(found[_size(own)] for own in tiles)


def _size(tiles: Tiles) -> tuple:
    return tiles.kernel, tiles.bm, tiles.bn, tiles.bk, tiles.warps, tiles.turns
