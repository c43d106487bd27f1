"""The Hopper kernel: compiled for an H200 without one, chosen by plans, and the op with it in the simulator."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.ops import grouped_matmul
from jaxops.ops.linear_cross_entropy import Plan, Problem, make_plan
from jaxops.ops.linear_cross_entropy.gradients_triton import WORDS, gradients_triton
from jaxops.ops.linear_cross_entropy.logits_triton import logits_triton
from tests.arrays import put, shape
from tests.compare import assert_close
from tests.gluon import SHARED_BYTES, check, compiled, launched
from tests.gluon_simulator import simulated
from tests.hopper import H200 as ABSTRACT
from tests.hopper import on_h200
from tests.ops.linear_cross_entropy.test_values import HALF, cotangents_of, expected, found, operands

pytestmark = pytest.mark.versions

T, D, V = 1000, 528, 784  # no whole tiles; the kernel does not depend on them
H200 = Device("NVIDIA H200", "gpu")


def tiles_of(bm: int, bn: int, stages: int) -> grouped_matmul.Tiles:
    return grouped_matmul.Tiles(bm, bn, 64, 8, stages, kernel="triton", ping_pong=bm == bn == 128)


@pytest.mark.parametrize(
    ("tiles", "options", "spilled"),
    # Spills are of the epilogue: a whole tile's logits beside its products.
    [
        (tiles_of(256, 256, 4), {}, 0),
        (tiles_of(256, 256, 4), {"soft_cap": 30.0, "total": True}, 0),
        (tiles_of(128, 256, 3), {}, 0),
        (tiles_of(128, 128, 5), {"transpose_w": True}, 0),
    ],
)
def test_kernel(tiles, options, spilled, tmp_path):
    options = {"transpose_w": False, "soft_cap": None, "total": False} | options
    w = shape(V, D) if options["transpose_w"] else shape(D, V)
    bias = (shape(V),) if options["total"] else ()
    call = lambda x, w, *bias: logits_triton(x, w, *(bias or (None,)), **options, tiles=tiles, cores=132)
    (kernel,) = compiled(call, shape(T, D), w, *bias)
    instructions = [f"m64n{tiles.bn}k16.f32.bf16.bf16"] * (2 * 4 * tiles.part // tiles.programs // 64)
    check(kernel, instructions, 2, SHARED_BYTES, tmp_path, spilled, programs=tiles.programs)


def test_one_device_of_several():
    """Outside of `jax.shard_map` XLA may split any call; a program of one device is traced so, too."""
    loss = lambda x, w, targets: jaxops.linear_cross_entropy(x, w, targets, backend="triton")
    with on_h200(2):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(shape(T, D), shape(D, V), shape(T, dtype="int32"))
    assert "triton_kernel_call" in str(jaxpr)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_gradients_are_read_and_written_16_bytes_at_a_time(soft_cap):
    bias = (shape(V),) if soft_cap else ()
    call = lambda products, targets, numbers, *bias: gradients_triton(
        products, *(bias or (None,)), targets, numbers, soft_cap=soft_cap
    )
    (kernel,) = compiled(call, shape(T, V), shape(T, dtype="int32"), shape(5, T, dtype="float32"), *bias)
    loads, stores = (re.findall(rf"{name}\.global\S*v4\.b32", kernel.ptx) for name in ("ld", "st"))
    assert (len(loads), len(stores)) == (4 * (1 + len(bias)), 4), kernel.ptx


@pytest.mark.parametrize("w", [(D, V), (V, D)])
def test_a_users_call(w):
    """Three kernels of ours a chunk; "auto" takes them on an H200."""

    def gradients(x, w, targets):
        loss = lambda x, w: jaxops.linear_cross_entropy(x, w, targets, transpose_w=w.shape[0] == V)
        return jax.value_and_grad(loss, (0, 1))(x, w)

    found = launched(gradients, shape(T, D), shape(*w), shape(T, dtype="int32"))
    assert found == ["linear_cross_entropy", "logit_gradients", "grouped_matmul_wgrad"]


@pytest.mark.parametrize("split", ["words", "rows"])
def test_shard_map_checks_varying_axes(split):
    """check_vma=True: results vary over the axes of the operands."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=ABSTRACT)
    words = split == "words"

    def shard(x, w, targets):
        how = {"axis_name": "d" if words else None, "reduction": "sum", "backend": "triton"}
        loss, gradients = jax.value_and_grad(
            lambda *given: jaxops.linear_cross_entropy(*given, targets, **how), (0, 1)
        )(x, w)
        return loss if words else jax.lax.psum(loss, "d"), gradients

    given, specs = (shape(256, 64), shape(64, 272), shape(256, dtype="int32")), (P("d"), P(), P("d"))
    specs = (P(), P(None, "d"), P()) if words else specs
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:2]))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(*given))
    assert "psum" in text
    assert "name=linear_cross_entropy\n" in text


def test_plan():
    problem = Problem(8192, 2048, 131_072, "bfloat16", "bfloat16")
    plan = make_plan(problem, H200)
    assert (plan.backend, plan.rows, plan.products.fwd.kernel) == ("triton", 2816, "triton")
    assert make_plan(problem, H200, plan=Plan("triton", rows=512)).rows == 512
    few = make_plan(Problem(3, 64, 72, "bfloat16", "bfloat16"), H200)
    assert few.products.fwd.kernel == "triton"
    for other in ((0, 64, 72), (5, 60, 72), (5, 64, 71)):
        assert make_plan(Problem(*other, "bfloat16", "bfloat16"), H200).backend == "xla"


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (Problem(8, 64, 72, "bfloat16", "bfloat16"), Device("NVIDIA L4", "gpu"), "needs a Hopper GPU.*NVIDIA L4"),
        (Problem(8, 64, 72, "float32", "float32"), H200, "this is float32"),
        (Problem(8, 64, 71, "bfloat16", "bfloat16"), H200, "N=71"),
        (Problem(8, 64, 72, "bfloat16", "float32"), H200, "logits_dtype is float32"),
    ],
)
def test_what_it_cannot(problem, device, says):
    assert make_plan(problem, device).backend == "xla"
    with pytest.raises(NotImplementedError, match=says):
        make_plan(problem, device, backend="triton")


CASES = [
    (67, 40, 136, "mean", {}),
    (150, 72, 264, "sum", {"label_smoothing": 0.1, "z_loss": 0.01, "soft_cap": 2.0, "transpose_w": True}),
    (67, 40, 136, "none", {"label_smoothing": 0.2, "z_loss": 0.1}),
    (1, 8, 8, "sum", {}),
]


@pytest.mark.parametrize(("T", "D", "V", "reduction", "options"), CASES)
def test_values(T, D, V, reduction, options):
    """In chunks of 64 rows. What the row of a target that does not count holds reaches nothing."""
    a, cotangents = operands(T, D, V, seed=T, transpose_w="transpose_w" in options), cotangents_of(T, reduction)
    a |= {name: np.asarray(put(a[name], "bfloat16"), np.float64) for name in ("x", "w", "bias")}
    want = expected(a, reduction, cotangents, **options)
    a["x"][a["targets"] == -100] = np.nan
    with simulated(T):
        got = jax.tree.map(np.asarray, found(a, reduction, cotangents, HALF, backend="triton", chunk=64, **options))
    for index, (g, w) in enumerate(zip(got[0], want[0], strict=True)):
        assert_close(g, np.asarray(w), "bfloat16", f"result {index}")
    for name, g in got[1].items():
        assert_close(g, want[1][name], "bfloat16", name)


def test_gradients_of_rows_of_several_programs():
    rng = np.random.default_rng(0)
    T, V = 3, WORDS + 8
    products = np.asarray(put(rng.normal(size=(T, V)), "bfloat16"), np.float32)
    numbers = np.stack([*rng.normal(size=(4, T)), np.array([1, 0, 1])]).astype(np.float32)
    log_sum, of_sum, of_target, of_words, counts = numbers[:, :, None]
    targets = np.array([V - 1, 5, WORDS - 1], np.int32)
    want = of_sum * np.exp(products - log_sum) - of_words
    want[range(T), targets] -= of_target[:, 0]
    with simulated(1):
        from jaxops.ops.linear_cross_entropy.gradients_triton import gradients_triton  # the simulated one

        call = jax.jit(lambda products, *rows: gradients_triton(products, None, *rows, soft_cap=None))
        got = np.asarray(call(put(products, "bfloat16"), put(targets), put(numbers)))
    assert_close(got, want * counts, "bfloat16")


def test_two_calls_have_the_same_bits():
    a = operands(150, 72, 264)
    given = [put(a[name], "bfloat16") for name in ("x", "w")]
    loss = lambda x, w: jaxops.linear_cross_entropy(x, w, put(a["targets"]), backend="triton")
    with simulated(1):
        one = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1)))(*given))
    with simulated(2):
        other = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1)))(*given))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.tobytes() == y.tobytes()


def test_large_logits():
    """Logits of 1e4: sums are of the rounded logits, of which the gradients are made."""
    a = operands(40, 16, 136)
    a |= {name: np.asarray(put(a[name] * scale, "bfloat16"), np.float64) for name, scale in (("x", 1), ("w", 1e4))}
    a["bias"][:] = 0
    with simulated(1):
        loss = jax.jit(lambda x, w: jaxops.linear_cross_entropy(x, w, put(a["targets"]), backend="triton"))
        got = float(loss(put(a["x"], "bfloat16"), put(a["w"], "bfloat16")))
    want = jaxops.linear_cross_entropy(
        put(a["x"], "bfloat16"), put(a["w"], "bfloat16"), put(a["targets"]), backend="xla"
    )
    np.testing.assert_allclose(got, float(want), 1e-6)
