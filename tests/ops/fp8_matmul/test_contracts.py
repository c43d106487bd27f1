"""The contracts of every op: transformations, determinism, what is cast and kept, no host work, no recompilation."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from tests.compare import assert_close
from tests.hopper import H200
from tests.jaxprs import equations
from tests.ops.fp8_matmul.cases import FEW, Case, apply, kind_of, make_case, options_of, reference

DENSE = make_case(21, 32, 48)
GROUPS = make_case(40, 32, 48, sizes=(9, 0, 21, 2), before=3)


def results(run, recipe, case, x, w, dy):
    y, vjp = jax.vjp(lambda x, w: apply(case, x, w, recipe, run), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize(
    ("run", "name"), [("xla", "dense"), *(pytest.param(run, name, marks=pytest.mark.gpu) for run in ("gpu", "triton") for name in ("dense", "groups"))]
)
def test_vmap(run, name):
    """Each example is quantised by itself, and its weight gradient is its own."""
    case = {"dense": DENSE, "groups": GROUPS}[name]
    xs, dys = (jnp.asarray(np.stack([v, 30 * v, np.float32(0.2) * v[:, ::-1]])) for v in (np.asarray(case.x), np.asarray(case.dy)))
    f = functools.partial(results, run, "tensorwise", case)  # with one scale a tensor a batch that is taken as a whole shows
    got = [np.asarray(g) for g in jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(xs, case.w, dys)]
    for i in range(3):
        want = reference(dataclasses.replace(case, x=xs[i], dy=dys[i]), "tensorwise")
        for g, w in zip(got, want, strict=True):
            assert_close(g[i], w, **kind_of(run, "float32"))


def test_vmap_of_interpreted_kernels():
    """Both operands of the ragged kernel, and the offsets: the forward alone, which takes seconds to compile."""
    others = [GROUPS, make_case(40, 32, 48, sizes=(0, 31, 0, 1), before=7, seed=1)]
    arrays = [np.stack(values) for values in zip(*((case.x, case.w, case.offsets) for case in others), strict=True)]
    got = jax.jit(jax.vmap(lambda x, w, offsets: jaxops.fp8_grouped_matmul(x, w, offsets, **options_of("interpret"))))(*arrays)
    for y, case in zip(got, others, strict=True):
        assert_close(y, reference(case, "blockwise")[0], "float32")


@pytest.mark.parametrize("run", FEW)
def test_vmap_over_weights(run):
    w = np.asarray(DENSE.w)
    ws = jnp.asarray(np.stack([w, 3 * w[::-1]]))
    f = functools.partial(results, run, "blockwise", DENSE)
    got = [np.asarray(g) for g in jax.jit(jax.vmap(f, in_axes=(None, 0, None)))(DENSE.x, ws, DENSE.dy)]
    for i in range(2):
        want = reference(dataclasses.replace(DENSE, w=ws[i]), "blockwise")
        for g, w in zip(got, want, strict=True):
            assert_close(g[i], w, **kind_of(run, "float32"))


@pytest.mark.parametrize("run", FEW)
def test_remat_and_scan(run):
    """A scan over layers with rematerialised bodies gives what the layers give one after another."""
    layers = 0.2 * jnp.stack([DENSE.w[:, :32], DENSE.w[:, 16:]])

    def loss(x, layers, scanned):
        body = lambda x, w: (jnp.tanh(jaxops.fp8_matmul(x, w, **options_of(run))), None)
        if scanned:
            return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, layers)[0] ** 2)
        return jnp.sum(body(body(x, layers[0])[0], layers[1])[0] ** 2)

    got, want = (jax.jit(jax.value_and_grad(functools.partial(loss, scanned=s), argnums=(0, 1)))(DENSE.x, layers) for s in (True, False))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(g, w, "float32", scale=10)


@pytest.mark.parametrize("run", FEW)
def test_microbatches_share_a_cast(run):
    """The loop of gradient accumulation: w is cast once outside the scan, each microbatch adds its gradient."""

    def step(x, w, dy):
        w8 = jaxops.quantize(w, scaling="block_128x128", layouts="both")

        def microbatch(total, x_dy):
            _, vjp = jax.vjp(lambda w: jaxops.fp8_matmul(x_dy[0], w, w_quantized=w8, **options_of(run)), w)
            return total + vjp(x_dy[1])[0], None

        return jax.lax.scan(microbatch, jnp.zeros_like(w), (x.reshape(3, 7, -1), dy.reshape(3, 7, -1)))[0]

    got = jax.jit(step)(DENSE.x, DENSE.w, DENSE.dy)
    parts = [Case(DENSE.x[i : i + 7], DENSE.w, DENSE.dy[i : i + 7]) for i in (0, 7, 14)]
    assert_close(got, sum(reference(part, "blockwise")[2] for part in parts), **kind_of(run, "float32"))


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu", "triton"])
def test_two_runs_give_the_same_bits(run):
    f = jax.jit(functools.partial(results, run, "blockwise", GROUPS))
    first, second = (f(GROUPS.x, GROUPS.w, GROUPS.dy) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


def casts(function, *args) -> list[tuple]:
    """Shapes of the FP8 arrays that a traced function has from a cast to FP8, in the order in which they come."""
    made = [equation.outvars[0].aval for equation in equations(jax.make_jaxpr(function)(*args).jaxpr) if equation.primitive.name == "convert_element_type"]
    return [aval.shape for aval in made if aval.dtype.itemsize == 1]


@pytest.mark.parametrize(
    ("argnums", "recipe", "count"),
    [(None, "blockwise", 2), (0, "blockwise", 4), (1, "blockwise", 4), ((0, 1), "blockwise", 6), ((0, 1), "blockwise_with_gw_hp", 4)],
)
def test_what_no_gradient_needs_is_not_cast(argnums, recipe, count):
    """x row and w col in the forward. For dx: w row, dy row. For dw: x col, dy col, or neither of them in half precision."""

    def loss(x, w):
        return jnp.sum(jaxops.fp8_matmul(x, w, recipe=recipe, backend="xla"))

    assert len(casts(loss if argnums is None else jax.grad(loss, argnums), DENSE.x, DENSE.w)) == count


def test_residuals(capsys):
    """Between forward and backward there are x's column layout and w's row layout: a byte a number and the scales."""
    s = jax.ShapeDtypeStruct
    print_saved_residuals(lambda x, w: jaxops.fp8_matmul(x, w, backend="xla"), s((256, 384), jnp.bfloat16), s((384, 512), jnp.float32))
    saved = re.findall(r"^(\w+)\[([\d,]*)\] (?!from the argument)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(saved) == sorted([("f8_e4m3fn", "384,256"), ("f32", "2,384"), ("f8_e4m3fn", "384,512"), ("f32", "3,4")])


def training_step(run):
    def step(w, x, dy, offsets):
        def loss(w):
            return jnp.sum(jaxops.fp8_grouped_matmul(x, w, offsets, **options_of(run)) * dy)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.01 * grad, value

    return jax.jit(step, donate_argnums=0)


CLEAN = tuple(jnp.asarray(np.nan_to_num(v)) for v in (GROUPS.x, GROUPS.dy))


@pytest.mark.parametrize("run", FEW)
def test_no_host_work_and_donation(run):
    """The compiled step calls nothing on the host and copies nothing to it, reuses the weights' buffer, and runs where transfers are refused."""
    step = training_step(run)
    text = step.lower(GROUPS.w, *CLEAN, GROUPS.offsets).compile().as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    assert "input_output_alias" in text
    w = jnp.array(GROUPS.w)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            before = w
            w, value = step(w, *CLEAN, GROUPS.offsets)
            assert before.is_deleted()
    assert np.isfinite(float(value))


@pytest.mark.parametrize("run", FEW)
def test_many_routings_compile_once(run):
    step, rng, w = training_step(run), np.random.default_rng(0), jnp.array(GROUPS.w)
    for _ in range(5):
        w, _ = step(w, *CLEAN, jnp.asarray(np.sort(rng.integers(0, 41, size=5)), jnp.int32))
    assert step._cache_size() == 1


@pytest.mark.parametrize("case", [DENSE, GROUPS], ids=["dense", "groups"])
def test_shard_map_over_weights(case):
    """Columns of the weights (or experts) over two devices: the tokens' gradient is summed over them by JAX's own transpose."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    x, dy = (jnp.asarray(np.nan_to_num(v)) for v in (case.x, case.dy))

    def dense(x, w):
        return jaxops.fp8_matmul(x, w, recipe="rowwise", backend="xla")

    def groups(x, w, offsets):
        mine = jax.lax.dynamic_slice_in_dim(offsets, jax.lax.axis_index("e") * 2, 3)
        return jax.lax.psum(jaxops.fp8_grouped_matmul(x, w, mine, recipe="rowwise", backend="xla"), "e")

    if case is DENSE:
        f = jax.shard_map(dense, mesh=mesh, in_specs=(P(), P(None, "e")), out_specs=P(None, "e"))
    else:
        sharded = jax.shard_map(groups, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P())
        f = lambda x, w: sharded(x, w, case.offsets)

    def results(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(dy)

    y, dx, dw = jax.jit(results)(x, case.w, dy)
    want = reference(case, "rowwise")
    assert_close(y, want[0], "float32")
    # A scale is of what a shard holds: of half of dy's columns (dx, dense), of some of the rows (dw, groups). The other gradient is exact.
    exact, near = ((dw, want[2]), (dx, want[1])) if case is DENSE else ((dx, want[1]), (dw, want[2]))
    assert_close(*exact, "float32")
    assert np.sqrt(np.mean((near[0] - near[1]) ** 2) / np.mean(near[1] ** 2)) < 0.05


def test_shard_map_checks_the_kernels_varying_axes():
    """check_vma=True traces the kernels' passes with replicated weights: the gradient's psum is JAX's own."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def shard(lhs, rhs, offsets):
        def f(lhs, rhs):
            return jnp.sum(jaxops.fp8_grouped_matmul(lhs, rhs, offsets[0], backend="pallas") + jaxops.fp8_matmul(lhs, rhs[0], backend="pallas"))

        return jax.grad(f, argnums=(0, 1))(lhs, rhs)

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    s = jax.ShapeDtypeStruct
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(s((64, 32), jnp.float32), s((4, 32, 48), jnp.float32), s((2, 5), jnp.int32)))
    assert "psum" in text
    assert text.count("fp8_matmul_contraction") >= 1


def test_forward_mode_and_second_order_are_errors():
    loss = lambda x: jnp.sum(jaxops.fp8_matmul(x, DENSE.w, backend="xla") ** 2)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(DENSE.x)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))), DENSE.x)
