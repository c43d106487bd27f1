"""The epilogue of docs/extending.md, as it stands there: its values, on a Hopper GPU or in the simulator, and what the
compiler makes of it."""

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arrays import put
from tests.ops.hopper_cases import gradient, inside_of, offsets_of, product, spoiled, whole

pytestmark = pytest.mark.versions

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending.md"
M, K, N, G = 435, 136, 264, 5


def example(folder: pathlib.Path):
    """The page's first block as a module, on the modules of the kernels that are imported now."""
    file = folder / "scaled_matmul_triton.py"
    file.write_text(re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0], "utf-8")
    spec = importlib.util.spec_from_file_location("scaled_matmul_triton", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_compiled(tmp_path):
    pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    from tests.gluon import SHARED_BYTES, check, compiled

    shapes = [(M, K), (G, K, N), (G,), (M, N), (G + 1,)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32]
    (kernel,) = compiled(example(tmp_path).scaled_matmul, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert kernel.name == "scaled_kernel"
    check(kernel, ["m64n256k16.f32.bf16.bf16"] * 8, 2, SHARED_BYTES, tmp_path)
