"""Limits that keep files and functions readable: lines of a file, arguments of a function, names of files."""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxops", "models", "benchmarks", "tests")
LINES = 500
ARGUMENTS = 10
# A layer's constructor takes what flax.nnx.Linear's takes; a public op may have more keyword-only options. Not counted:
# rngs, which each layer has.
PUBLIC_ARGUMENTS = 17
SAYS_NOTHING = {"utils", "util", "common", "base", "misc", "helpers", "helper"}


def long_signatures(path: pathlib.Path, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        # Gluon has no closures and takes no structures: a kernel's parts pass all that they share.
        if any(ast.unparse(decorator).startswith("gluon.jit") for decorator in node.decorator_list):
            continue
        every = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        arguments = [name for name in every if name not in ("self", "cls", "rngs")]
        is_layer = node.name == "__init__" and path.is_relative_to("jaxops/nn")
        is_op = path.match("jaxops/ops/*/api.py") and not node.name.startswith("_")
        allowed = PUBLIC_ARGUMENTS if is_layer or is_op else ARGUMENTS
        if len(arguments) > allowed or len(arguments) - len(node.args.kwonlyargs) > ARGUMENTS:
            yield f"{path}:{node.lineno} {node.name} has {len(arguments)} arguments"


def test_limits():
    broken = []
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        path, source = file.relative_to(ROOT), file.read_text()
        if (lines := len(source.splitlines())) > LINES:
            broken.append(f"{path} has {lines} lines")
        if SAYS_NOTHING & {file.stem.strip("_"), *path.parts}:
            broken.append(f"{path}: the name says nothing")
        broken += long_signatures(path, source)
    assert not broken, "\n".join(broken)
