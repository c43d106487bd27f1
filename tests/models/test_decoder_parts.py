"""The decoder's parts by themselves, and models with most of them at once."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.offload import Policy
from models.decoder import Decoder, DecoderConfig, Latent, RopeScaling
from models.decoder.attention import soft_attention
from models.decoder.cache import Places, write
from models.decoder.experts import Experts
from models.decoder.model import lengths_of
from models.decoder.weights import StoredFp8Linear, matrix_of
from models.generate.inference import for_inference
from models.hf import quantized as hf_quantized
from tests.arrays import put
from tests.jaxprs import equations

SMALL = DecoderConfig(31, 12, 4, 4, 2, 6, 10, experts=4, top_k=2, backend="xla")
MUCH = dataclasses.replace(
    SMALL,
    rope_scaling=RopeScaling("dynamic", 3.0, 4),
    rotary_dim=4,
    rope_pairs=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qkv_clip=2.0,
    window=5,
    sliding=(0, 3),
    sinks=True,
    dense_layers=(0, 2),
    dense_hidden=14,
    shared_hidden=8,
    shared_gate=True,
    expert_bias=True,
    clamp=7.0,
    tie_embeddings=True,
)
LATENT = dataclasses.replace(
    SMALL,
    kv_heads=4,
    latent=Latent(5, 7, 3),
    rotary_dim=4,
    window=6,
    dense_layers=(0,),
    dense_hidden=14,
    score="sigmoid",
    selection_bias=True,
    expert_groups=2,
    top_expert_groups=1,
    weight_scale=1.7,
    shared_hidden=8,
)
# Each kind of block and of attention once: they alternate, so that MUCH's layers are unrolled.
CONFIGS = {"much": dataclasses.replace(MUCH, layers=2, sliding=(1,), dense_layers=(0,)), "latent": LATENT}
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 13)).astype(np.int32)
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@functools.cache
def model_of(config: DecoderConfig) -> Decoder:
    """With random biases and sinks, which start at zero, and histories that do. In numpy: XLA compiles a model's own
    start for a second."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)

    def draw(path, x):
        name, drawn = jax.tree_util.keystr(path), rng.normal(size=x.shape)
        if "scale" in name:
            drawn = np.ones(x.shape)
        elif "amax_history" in name:
            drawn = np.zeros(x.shape)
        elif "bias" not in name and "sinks" not in name:
            drawn /= x.shape[-2] ** 0.5
        return put(drawn, x.dtype)

    nnx.update(model, jax.tree.map_with_path(draw, nnx.state(model)))
    return model


@nnx.jit
def logits_of(model: Decoder, tokens: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    return model(tokens, documents)[0]


@each_config
def test_packed_documents_are_as_if_each_came_alone(config):
    """Windows, and rotary positions by the length of a document, too."""
    lengths = [5, 1, 7]
    documents = np.repeat([3, 0, 9], lengths).astype(np.int32)[None]
    packed = np.asarray(logits_of(model_of(config), TOKENS[:1], documents)[0])
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        # With another document behind: one compilation for all lengths.
        alone = np.zeros((1, 13), np.int32)
        alone[0, :length] = TOKENS[0, start : start + length]
        others = (np.arange(13) >= length).astype(np.int32)[None]
        found = np.asarray(logits_of(model_of(config), alone, others)[0])
        np.testing.assert_allclose(packed[start : start + length], found[:length], atol=2e-5)


# Without a cap a single token takes jaxops.cached_attention.
UNCAPPED = dataclasses.replace(SMALL, layers=2, window=5, sliding=(0,), sinks=True, experts=0, top_k=0)


@pytest.mark.parametrize("config", [*CONFIGS.values(), UNCAPPED], ids=[*CONFIGS, "uncapped"])
def test_a_token_at_a_time_is_as_all_at_once(config):
    """With a row that ends sooner, and padding after it; dynamic positions are those of the text so far."""
    config = dataclasses.replace(config, rope_scaling=None)
    model, lengths = model_of(config), np.array([13, 10])
    whole = np.asarray(logits_of(model, TOKENS, np.zeros((2, 13), np.int32)))
    extend = nnx.jit(lambda model, *given: model.extend(*given))
    cache = model.empty_cache(2, 16)
    for start, size in ((0, 4), (4, 4), (8, 4), (12, 1)):
        count = np.clip(lengths - start, 0, size).astype(np.int32)
        at = np.minimum(lengths, start).astype(np.int32)
        logits, cache = extend(model, TOKENS[:, start : start + size], cache, at, count)
        for row in np.flatnonzero(count):
            np.testing.assert_allclose(np.asarray(logits)[row], whole[row, at[row] + count[row] - 1], atol=2e-5)


def test_a_single_token_attends_to_the_latents():
    """As two tokens, of which one is padding, attend to keys and values; in a window: the test above. Nothing is larger
    than the cache."""
    config = dataclasses.replace(LATENT, window=None, layers=1, dense_layers=(), experts=0, top_k=0)
    config = dataclasses.replace(config, expert_groups=1, top_expert_groups=1, selection_bias=False, shared_hidden=0)
    model, length = model_of(config), 400
    extend = nnx.jit(lambda model, *given: model.extend(*given))
    at, ones = jnp.array([9, 4], jnp.int32), jnp.ones(2, jnp.int32)
    _, cache = extend(model, TOKENS[:, :9], model.empty_cache(2, length), jnp.zeros(2, jnp.int32), at)
    found = extend(model, TOKENS[:, 9:10], cache, at, ones)
    wanted = extend(model, TOKENS[:, 9:11], cache, at, ones)
    for ours, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, other, atol=2e-5)
    sizes = lambda T: [
        math.prod(var.aval.shape)
        for eqn in equations(jax.make_jaxpr(lambda *given: model.extend(*given))(TOKENS[:, :T], cache, at, ones))
        for var in eqn.outvars
    ]
    assert max(sizes(1)) == 2 * length * (4 + 5)  # the cache
    assert max(sizes(2)) >= 2 * length * LATENT.heads * 6


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads", [(), (2,)], ids=["latents", "heads"])
def test_a_token_is_written_at_its_position(rows, heads):
    """Padding is not, not even where the cache is full."""
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(rows, *heads, 5, 4)), rng.normal(size=(rows, 1, *heads, 4))
    run = jax.jit(lambda old, new, at, count: write((old,), (new,), Places.after(at, count, 1))[0])
    for at, count in (([4, 0, 2], [1, 0, 1]), ([5, 5, 1], [0, 0, 1]), ([2, 4, 5], [1, 1, 0])):
        wanted = old.copy()
        for row in np.flatnonzero(count[:rows]):
            wanted[row, ..., at[row], :] = new[row, 0]
        given = (put(x[:rows], jnp.int32) for x in (at, count))
        found = run(put(old, jnp.float32), put(new, jnp.float32), *given)
        np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_the_matrix_of_a_linear_layer():
    rng = np.random.default_rng(0)
    stored = StoredFp8Linear(150, 260, config=LATENT, use_bias=False, rngs=nnx.Rngs(0))
    values, scales = rng.normal(size=(260, 150)).astype(hf_quantized.FP8), rng.random((3, 2)).astype(np.float32)
    stored.weight[...], stored.scale[...] = put(values), put(scales)
    np.testing.assert_array_equal(matrix_of(stored, "float32"), hf_quantized.from_fp8(values, scales).T)
    linear = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(matrix_of(linear, "bfloat16"), linear.kernel[...].astype("bfloat16"))


@pytest.mark.parametrize(("kv_heads", "hidden"), [(2, 128), (1, 70)], ids=["joined", "apart"])
def test_stored_matrices_of_one_input_are_joined_for_inference(kv_heads, hidden):
    """Where blocks of 128 columns fit. Of the last one they need not."""
    config = dataclasses.replace(
        SMALL, width=24, layers=2, heads=2, kv_heads=kv_heads, head_dim=64, hidden=hidden, experts=0, top_k=0
    )
    config = dataclasses.replace(config, stored_fp8=True, qkv_bias=True, mlp_bias=True, qk_norm=True)
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda x: put((rng.normal(size=x.shape) / 4).astype(x.dtype)), nnx.state(model)))
    joined = for_inference(model)
    extend = nnx.jit(lambda model, *given: model.extend(*given))
    cache, ones = model.empty_cache(2, 8), np.ones(2, np.int32)
    for at, tokens in ((0, TOKENS[:, :4]), (4, TOKENS[:, 4:5])):
        given = tokens, cache, at * ones, np.int32(tokens.shape[1]) * ones
        wanted, found = extend(model, *given), extend(joined, *given)
        for ours, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5)
        cache = wanted[1]
    block = joined.blocks[0]
    for whole, parts in ((block.attention.qkv, block.attention.q), (block.mlp.gate_up, block.mlp.gate)):
        assert (whole is None) != (parts is None)
    assert (block.attention.q is None) == (kv_heads == 2)
    assert (block.mlp.gate is None) == (hidden == 128)


def test_stored_experts_of_single_tokens():
    """Their rows are not quantized: as with the same matrices in half precision."""
    config = dataclasses.replace(SMALL, dtype="bfloat16", stored_fp8=True)
    rng = np.random.default_rng(0)
    stored, whole = (Experts(dataclasses.replace(config, stored_fp8=kept), rngs=nnx.Rngs(0)) for kept in (True, False))
    for name in ("gate", "up", "down"):
        matrix, kept = getattr(whole.moe, name), getattr(stored.moe, name)
        values = rng.normal(size=kept.weight.shape).astype(hf_quantized.FP8)
        scales = rng.uniform(0.1, 0.3, size=kept.scale.shape).astype(np.float32)
        kept.weight[...], kept.scale[...] = put(values), put(scales)
        matrix[...] = jnp.stack([hf_quantized.from_fp8(*each).T for each in zip(values, scales, strict=True)])
    nnx.update(stored.moe.router, nnx.state(whole.moe.router))
    run = nnx.jit(lambda model, x: model(x)[0])
    for tokens, limit in (((5, 1), 2e-2), ((1, 5), 1e-1)):
        x = put(rng.normal(size=(*tokens, config.width)), "bfloat16")
        found, wanted = (np.asarray(run(model, x), np.float32) for model in (stored, whole))
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert limit / 10 < error < limit


IN_A_LOOP, UNROLLED = {"policy": Policy(keep=("attention", "mlp"), offload=("carry",))}, {"unroll": True}
# Of each a second layer of one kind: behind one of the other, or in a loop. Little else: what a layer computes does not
# depend on how layers follow each other, and each part of it takes half a second to compile.
PLAIN = dataclasses.replace(SMALL, layers=3, dense_hidden=14, shared_hidden=8)
TWO_KINDS = dataclasses.replace(PLAIN, window=5, sliding=(0,), dense_layers=(0, 2))
LOOPED = dataclasses.replace(PLAIN, layers=2, kv_heads=4, latent=Latent(5, 7, 3), rotary_dim=4)


@pytest.mark.parametrize(("config", "plain"), [(TWO_KINDS, {}), (LOOPED, UNROLLED)], ids=CONFIGS)
def test_recomputed_and_unrolled_layers_give_the_same_gradients(config, plain):
    """Layers whose kinds alternate, as MUCH's, are unrolled already. Loops that keep everything: test_hf.py."""
    _, params, others = nnx.split(model_of(config), nnx.Param, ...)

    def gradients(**how):
        made = nnx.split(nnx.eval_shape(lambda: Decoder(dataclasses.replace(config, **how), rngs=nnx.Rngs(0))))[0]
        loss = lambda params, tokens: jnp.mean(nnx.merge(made, params, others)(tokens)[0] ** 2)
        return jax.jit(jax.value_and_grad(loss))(params, TOKENS)

    wanted = jax.tree.map(np.asarray, gradients(**plain))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(wanted))
    for ours, other in zip(jax.tree.leaves(gradients(**IN_A_LOOP)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=2e-6)


def test_lengths_of_documents():
    starts = jnp.array([[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(lengths_of(starts), [[3, 3, 3, 1, 2, 2], [6] * 6])


def test_a_query_that_sees_nothing_gets_zero():
    x = jnp.ones((1, 2, 2, 4))
    nothing = jnp.zeros((1, 2, 2), bool)
    run = lambda x, sinks: soft_attention(x, x, x, nothing, sinks, scale=1.0)
    summed = jax.value_and_grad(lambda x: jnp.sum(run(x, jnp.zeros(2))))
    (value, gradient), without = jax.jit(lambda x: (summed(x), run(x, None)))(x)
    assert value == 0
    assert np.isfinite(gradient).all()
    assert not np.any(without)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rotary_dim": 3}, "rotary_dim is 3 of head_dim 6"),
        ({"rotary_dim": 8}, "rotary_dim is 8 of head_dim 6"),
        ({"dense_layers": (1,)}, "needs dense_hidden"),
        ({"dense_layers": (0, 1, 2, 3), "dense_hidden": 3}, "it names some of the layers"),
        ({"dense_layers": (4,), "dense_hidden": 3}, "numbers of the 4 layers"),
        ({"sliding": (1, 0), "window": 3}, "in order"),
        ({"sliding": (1,)}, "window is None"),
        ({"latent": Latent(4, None, 3)}, "latent attention needs rotary_dim"),
        ({"expert_bias": True, "stored_fp8": True}, "stored float8 experts have neither"),
        ({"expert_bias": True, "recipe": "rowwise"}, "expert_bias, clamp or stored_fp8 is set: experts in FP8"),
        ({"clamp": 7.0, "recipe": "rowwise"}, "biases or clamps"),
        ({"clamp": 1.0}, r"clamp \(swiglu_limit\) is 1.0; units are clamped at 7"),
        ({"expert_groups": 3}, "groups must be equal"),
        ({"expert_groups": 4}, "have top_k experts"),
    ],
)
def test_choices_that_do_not_fit(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **change)


def test_cudnn_has_no_windows_and_sinks():
    for change in ({"window": 4}, {"sinks": True}):
        model = nnx.eval_shape(
            lambda change=change: Decoder(dataclasses.replace(SMALL, attention="cudnn", **change), rngs=nnx.Rngs(0))
        )
        with pytest.raises(ValueError, match="windows, sinks or latents: write xla"):
            nnx.eval_shape(lambda model: model(TOKENS), model)
