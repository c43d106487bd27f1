"""The examples in docstrings run, and the docstring of each public name explains its arguments."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator

import jaxops
import jaxops.nn

MODULES = ["jaxops", *(module.name for module in pkgutil.walk_packages(jaxops.__path__, "jaxops."))]
PUBLIC = {name: getattr(package, name) for package in (jaxops, jaxops.nn) for name in package.__all__}


def test_examples():
    failed = []
    for name in MODULES:
        if name.endswith("_triton") and sys.version_info < (3, 12):
            continue  # jax-triton needs Python >= 3.12
        module = importlib.import_module(name)
        if not module.__doc__ or doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed:
            failed.append(name)
    assert not failed, "an example fails (printed above), or the module has no docstring"


def unexplained(text: str, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if not re.search(rf"^ *(\w+, )*{name}(, \w+)*: ", text, re.MULTILINE))


def gaps(public) -> list[str]:
    """Sections, arguments and fields that the docstring lacks; for a layer, those of its class and of `__call__`."""
    if dataclasses.is_dataclass(public):
        text = inspect.getdoc(public) or ""
        return [*unexplained(text, (field.name for field in dataclasses.fields(public)))]
    is_class = inspect.isclass(public)
    text = "\n".join(inspect.getdoc(x) or "" for x in ([public, public.__call__] if is_class else [public]))
    sections = [part for part in (">>> ", "Args:", "Returns:", "Raises:") if part not in text]
    signature = inspect.signature(public.__init__ if is_class else public)
    return [*sections, *unexplained(text, sorted(set(signature.parameters) - {"self"}))]


def test_public_names_are_documented():
    assert not {name: found for name, public in PUBLIC.items() if (found := gaps(public))}
