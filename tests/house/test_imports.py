"""Who may import whom: models -> jaxops.nn -> jaxops.parallel -> jaxops.ops.<op> -> jaxops._lib, read from the sources."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import jaxops

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(file for folder in ("jaxops", "models", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
PUBLIC = {"jaxops", "jaxops.nn", "jaxops.parallel", "jaxops.tuning", "jaxops.profiling", "jaxops.offload"}


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str) -> set[str]:
    """Whole names of all modules that a source imports, wherever in it; `from package import module` counts as that module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            package = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (package / alias.name).is_dir() or (package / f"{alias.name}.py").is_file()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
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
        return is_public_op(name) or name in ("jaxops.lengths", "jaxops.parallel")
    return not inside(name, "jaxops.nn")  # tuning, profiling, offload


def wrong_arrows(module: str, source: str) -> list[str]:
    return sorted(
        name
        for name in imports_of(source)
        if inside(name, "jaxops", "models", "benchmarks", "tests") and not may_import(module, name)
    )


@pytest.mark.parametrize("file", SOURCES, ids=module_of)
def test_arrows(file):
    module, source = module_of(file), file.read_text()
    imports = imports_of(source)
    assert wrong_arrows(module, source) == []
    if inside(module, "jaxops") and not inside(module, "jaxops.nn"):
        assert not [name for name in imports if inside(name, "flax")], "only jaxops.nn imports flax"
    if inside(module, "jaxops.ops") and not module.endswith(("_pallas", "_mosaic")):
        assert not [name for name in imports if "pallas" in name and name.startswith("jax.")], (
            "only a kernel's own file knows Pallas"
        )
    if not module.endswith("_triton"):
        allowed = inside(module, "benchmarks")  # peers and their versions
        assert allowed or not [name for name in imports if inside(name, "triton", "jax_triton")], (
            "only a kernel's own file knows jax-triton"
        )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models.train", "from jaxops.ops.grouped_matmul import make_plan"),
        ("models.train", "import jaxops._lib.device"),
        ("jaxops.nn.grouped_linear", "from jaxops._lib import checks"),
        ("jaxops.nn.grouped_linear", "from jaxops.ops.grouped_matmul.plan import Plan"),
        ("jaxops.ops.adaln.api", "from jaxops.ops.grouped_matmul import plan"),
        ("jaxops.ops.adaln.api", "import jaxops.tuning"),
        ("jaxops.ops.adaln.api", "def f():\n    from jaxops import nn"),
        ("jaxops._lib.device", "from jaxops.ops.grouped_matmul import Plan"),
        ("jaxops.tuning", "from jaxops.nn import GroupedLinear"),
        ("jaxops.profiling", "import benchmarks.harness"),
    ],
)
def test_a_wrong_arrow_is_seen(module, source):
    assert wrong_arrows(module, source)


@pytest.mark.parametrize(
    "call",
    ["pass", "jax.eval_shape(jaxops.fp8_matmul, jax.numpy.ones((3, 4)), jax.numpy.ones((4, 5)))"],
    ids=["import", "fp8-on-a-cpu"],
)
def test_import_jaxops_is_light(call):
    """Triton and jax-triton are loaded where a Hopper kernel is called, and only there; an op and Pallas where the op is first used."""
    heavy = [
        "flax",
        "jax_triton",
        "triton",
        "typer",
        "optax",
        *(["jax.experimental.pallas", "jaxops.ops"] if call == "pass" else []),
    ]
    assert printed(f"import sys, jax, jaxops; {call}; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_public_names_are_found():
    """In a fresh process, by each way to ask for them; one that is not there is an AttributeError."""
    code = "import jaxops; from jaxops import *; print(sorted(n for n in jaxops.__all__ if globals()[n] is not getattr(jaxops, n)), "
    code += "set(jaxops.__all__) <= set(dir(jaxops)), jaxops.nn.MoE.__name__, hasattr(jaxops, 'nothing'))"
    assert printed(code) == "[] True MoE False"


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


def printed(code: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
