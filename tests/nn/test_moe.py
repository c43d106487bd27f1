"""MoE and Router against each token's experts one by one, and as Flax modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.nn import MoE, Router, RouterBias
from tests.arrays import put
from tests.compare import assert_close

T, E, D, F, K = 24, 4, 8, 12, 2

# Compiled whole: operation by operation, JAX would compile every one of them.
apply = nnx.jit(lambda module, x: module(x))


def numbers(key, shape, dtype=jnp.float32) -> jax.Array:
    return put(np.random.default_rng(sum(shape)).normal(size=shape) / shape[-1] ** 0.5, dtype)


def make(*, router: dict | None = None, hidden_features: int = F, **options) -> MoE:
    rngs = nnx.Rngs(0)
    return MoE(
        E,
        D,
        hidden_features,
        router=Router(D, E, K, **(router or {}), rngs=rngs),
        **{"kernel_init": numbers, "precision": "highest"} | options,
        rngs=rngs,
    )


def tokens(*shape: int, dtype=jnp.float32) -> jax.Array:
    return put(np.random.default_rng(5).normal(size=shape or (T, D)), dtype)


def every_expert(params: dict, x: jax.Array, routing: jaxops.Routing, activation=jax.nn.silu) -> jax.Array:
    """float32: all experts for all tokens, without the choices that were not made."""

    def mlp(gate, up, down):
        return (activation(jnp.matmul(x, gate, precision="highest")) * jnp.matmul(x, up, precision="highest")) @ down

    with jax.default_matmul_precision("highest"):
        each = jax.vmap(mlp)(params["gate"], params["up"], params["down"])  # [E, T, D]
        share = jnp.sum(
            jnp.where(routing.experts[:, :, None] == jnp.arange(E)[None, None, :], routing.weights[:, :, None], 0),
            axis=1,
        )
        return jnp.einsum("etd,te->td", each, share)


CASES = {
    "relu-capacity": {
        "activation": "relu",
        "router": {"score": "sigmoid", "normalize": False, "weight_scale": 2.5, "capacity": 9},
    },
    "expert-groups": {"router": {"expert_groups": 2, "top_expert_groups": 1, "use_bias": True}},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_every_token_by_itself(options):
    """With options that the layer in tests/contracts has not, which has the gradients."""
    moe, x = make(**options), tokens()
    y, routing = apply(moe, x)
    if "capacity" in options["router"]:
        assert (routing.row_positions == T * K).any(), "nothing is dropped"
    params = nnx.to_pure_dict(nnx.state(moe, nnx.Param))
    activation = {"relu": jax.nn.relu}.get(options.get("activation"), jax.nn.silu)
    assert_close(y, every_expert(params, x, routing, activation), "float32", scale=5)


def test_leading_axes():
    moe, x = make(), tokens(2, 3, 4, D)
    y, routing = apply(moe, x)
    flat, _ = apply(moe, x.reshape(-1, D))
    assert y.shape == x.shape
    assert routing.experts.shape == (24, K)
    np.testing.assert_array_equal(y.reshape(-1, D), flat)


@pytest.mark.parametrize("exchange", [(), ("gather_tokens",), ("send_tokens",)])
def test_what_a_token_that_does_not_count_holds_reaches_no_gradient(exchange):
    layer = make(expert_axis="expert" if exchange else None, **dict.fromkeys(exchange, True))
    x, mask = tokens(), jnp.arange(T) % 3 > 0
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        y, routing = nnx.merge(graphdef, params)(x, mask)
        return jnp.sum(y**2) + routing.aux_loss + routing.z_loss

    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    gradients = jax.grad(loss, (0, 1))
    if exchange:  # one device has all tokens and experts
        gradients = jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    of_zeros, of_nans = (jax.jit(gradients)(params, jnp.where(mask[:, None], x, at)) for at in (0, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, of_zeros, of_nans)
    assert not any(jnp.isnan(d).any() for d in jax.tree.leaves(of_nans))


class FirstExpert(Router):
    def __call__(self, x):
        return self.choose(self.logits(x).at[:, 0].set(100.0))


def test_a_router_that_overrides_its_call_is_called():
    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    layer = make(expert_axis="expert", gather_tokens=True)
    layer.router = FirstExpert(D, E, K, rngs=nnx.Rngs(0))
    call = jax.shard_map(lambda x: layer(x)[1].load, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    assert jax.jit(call)(tokens())[0] == T


def test_a_sum_over_devices_is_rounded_once():
    """bfloat16 experts: devices add in float32, so the result has the bits of one device with all experts."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    (alone, params), (graphdef, _) = (
        nnx.split(make(expert_axis=axis, dtype=jnp.bfloat16, use_bias=True)) for axis in (None, "expert")
    )
    params = jax.tree.map(lambda x: numbers(None, x.shape), params)
    x = tokens(dtype=jnp.bfloat16)
    specs = jax.tree.map_with_path(lambda path, _: P("expert") if path[0].key != "router" else P(), params)
    split = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params)(x)[0], mesh=mesh, in_specs=(specs, P()), out_specs=P()
    )
    got, want = jax.jit(split)(params, x), jax.jit(lambda params, x: nnx.merge(alone, params)(x)[0])(params, x)
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


def test_router_bias():
    """It decides who is chosen, gets no gradient, and moves towards equal loads."""
    router = Router(D, E, 1, score="sigmoid", use_bias=True, rngs=nnx.Rngs(0))
    router.selection_bias[...] = router.selection_bias[...].at[2].set(100.0)
    x = tokens()
    routing = apply(router, x)
    assert routing.load.tolist() == [0, 0, T, 0]
    router.update_bias(routing.load, 0.5)
    np.testing.assert_array_equal(router.selection_bias[...], [0.5, 0.5, 99.5, 0.5])
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(router, nnx.Param))) == {"kernel": (D, E)}
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(router, RouterBias))) == {"selection_bias": (E,)}

    @nnx.jit
    def step(router, x):
        router.update_bias(router(x).load, 0.5)

    step(router, x)
    np.testing.assert_array_equal(router.selection_bias[...], [1.0, 1.0, 99.0, 1.0])


def test_router_is_float32():
    """Whatever the tokens' dtype: its choices are those of an unrounded product."""
    router, x = Router(D, E, K, rngs=nnx.Rngs(0)), tokens(dtype=jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        logits = x.astype(jnp.float32) @ router.kernel[...]
        got = router(x)
    assert_close(got.weights, jaxops.route(logits, K).weights, "float32")


def test_any_router():
    """A function will do."""
    logits = tokens(T, E)
    moe = MoE(E, D, F, router=lambda x: jaxops.route(logits, 3), rngs=nnx.Rngs(0))
    y, routing = apply(moe, tokens())
    assert routing.experts.shape == (T, 3)
    assert_close(y, every_expert(nnx.to_pure_dict(nnx.state(moe, nnx.Param)), tokens(), routing), "float32", scale=5)


@pytest.mark.parametrize("experts", [1, 64])
def test_fan_in_is_one_expert(experts):
    moe = MoE(experts, 128, 64, router=lambda x: jaxops.route(x, 1), rngs=nnx.Rngs(0))
    for kernel, fan_in in ((moe.gate, 128), (moe.up, 128), (moe.down, 64)):
        assert jnp.std(kernel[...]) == pytest.approx(fan_in**-0.5, rel=0.05)


def test_errors():
    with pytest.raises(ValueError, match="gather_tokens=True needs expert_axis"):
        make(gather_tokens=True)
    for unit in ({"use_bias": True}, {"activation": "swiglu_oai"}):
        with pytest.raises(NotImplementedError, match="recipe='rowwise' has no experts with biases or 'swiglu_oai'"):
            make(recipe="rowwise", precision=None, **unit)
    for call in (lambda layer, x: layer(x), apply):
        with pytest.raises(ValueError, match=r"expert_axis='expert' is not an axis here: .* jax\.shard_map"):
            call(make(expert_axis="expert"), tokens())
    moe = make()
    with pytest.raises(ValueError, match=r"x has shape \(24, 9\); it must be \[\.\.\., in_features=8\]"):
        moe(jnp.ones((T, D + 1)))
    with pytest.raises(ValueError, match=r"mask has shape \(24, 1\); it must be a bool array \(24,\), True for each"):
        moe(jnp.ones((T, D)), jnp.ones((T, 1), bool))
    with pytest.raises(TypeError, match=r"mask is float32; write mask\.astype\(jnp\.bool\)"):
        moe.router(tokens(), jnp.ones(T))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 8\).*\[T, in_features=8\].*flatten"):
        moe.router(jnp.ones((2, 3, D)))
    with pytest.raises(ValueError, match=r"no selection_bias to update.*use_bias=True"):
        moe.router.update_bias(jnp.ones(E), 0.1)
    with pytest.raises(TypeError, match=r"selection_bias is bfloat16; it must be float32"):
        RouterBias(jnp.zeros(E, jnp.bfloat16))
    moe.router = lambda x: jaxops.route(x, 1)
    with pytest.raises(ValueError, match="the router chose among 8 experts; this layer has num_experts=4"):
        moe(tokens())
    moe.router = lambda x: x
    with pytest.raises(TypeError, match=r"the router returned a \w+, not a jaxops\.Routing: take a jaxops\.nn\.Router"):
        moe(tokens())
    moe = make()
    moe.gate = nnx.Param(moe.gate[...][:2])
    with pytest.raises(
        ValueError, match="this device has 2 of num_experts=4 experts, and expert_axis=None has 1 devices"
    ):
        moe(tokens())
