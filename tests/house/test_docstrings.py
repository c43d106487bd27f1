"""Every docstring's examples run, and every public name has one."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import jaxops
import jaxops.nn

MODULES = ["jaxops", *(module.name for module in pkgutil.walk_packages(jaxops.__path__, "jaxops."))]
PUBLIC = {name: getattr(package, name) for package in (jaxops, jaxops.nn) for name in package.__all__}
PYTREES = {name: public for name, public in PUBLIC.items() if dataclasses.is_dataclass(public)}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    if name.endswith("_triton"):
        pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    module = importlib.import_module(name)
    assert module.__doc__, "a module says what it is for"
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(PYTREES)))
def test_public_names_are_documented(name):
    public = PUBLIC[name]
    texts = (
        [public, public.__call__] if inspect.isclass(public) else [public]
    )  # a layer says what its call takes and returns
    text = "\n".join(inspect.getdoc(x) for x in texts)
    for part in (">>> ", "Args:", "Returns:", "Raises:"):
        assert part in text, f"{name} has no {part!r}"
    arguments = set(inspect.signature(public.__init__ if inspect.isclass(public) else public).parameters) - {"self"}
    for argument in sorted(arguments):
        assert re.search(rf"^ *(\w+, )*{argument}(, \w+)*: ", text, re.MULTILINE), f"{name} does not explain {argument}"


@pytest.mark.parametrize("name", PYTREES)
def test_public_pytrees_are_documented(name):
    text = inspect.getdoc(PYTREES[name])
    assert "Attributes:" in text
    for field in dataclasses.fields(PYTREES[name]):
        assert re.search(rf"^ *(\w+, )*{field.name}(, \w+)*: ", text, re.MULTILINE), (
            f"{name} does not explain {field.name}"
        )
