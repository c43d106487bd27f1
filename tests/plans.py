"""Plans compared by what they choose."""

import dataclasses
import functools
from collections.abc import Callable

from jaxops._lib.planning.plans import BasePlan


def choices(plan):
    """The plan, and those in it, without the device that they were made for."""
    parts = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    inner = {name: choices(part) for name, part in parts.items() if isinstance(part, BasePlan)}
    return dataclasses.replace(plan, **inner, device=None)


def by_choices(make_plan: Callable) -> Callable:
    """`make_plan`, whose plans are equal where they choose the same, whatever the device."""
    return functools.wraps(make_plan)(lambda *args, **named: choices(make_plan(*args, **named)))
