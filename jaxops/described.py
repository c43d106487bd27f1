"""All ops, as their folders describe them: a new op is found by its describe.py."""

import functools
import importlib
import pkgutil

from jaxops import ops
from jaxops._lib.planning.description import Description, Function, Tuning


@functools.cache
def descriptions() -> dict[str, Description]:
    """The descriptions by the name of the op's folder."""
    folders = {module.name: f"jaxops.ops.{module.name}" for module in pkgutil.iter_modules(ops.__path__)}
    folders["parallel"] = "jaxops.parallel"
    return {name: importlib.import_module(f"{folder}.describe").DESCRIPTION for name, folder in folders.items()}


def functions() -> tuple[Function, ...]:
    """All public functions of all ops."""
    return tuple(function for each in descriptions().values() for function in each.functions)


@functools.cache
def tunings() -> dict[str, Tuning]:
    """How the ops with tuned rows are tuned, by the op's name."""
    return {name: each.tuning for name, each in descriptions().items() if each.tuning is not None}
