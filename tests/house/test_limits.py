"""What keeps files and functions readable: sizes, numbers of arguments, names."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(file for folder in ("jaxops", "models", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py"))
LINES = 420
ARGUMENTS = 10
PUBLIC_ARGUMENTS = (
    15  # a layer's constructor takes what flax.nnx.Linear's takes; a public op may have more options, keyword-only ones
)
SAYS_NOTHING = {"utils", "util", "common", "base", "misc", "helpers", "helper"}


def name_of(file: pathlib.Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_limits(file):
    source = file.read_text()
    assert len(source.splitlines()) <= LINES
    assert not SAYS_NOTHING & {file.stem.strip("_"), *file.relative_to(ROOT).parts}
    for node in ast.walk(ast.parse(source)):
        # Gluon has no closures and takes no structures: what a kernel's parts share, they pass on.
        if isinstance(node, ast.FunctionDef) and not any(
            ast.unparse(decorator) == "gluon.jit" for decorator in node.decorator_list
        ):
            arguments = [
                a.arg
                for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if a.arg not in ("self", "cls")
            ]
            is_layer = node.name == "__init__" and name_of(file).startswith("jaxops/nn/")
            is_op = file.match("jaxops/ops/*/api.py") and not node.name.startswith("_")
            named = f"{node.name}, line {node.lineno}: {arguments}"
            assert len(arguments) <= (PUBLIC_ARGUMENTS if is_layer or is_op else ARGUMENTS), named
            assert len(arguments) - len(node.args.kwonlyargs) <= ARGUMENTS, named
