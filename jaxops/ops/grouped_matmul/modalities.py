"""Several arrays of weights in one product, one a modality: which modalities share a launch, which rows each one
writes, their plans."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul.plan import PASSES, PLANNER, Plan, Problem, Tiles, make_plan

Shapes = tuple[tuple[int, int, int], ...]  # of each modality's weights: groups, rows, columns
Arrays = Sequence[jax.Array | jax.ShapeDtypeStruct]
MOST = 4  # modalities of a triton launch, whose kernel has as many results


@dataclasses.dataclass(frozen=True)
class Part:
    """A modality in a launch.

    Attributes:
      number: of the modality.
      groups: its first group, and the end.
      runs: its first run (`ragged.runs`), and the end: its groups', and adjacent runs that no modality multiplies,
        whose rows it writes as zeros. Every run belongs to one modality, so every row is written once.
    """

    number: int
    groups: tuple[int, int]
    runs: tuple[int, int]


def shapes_of(rhs: tuple[jax.Array, ...], transpose: bool = False) -> Shapes:
    """transpose: of the transposes."""
    return tuple((w.shape[0], w.shape[1 + transpose], w.shape[2 - transpose]) for w in rhs)


def first_groups(shapes: Shapes) -> list[int]:
    """Each modality's first group, then the number of all groups."""
    found = [0]
    for count, _, _ in shapes:
        found.append(found[-1] + count)
    return found


def parts_of(shapes: Shapes) -> list[Part]:
    """The modalities whose product is not empty, in order."""
    firsts = first_groups(shapes)
    found = [i for i, shape in enumerate(shapes) if 0 not in shape]
    # Run 0 lies before all groups, run 1 + g is group g. A modality also has the runs up to the next one's first group.
    starts = [0, *(1 + firsts[i] for i in found[1:]), firsts[-1] + 2]
    return [Part(i, (firsts[i], firsts[i + 1]), (starts[n], starts[n + 1])) for n, i in enumerate(found)]


def launches(shapes: Shapes, tiles: Sequence[Tiles]) -> list[tuple[Tiles, tuple[Part, ...]]]:
    """One launch for all modalities of equal tiles."""
    found: dict[Tiles, list[Part]] = {}
    for part in parts_of(shapes):
        found.setdefault(tiles[part.number], []).append(part)
    return [
        (tiles, tuple(parts[i : i + MOST] if tiles.kernel == "triton" else parts))
        for tiles, parts in found.items()
        for i in range(0, len(parts), MOST if tiles.kernel == "triton" else len(parts))
    ]


def cost_of(
    parts: Sequence[Part] | None, own: Sequence[tuple[int, int, int]], G: int, rows: Arrays, weights: Arrays
) -> dict[str, int]:
    """`flops`, and with parts `bytes_accessed`, of a launch, as its keyword arguments.

    How many rows each modality has is known on the device only. Modalities of several launches share the rows as they
    share the runs, so that launches of one product count each row once. Inside a launch every row counts as one of the
    largest weights.

    Args:
      own: shapes of the launch's own weights.
      G: number of all groups.
      rows: the arrays of M rows: lhs, and the result or dout.
      weights: the launch's own, or their gradients.
    """
    M, largest = rows[0].shape[0], max(K * N for _, K, N in own)
    if parts is None:
        return {"flops": 2 * M * largest}
    runs = sum(part.runs[1] - part.runs[0] for part in parts)
    return {
        "flops": 2 * M * largest * runs // (G + 2),
        "bytes_accessed": bytes_of(*rows) * runs // (G + 2) + bytes_of(*weights),
    }


def make_plans(
    problems: Sequence[Problem],
    device: Device,
    rows: Iterable[dict] = (),
    *,
    backend: str = "auto",
    plan: Plan | Sequence[Plan] | None = None,
) -> tuple[Plan, ...]:
    """Each modality's plan: `make_plan`'s, with tiles of one size made equal, so that their modalities share a launch.

    Args:
      problems: of each modality. Its number of rows is known on the device only: plan for an equal share of all.
      plan: one for all modalities, or one for each; passes with explicit tiles are used as they are.

    Raises:
      ValueError: another number of plans than modalities, plans of different backends; and as `make_plan`.
      TypeError, NotImplementedError: as `make_plan`.
    """
    count, rows = len(problems), tuple(rows)
    if count > 1:  # a launch of several modalities has no room for parts of sums
        problems = [dataclasses.replace(problem, whole_sums=True) for problem in problems]
    given: Any = list(plan) if isinstance(plan, (tuple, list)) else [plan] * count
    if len(given) != count:
        raise ValueError(
            f"plan has {len(given)} plans; rhs has {count} modalities: write one Plan for each, or one for all."
        )
    backends = {PLANNER.choose(problem, device, backend, one)[1] for problem, one in zip(problems, given, strict=True)}
    if plan is not None and len(backends) > 1:
        raise ValueError(f"plan has the backends {', '.join(sorted(backends))}: all modalities need the same one.")
    chosen: Any = (
        backends.pop() if len(backends) == 1 else "pallas"
    )  # one modality that Triton's kernel cannot multiply
    plans = [  # the backend as it was asked for: only "auto" leaves tiny groups to the Pallas kernel
        make_plan(problem, device, rows, backend=backend, plan=one or Plan(chosen))
        for problem, one in zip(problems, given, strict=True)
    ]
    if chosen == "xla" or count == 1:
        return tuple(plans)
    by_size = sorted(range(count), key=lambda i: -problems[i].K * problems[i].N)
    for name in PASSES:
        shared: dict[tuple, Tiles] = {}
        for i in by_size:
            own = getattr(plans[i], name)
            explicit = given[i] is not None and getattr(given[i], name) is not None
            if not explicit:  # as the largest weights have them
                size = own.kernel, own.bm, own.bn, own.bk, own.warps, own.ping_pong
                plans[i] = dataclasses.replace(plans[i], **{name: shared.setdefault(size, own)})
    return tuple(plans)
