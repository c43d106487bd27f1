"""Each modality's plan: grouped_matmul's, so that modalities can share a launch."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxops._lib.planning.device import Device
from jaxops.ops.grouped_matmul import PASSES, PLANNER, Plan, Problem, Tiles, make_plan


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
