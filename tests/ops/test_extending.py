"""The examples of docs/extending.md, as they stand there: the epilogue on a Hopper GPU or in the simulator, the FP8
recipe, the op."""

import importlib
import importlib.util
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import described, ops, tuning
from jaxops.ops.fp8_matmul import RECIPES, recipes
from tests import arrays
from tests.arrays import put
from tests.contracts import devices, entry, run, test_devices, test_sizes, test_transforms, test_x64
from tests.hopper import on_h200
from tests.ops.hopper_cases import H200, gradient, inside_of, offsets_of, product, spoiled, whole

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
M, K, N, G = 435, 136, 264, 5


def example(folder: pathlib.Path):
    """The page's first block as a module, on the modules of the kernels that are imported now."""
    file = folder / "scaled_matmul_triton.py"
    file.write_text(BLOCKS[0], "utf-8")
    spec = importlib.util.spec_from_file_location("scaled_matmul_triton", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.versions
@pytest.mark.hopper
def test_values(tmp_path):
    module, rng = example(tmp_path), np.random.default_rng(0)
    offsets = offsets_of(rng, M, G)
    lhs, residual, dout = spoiled(whole(rng, M, K), offsets), whole(rng, M, N), whole(rng, M, N, most=1)
    rhs, scale = whole(rng, G, K, N, most=1), np.array([1, 2, -1, 0.5, 3], np.float32)
    out, vjp = jax.vjp(
        lambda *given: module.scaled_matmul(*given, put(offsets)), *map(put, (lhs, rhs, scale, residual))
    )
    dlhs, drhs, dscale, dresidual = vjp(put(dout))
    of_rows = np.repeat(np.r_[0, scale, 0], np.diff(np.r_[0, offsets, M]))[:, None]
    plain, unscaled = (
        product(lhs, rhs, offsets),
        gradient(np.where(inside_of(offsets, M)[:, None], lhs, 0), dout, offsets),
    )
    want = (
        (out, residual.astype(np.float32) + of_rows * plain),
        (dlhs, of_rows * product(dout, rhs.swapaxes(1, 2), offsets)),
        (drhs, scale[:, None, None] * unscaled),
        (dscale, np.sum(unscaled * rhs.astype(np.float32), axis=(1, 2))),
        (dresidual, dout),
    )
    for got, wanted in want:  # whole numbers: sums are exact
        np.testing.assert_array_equal(np.asarray(got), wanted.astype(got.dtype))


@pytest.mark.versions
def test_compiled(tmp_path):
    pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    from tests.gluon import SHARED_BYTES, check, compiled

    shapes = [(M, K), (G, K, N), (G,), (M, N), (G + 1,)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32]
    (kernel,) = compiled(example(tmp_path).scaled_matmul, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert kernel.name == "scaled_kernel"
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, SHARED_BYTES, tmp_path)


def test_recipe(monkeypatch):
    """Rowwise's forward, and the gradients of the product in bfloat16, to the bit."""
    (source,) = (block for block in BLOCKS if block.startswith("Recipe("))
    recipe = eval(source, dict(vars(recipes)))
    monkeypatch.setitem(RECIPES, recipe.name, recipe)
    rng = np.random.default_rng(0)
    x, w, dy = (put(rng.normal(size=shape), "bfloat16") for shape in ((40, 136), (136, 72), (40, 72)))
    y, vjp = jax.vjp(lambda x, w: jaxops.fp8_matmul(x, w, recipe=recipe.name), x, w)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jaxops.fp8_matmul(x, w, recipe="rowwise")))
    for got, want in zip(vjp(dy), jax.vjp(jnp.matmul, x, w)[1](dy), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


OP = "gated_rms_norm"


@pytest.fixture
def op(tmp_path, monkeypatch):
    """The page's op in a folder of its own, with its entry in the list of the contracts."""
    folder = tmp_path / OP
    folder.mkdir()
    for block in BLOCKS:
        if file := re.match(r"# (\w+\.py): ", block):
            (folder / file[1]).write_text(block, "utf-8")
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    caches = (described.descriptions, described.tunings)
    for cache in caches:
        cache.cache_clear()
    package, describe = (importlib.import_module(f"jaxops.ops.{OP}{part}") for part in ("", ".describe"))
    monkeypatch.setattr(jaxops, OP, package.gated_rms_norm, raising=False)
    (function,) = describe.DESCRIPTION.functions
    monkeypatch.setitem(entry.FUNCTIONS, OP, function)
    (source,) = (block for block in BLOCKS if block.startswith("described("))
    names = {"Plan": package.Plan, "Tiles": package.Tiles}
    monkeypatch.setitem(run.EVERYTHING, OP, eval(source, vars(arrays) | vars(entry) | names))
    yield package
    for name in [name for name in sys.modules if name.startswith(f"jaxops.ops.{OP}")]:
        del sys.modules[name]
    for cache in caches:
        cache.cache_clear()


def test_op(op):
    """Every rule of the contracts: JAX's transformations, sizes of 0 and 1, x64, devices."""
    for way in ("xla", "interpret"):
        test_transforms.test_in_one_program(OP, way)
        test_transforms.test_second_order(OP, way)
        test_sizes.test_sizes(OP, way)
        test_x64.test_dtypes(OP, way)
        test_x64.test_values(OP, way)
    test_transforms.test_the_kernels_axes(OP, "pallas_call")
    test_transforms.test_gradients_of_some_arguments(OP, "xla")
    (device_name,) = (name for name in devices.problems() if OP in name)
    test_devices.test_auto_takes_xla_where_the_kernels_do_not_run(device_name)
    test_devices.test_a_plan_of_another_op(OP)


def test_a_vectors_gradient_is_summed_in_float32(op):
    x, gate = jnp.ones((2000, 8), jnp.bfloat16), jnp.ones((1, 8), jnp.bfloat16)
    dgate = jax.grad(lambda gate: jnp.sum(op.gated_rms_norm(x, gate, put([0, 2000], "int32"))))(gate)
    np.testing.assert_allclose(np.asarray(dgate, np.float32), 2000, rtol=1e-2)


def test_the_tools_know_the_op(op):
    """What the tuner would measure, each lowered for an H200; and what an inspected call says."""
    problem = op.Problem(300, 136, 5, "bfloat16")
    name, tuned = tuning.op_of(problem)
    assert name == OP
    x, gate = tuned.tensors(problem)
    (sizes,) = tuned.splits(problem)
    offsets = put(np.concatenate([[0], np.cumsum(np.asarray(sizes))]), "int32")
    for tiles in tuning.candidates(problem, "fwd", "pallas", H200):
        with on_h200():
            traced = jax.jit(lambda *given, tiles=tiles: tuned.run("fwd", problem, op.Plan(fwd=tiles), *given))
            text = traced.trace(*jax.tree.map(jax.typeof, (x, gate, offsets))).lower(lowering_platforms=("cuda",))
        assert f"{OP}_fwd" in text.as_text()
    errors = {error.name: error.max for error in jaxops.inspect(op.gated_rms_norm, x, gate, offsets).errors}
    assert errors.keys() == {"result", "gradient of x", "gradient of gate"}
    assert max(errors.values()) < 0.05
