"""Imports go one way: benchmarks -> models -> jaxops.nn -> jaxops.parallel -> jaxops.ops.<op> -> jaxops._lib."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import jaxops

pytestmark = pytest.mark.versions

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(file for folder in ("jaxops", "models", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
OURS = ("jaxops", "models", "benchmarks", "tests")
PUBLIC = {"jaxops", "jaxops.nn", "jaxops.parallel", "jaxops.tuning", "jaxops.profiling", "jaxops.offload"}


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str) -> set[str]:
    """Whole names of the modules that a source imports, anywhere in it; both names of a foreign `from x import y`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            package = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (package / alias.name).is_dir() or (package / f"{alias.name}.py").is_file()
                found |= {whole} if is_module else {node.module} if inside(node.module, *OURS) else {node.module, whole}
    return found


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_public_op(name: str) -> bool:
    return name.startswith("jaxops.ops.") and name.count(".") == 2


def may_import(module: str, name: str) -> bool:
    """Whether the arrow from `module` to `name`, both our own, is allowed."""
    if inside(module, "benchmarks"):
        return not inside(name, "tests")
    if inside(module, "models"):
        return name in PUBLIC or inside(name, "models")
    if inside(name, "models", "benchmarks", "tests"):
        return False
    if inside(module, "jaxops._lib"):
        return inside(name, "jaxops._lib")
    if inside(module, "jaxops.ops"):
        own = ".".join(module.split(".")[:3])
        return inside(name, own, "jaxops._lib") or is_public_op(name)
    if inside(module, "jaxops.nn"):
        return inside(name, "jaxops.nn") or is_public_op(name) or name == "jaxops.parallel"
    if inside(module, "jaxops.parallel"):
        return inside(name, "jaxops.parallel", "jaxops._lib") or is_public_op(name)
    if module == "jaxops":
        return is_public_op(name) or name in (
            "jaxops.inspecting",
            "jaxops.lengths",
            "jaxops.parallel",
            "jaxops._lib.planning.jit_keys",
        )
    return not inside(name, "jaxops.nn")  # tuning, profiling, offload


def wrong_arrows(module: str, source: str) -> list[str]:
    return sorted(name for name in imports_of(source) if inside(name, *OURS) and not may_import(module, name))


def broken_rules(module: str, source: str) -> list[str]:
    """Imports that this module must not have."""
    imports = imports_of(source)
    broken = wrong_arrows(module, source)
    if inside(module, "jaxops") and not inside(module, "jaxops.nn"):
        broken += [name for name in imports if inside(name, "flax")]
    if inside(module, "jaxops.ops", "jaxops.parallel") and not module.endswith(("_pallas", "_mosaic")):
        broken += [name for name in imports if "pallas" in name and name.startswith("jax.")]
    if not module.endswith("_triton") and not inside(module, "benchmarks"):  # benchmarks import peers
        broken += [name for name in imports if inside(name, "triton", "jax_triton")]
    return broken


def test_arrows():
    found = {module_of(file): broken_rules(module_of(file), file.read_text()) for file in SOURCES}
    assert not {module: broken for module, broken in found.items() if broken}


def test_a_wrong_arrow_is_seen():
    for module, source in [
        ("models.train", "import jaxops._lib.planning.device"),
        ("jaxops.nn.grouped_linear", "from jaxops.ops.grouped_matmul.plan import Plan"),
        ("jaxops.ops.adaln.api", "def f():\n    from jaxops import nn"),
        ("jaxops.ops.adaln.api", "from jax.experimental import pallas"),
        ("jaxops.ops.adaln.api", "import triton"),
        ("jaxops.parallel", "import flax"),
        ("jaxops._lib.planning.device", "from jaxops.ops.grouped_matmul import Plan"),
    ]:
        assert broken_rules(module, source), (module, source)


IN_A_FRESH_PROCESS = """
import contextlib, importlib, pkgutil, sys
import jax, jaxops

loaded = lambda names: [name for name in names if name in sys.modules]
heavy = ["flax", "jax_triton", "triton", "typer", "optax"]
assert not loaded([*heavy, "jax.experimental.pallas.triton", "jaxops.ops"]), "import jaxops loads an op"
f = jax.jit(lambda x: jaxops.adaln(x, x[:1], x[:1]))
f(jax.numpy.ones((2, 8))), f(jax.numpy.ones((2, 8)))
assert f._cache_size() == 1, "an op that is imported inside a trace changes jit's cache key"
jax.eval_shape(jaxops.fp8_matmul, jax.numpy.ones((3, 4)), jax.numpy.ones((4, 5)))
assert not loaded(heavy), "a call on a CPU loads what only Hopper's kernels need"
from jaxops import *
assert all(globals()[name] is getattr(jaxops, name) for name in jaxops.__all__)
assert set(jaxops.__all__) <= set(dir(jaxops))
assert jaxops.nn.MoE.__name__ == "MoE"
assert not hasattr(jaxops, "nothing")
for module in pkgutil.walk_packages(jaxops.__path__, "jaxops."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ModuleNotFoundError):  # of Triton, for which Python is too old
            importlib.import_module(module.name)
f(jax.numpy.ones((2, 8)))
assert f._cache_size() == 1, "a module changes jit's cache key"
"""


def test_import_is_light_and_public_names_are_found():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_an_older_jax_is_one_clear_error():
    code = "import jax; jax.__version_info__, jax.__version__ = (0, 10, 1), '0.10.1'; import jaxops"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stderr.rstrip().endswith(
        "ImportError: jaxops needs JAX 0.10.2 or newer, this is 0.10.1: pip install 'jax>=0.10.2,<0.13'"
    )


def test_public_names_are_listed_once_for_people_and_once_for_python():
    """What type checkers see is what is imported."""
    tree = ast.parse((ROOT / "jaxops" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        node.module: tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == jaxops._MODULES
    assert sorted(name for names in seen.values() for name in names) == sorted(jaxops.__all__)


def test_what_needs_jax_triton_runs_with_a_second_interpreter():
    """The first one of .ci/run has no jax-triton: without the marker nothing would run these tests."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        source = file.read_text("utf-8")
        assert 'importorskip("jax_triton"' not in source or "pytest.mark.versions" in source, file
