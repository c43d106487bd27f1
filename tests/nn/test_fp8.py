"""The FP8 layers compared with the plain ones: values, gradients, state, and the history of delayed scaling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import AmaxHistory, Fp8DotGeneral, Fp8Linear
from tests.arrays import normal

M, IN, OUT = 24, 160, 96
OFFSETS = (0, 7, 7, 20)  # group 1 is empty, the last four rows are in no group

# Compiled whole: operation by operation, JAX would compile every one of them.
apply = nnx.jit(lambda layer, *args: layer(*args))


def rms_error(got, want) -> float:
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def history_of(layer) -> np.ndarray:
    return np.asarray(layer.amax_history[...])


@nnx.jit
def result_and_gradients(layer, x, cotangent, *args):
    """(y, dx, parameters' gradients)"""

    def loss(layer, x):
        y = layer(x, *args)
        return jnp.sum(y.astype(jnp.float32) * cotangent), y

    (dlayer, dx), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, dx, dlayer


def assert_fp8_close(got, want, recipe: str) -> None:
    """Each of e4m3's roundings is 2.6 % RMS, e5m2's 5 %; nothing would be lost at all if no cast took place."""
    (y, dx, params), (plain_y, plain_dx, plain_params) = got, want
    errors = {
        "y": rms_error(y, plain_y),
        "dx": rms_error(dx, plain_dx),
        "kernel": rms_error(params.kernel[...], plain_params.kernel[...]),
    }
    high = {"kernel"} if recipe.endswith("gw_hp") else set()
    for name, error in errors.items():
        low, most = (0, 0.01) if name in high else (0.015, 0.07)
        assert low <= error < most, f"{recipe}: {name} is off by {error:.4f}"
    assert rms_error(params.bias[...], plain_params.bias[...]) < 0.01


# What a recipe computes is tests/ops/fp8_matmul's business.
@pytest.mark.parametrize("recipe", ["delayed", "rowwise_with_gw_hp"])
def test_gradients_are_close_to_the_plain_layers(recipe):
    x, cotangent = normal(0, 2, M, IN, dtype=jnp.bfloat16), normal(1, 2, M, OUT)
    options = {"dtype": jnp.bfloat16, "bias_init": nnx.initializers.normal(1.0)}
    ours, plain = (
        Fp8Linear(IN, OUT, recipe=recipe, **options, rngs=nnx.Rngs(0)),
        nnx.Linear(IN, OUT, **options, rngs=nnx.Rngs(0)),
    )
    if recipe == "delayed":
        apply(ours, x)  # now there is a history
    got, want = (result_and_gradients(layer, x, cotangent) for layer in (ours, plain))
    assert_fp8_close(got, want, recipe)
    assert (got[0].dtype, got[1].dtype, got[2].kernel.dtype, got[2].bias.dtype) == (
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
        jnp.float32,
    )


def delayed(history: int = 3, **options) -> Fp8Linear:
    return Fp8Linear(
        IN,
        OUT,
        recipe="delayed",
        use_bias=False,
        history=history,
        kernel_init=nnx.initializers.constant(0.5),
        **options,
        rngs=nnx.Rngs(0),
    )


@nnx.jit
def train_step(layer, x):
    """nnx's own gradient and update, as a user would write them."""
    grads = nnx.grad(lambda layer: jnp.sum(layer(x)))(layer)
    nnx.update(layer, jax.tree.map(lambda p, g: p - 0.001 * jnp.sign(g), nnx.state(layer, nnx.Param), grads))


@pytest.mark.parametrize("step", [apply, train_step], ids=["jit", "grad"])
def test_history_rolls(step):
    layer = delayed()
    for amax in (2.0, 8.0, 4.0, 1.0):
        step(layer, jnp.full((M, IN), amax))
    np.testing.assert_array_equal(history_of(layer)[0], [1, 4, 8])
    trained = 0.5 - 0.001 * np.arange(3, 0, -1) if step is train_step else [0.5] * 3
    np.testing.assert_allclose(history_of(layer)[1], trained, rtol=1e-6)


def test_history_under_jax_transformations():
    """Split, jit, checkpoint and grad of a loop without nnx's own; the history is returned beside the gradients."""
    graphdef, params, history = nnx.split(delayed(), nnx.Param, AmaxHistory)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(params, history, x):
        @jax.checkpoint
        def run(params, history):
            layer = nnx.merge(graphdef, params, history)
            return jnp.sum(layer(x)), nnx.state(layer, AmaxHistory)

        return run(params, history)

    for amax in (2.0, 8.0):
        grads, history = gradients(params, history, jnp.full((M, IN), amax))
    np.testing.assert_array_equal(history["amax_history"][...], [[8, 2, 0], [0.5, 0.5, 0]])
    np.testing.assert_allclose(
        grads["kernel"][...], np.full((IN, OUT), 2.0 * M), rtol=1e-5
    )  # x saturates to 2, all that the history knew of


def test_history_of_scanned_layers():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return Fp8Linear(
            IN,
            IN,
            recipe="delayed",
            use_bias=False,
            history=2,
            kernel_init=nnx.initializers.constant(2 / IN),
            rngs=rngs,
        )

    @nnx.jit
    @nnx.grad
    def gradients(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return layer(x)

        return jnp.mean(forward(x, layers))

    layers = stack(nnx.Rngs(0))
    for _ in range(2):
        grads = gradients(layers, jnp.ones((M, IN)))
    np.testing.assert_allclose(
        history_of(layers)[:, 0], [[1, 1], [2, 2], [4, 4]], rtol=0.15
    )  # both roundings of both layers before it
    np.testing.assert_allclose(history_of(layers)[:, 1], np.full((3, 2), 2 / IN), rtol=1e-6)
    assert all(np.asarray(grads.kernel[i]).all() for i in range(3))


def test_scales_come_from_the_largest_value_of_the_history():
    layer = delayed(history=2)
    x = normal(0, M, IN)
    clipped = jnp.clip(x, -1, 1)
    want = clipped @ layer.kernel[...]
    assert rms_error(apply(layer, jnp.clip(x * 100, -1, 1)), jnp.sign(x) @ layer.kernel[...]) < 0.07, (
        "an empty history is a scale of one"
    )
    assert rms_error(apply(layer, x), want) < 0.07, "what is larger than all of the history saturates"
    assert rms_error(apply(layer, x), x @ layer.kernel[...]) < 0.07, "the next step knows better"


def test_eval_leaves_the_history():
    layer = delayed()
    apply(layer, jnp.full((M, IN), 2.0))
    before = history_of(layer)
    layer.eval()
    np.testing.assert_allclose(apply(layer, jnp.full((M, IN), 5.0)), np.full((M, OUT), IN), rtol=0.07)  # saturated to 2
    np.testing.assert_array_equal(history_of(layer), before)
    layer.train()
    apply(layer, jnp.full((M, IN), 5.0))
    np.testing.assert_array_equal(history_of(layer)[0], [5, 2, 0])


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_dot_general_in_a_linear_layer(recipe):
    x = normal(0, 2, M, IN)
    flax = nnx.Linear(IN, OUT, dot_general=Fp8DotGeneral(recipe, history=2), rngs=nnx.Rngs(0))
    ours = Fp8Linear(IN, OUT, recipe=recipe, history=2, rngs=nnx.Rngs(0))
    for _ in range(2):
        for got, want in zip(
            *(jax.tree.leaves(result_and_gradients(layer, x, normal(1, 2, M, OUT))) for layer in (flax, ours)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)
    if recipe == "delayed":
        np.testing.assert_array_equal(history_of(flax.dot_general), history_of(ours))
        assert history_of(ours).all()
        flax.eval()
        apply(flax, 10 * x)
        np.testing.assert_array_equal(history_of(flax.dot_general), history_of(ours))


def test_dot_general_contracts_any_axes():
    x, w, dims = normal(0, 4, 6, 2, 8), normal(1, 8, 3, 4, 5), (((3, 0), (0, -2)), ((), ()))
    got = jax.jit(lambda x, w: Fp8DotGeneral()(x, w, dims, preferred_element_type=jnp.bfloat16))(x, w)
    assert got.dtype == jnp.bfloat16
    assert rms_error(got, np.einsum("abcd,deaf->bcef", x, w)) < 0.07


def test_a_history_needs_a_step():
    with pytest.raises(ValueError, match="history=0 must be at least 1"):
        delayed(history=0)
    with pytest.raises(ValueError, match=r"has shape \(2, 0\); it must be \[2, history\]"):
        AmaxHistory(jnp.zeros((2, 0)))
    with pytest.raises(ValueError, match=r"has shape \(3,\)"):
        AmaxHistory(jnp.zeros(3))


@pytest.mark.parametrize(
    ("dims", "options", "error", "says"),
    [
        ((((2,), (1,)), ((0,), (0,))), {}, NotImplementedError, "no batch axes"),
        ((((), ()), ((), ())), {}, NotImplementedError, "one contracted axis or more"),
        ((((2,), (1,)), ((), ())), {"out_sharding": "x"}, NotImplementedError, "out_sharding"),
        ((((2,), (1,)), ((), ())), {"precision": "highest"}, ValueError, "precision"),
        ((((2,), (2,)), ((), ())), {}, ValueError, r"sizes \(8,\), those of rhs \(5,\)"),
    ],
)
def test_what_dot_general_cannot_do(dims, options, error, says):
    with pytest.raises(error, match=says):
        Fp8DotGeneral()(jnp.ones((2, 3, 8)), jnp.ones((2, 8, 5)), dims, **options)


def test_an_out_sharding_that_splits_nothing():
    """As libraries pass it in every jit: not over an axis of several devices."""
    lhs, rhs, dims = jnp.ones((2, 3, 8)), jnp.ones((8, 5)), (((2,), (0,)), ((), ()))
    P, Named = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    one, two = (jax.sharding.AbstractMesh((size,), ("i",)) for size in (1, 2))
    call = lambda out_sharding: jax.eval_shape(lambda: Fp8DotGeneral()(lhs, rhs, dims, None, None, out_sharding))
    right = P(), P(None, None), P(()), Named(two, P()), Named(two, P(None, (), None)), Named(one, P("i", None))
    for out_sharding in right:
        assert call(out_sharding).shape == (2, 3, 5)
    wrong = P("i"), P(None, ("i",)), P(P.UNCONSTRAINED), Named(two, P("i")), P(unreduced={"i"})
    for out_sharding in wrong:
        with pytest.raises(NotImplementedError, match=r"out_sharding is .*with_sharding_constraint.*jax\.shard_map"):
            call(out_sharding)
