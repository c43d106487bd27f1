"""Annotations of jaxops' functions are true: beartype checks every call while each op and layer is traced.

In a process of its own: the import hook must come before jaxops, and its errors would come before the ops' own.
"""

import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

TRACE_ALL = """
import tests.house.test_annotations
from jaxtyping import install_import_hook

install_import_hook("jaxops", "tests.house.test_annotations.check")
import functools
import jax
import tests.conftest
from tests.contracts.run import EVERYTHING, cases, cotangents_of, everything, parts, small

for name, way in (case.values for case in cases(("xla", "interpret"))):
    op = EVERYTHING[name]
    jax.eval_shape(functools.partial(everything, op, way), *parts(op, small(op)), cotangents_of(op))
"""


def check(function: Callable) -> Callable:
    """JAX builds pytrees with leaves of any type: their constructors are not checked."""
    from beartype import beartype

    return function if function.__name__ == "__init__" else beartype(function)


def test_annotations():
    pytest.importorskip("beartype")
    pytest.importorskip("jaxtyping")
    root = pathlib.Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", TRACE_ALL], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
