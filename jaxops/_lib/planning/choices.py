"""Why a plan is as it is: who chose its backend, its tiles and its other fields."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxops._lib.planning.device import Device
from jaxops._lib.planning.recorded import Decision, Source
from jaxops._lib.planning.tuned import read_rows, tuned_rows


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of a plan.

    Attributes:
      op: whose plan; of a plan inside another one with its path, as "moe_mlp.unit.products".
      name: "backend", a pass, or another field of the plan.
      value: what was chosen: a backend's name, `Tiles`, ...
      source: "explicit" (backend= or plan=), "tuned" (a row), "heuristic", or "auto" (a backend).
      why: the same in words, with the row's key, and whether it is yours or the package's.
    """

    op: str
    name: str
    value: Any
    source: str
    why: str


def distinct(decisions: Sequence[Decision]) -> list[Decision]:
    """Without those that repeat another one, and those of a whole plan, which an op hands on to its parts."""
    kept: list[Decision] = []
    for each in decisions:
        seen = any((each.op, each.problem, each.plan) == (old.op, old.problem, old.plan) for old in kept)
        if not kept or not (seen or each.given == each.plan):
            kept.append(each)
    return kept


def choices_of(decisions: Sequence[Decision], device: Device, backend: str, plan: Any) -> Iterator[Choice]:
    """The choices of `distinct` decisions. backend, plan: as the user passed them."""
    source, why = "auto", f"auto, on {device.kind}"
    if plan is not None:
        source, why = "explicit", "plan="
    elif backend != "auto":
        source, why = "explicit", f"backend={backend!r}"
    for each in decisions:
        interpreted = each.plan.backend == "pallas" and each.plan.on.interpret
        words = why + (", in Pallas' interpreter" if interpreted else "")
        yield Choice(each.op, "backend", each.plan.backend, source, words)
        yield from _inside(each, each.op, device)


def _inside(decision: Decision, path: str, device: Device) -> Iterator[Choice]:
    plan, parts = decision.plan, {id(part.plan): part for part in decision.parts}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name in ("backend", "device") or value is None:
            continue
        if (part := parts.get(id(value))) is not None:
            where = f"{path}.{field.name}"
            if part.plan.backend != plan.backend:
                yield Choice(where, "backend", part.plan.backend, "heuristic", f"as {path} is {plan.backend!r}")
            yield from _inside(part, where, device)
        elif (source := decision.sources.get(field.name)) is not None:
            yield Choice(path, field.name, value, source.kind, _why(source, decision.op, device))
        elif getattr(decision.given, field.name) not in (None, field.default):
            yield Choice(path, field.name, value, "explicit", "plan=")
        else:
            yield Choice(path, field.name, value, "heuristic", "the op's rule")


_MEASURED = {"us": " us", "tflops": " TFLOP/s", "gbps": " GB/s", "date": ""}


def _why(source: Source, op: str, device: Device) -> str:
    if source.kind == "explicit":
        return "plan="
    if source.row is None:
        return "heuristic" if source.key is None else f"heuristic: no tuned row has the key {source.key}"
    measured = "".join(f", {source.row[name]}{unit}" for name, unit in _MEASURED.items() if name in source.row)
    # Rows of the user's file, or of the folder that use_rows chose, come before those of the package.
    rows, shipped = tuned_rows(op, device), read_rows((op,), device, "shipped")
    whose = "your" if source.row in rows[: len(rows) - len(shipped)] else "the package's"
    return f"{whose} tuned row {source.key}{measured}"
