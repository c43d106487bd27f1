"""Why a call runs as it does: each backend, tile and rule of its plans, with its source."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxops._lib.planning.device import Device
from jaxops._lib.planning.recorded import Decision, Source
from jaxops._lib.planning.tuned import read_rows, tuned_rows


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of a plan.

    Attributes:
      op: whose plan; of a plan inside another one with its path, as "moe_mlp.unit.products".
      problem: what the plan is for, a `Problem` of the op.
      name: "backend", a pass, or another field of the plan.
      value: what was chosen: a backend's name, `Tiles`, ...
      source: "explicit" (backend= or plan=), "tuned" (a row), "heuristic", or "auto" (a backend).
      why: the same in words, with the row's key, and whether it is yours or the package's.
    """

    op: str
    problem: Any
    name: str
    value: Any
    source: str
    why: str


def plan_of(decisions: Sequence[Decision]) -> Any:
    """What a call with these decisions was given by make_plan: one plan, or a tuple of one a modality."""
    if not decisions:
        return None
    plans = tuple(each.plan for each in kept(decisions) if each.op == decisions[0].op)
    return plans[0] if len(plans) == 1 else plans


def kept(decisions: Sequence[Decision]) -> list[Decision]:
    """Without those that repeat another one, and those of a whole plan, which an op hands on to its parts."""
    found: list[Decision] = []
    for each in decisions:
        seen = any((each.op, each.problem, each.plan) == (old.op, old.problem, old.plan) for old in found)
        if not found or not (seen or each.given == each.plan):
            found.append(each)
    return found


def choices_of(decisions: Sequence[Decision], device: Device, backend: str, plan: Any) -> tuple[Choice, ...]:
    """backend, plan: as the user passed them."""
    why = f"auto, on {device.kind}"
    source = "auto"
    if plan is not None:
        source, why = "explicit", "plan="
    elif backend != "auto":
        source, why = "explicit", f"backend={backend!r}"
    found: list[Choice] = []
    for each in kept(decisions):
        interpreted = each.plan.backend == "pallas" and each.plan.on.interpret
        text = why + (", in Pallas' interpreter" if interpreted else "")
        found.append(Choice(each.op, each.problem, "backend", each.plan.backend, source, text))
        found += _inside(each, each.op, device)
    return tuple(found)


def _inside(decision: Decision, path: str, device: Device) -> Iterator[Choice]:
    plan, given = decision.plan, decision.given
    parts = {id(part.plan): part for part in decision.parts}
    for field in dataclasses.fields(plan):
        value, where = getattr(plan, field.name), f"{path}.{field.name}"
        if field.name in ("backend", "device") or value is None:
            continue
        if (part := parts.get(id(value))) is not None:
            if part.plan.backend != plan.backend:
                rule = f"as {path} is {plan.backend!r}"
                yield Choice(where, part.problem, "backend", part.plan.backend, "heuristic", rule)
            yield from _inside(part, where, device)
        elif (source := decision.sources.get(field.name)) is not None:
            why = _why(source, decision, device)
            yield Choice(path, decision.problem, field.name, value, source.kind, why)
        else:
            explicit = getattr(given, field.name) not in (None, field.default)
            source, why = ("explicit", "plan=") if explicit else ("heuristic", "the op's rule")
            yield Choice(path, decision.problem, field.name, value, source, why)


def _why(source: Source, decision: Decision, device: Device) -> str:
    if source.kind == "explicit":
        return "plan="
    if source.row is None:
        return "heuristic" if source.key is None else f"heuristic: no tuned row has the key {source.key}"
    measured = "".join(f", {source.row[name]}{unit}" for name, unit in _FACTS.items() if name in source.row)
    return f"{_whose(source.row, decision.op, device)} tuned row {source.key}{measured}"


_FACTS = {"us": " us", "tflops": " TFLOP/s", "gbps": " GB/s", "date": ""}


def _whose(row: dict, op: str, device: Device) -> str:
    """Rows of the user's file, or of the folder that use_rows chose, come before those of the package."""
    rows, shipped = tuned_rows(op, device), read_rows((op,), device, "shipped")
    return "your" if row in rows[: len(rows) - len(shipped)] else "the package's"


def brief(value: Any) -> str:
    """In words: a dataclass without the fields that have their default values, a dtype by its name."""
    if isinstance(value, str):
        return value
    if isinstance(value, (type, np.dtype)):
        with contextlib.suppress(TypeError):
            return np.dtype(value).name
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = [field for field in dataclasses.fields(value) if field.repr]
    parts = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in fields
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(parts)})"
