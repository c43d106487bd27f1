"""The multimodal model: who sees whom, equal to a decoder on text and to a DiT on images, and to a dense reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import AmaxHistory
from models.dit.model import position_embedding, waves
from models.multimodal.interleaved import Batch, Document, Room, Tokens, captioned, illustrated, lay_out
from models.multimodal.loss import loss_fn
from models.multimodal.model import Multimodal, MultimodalConfig, layout_of
from tests.arrays import put
from tests.compare import assert_close
from tests.models.test_interleaved import image_of, text_of

CONFIG = MultimodalConfig(
    vocab=31, patch_values=4, width=16, layers=2, heads=4, kv_heads=2, head_dim=6, text_experts=3, text_hidden=10,
    image_experts=2, image_hidden=14, top_k=2, qk_norm=True, backend="xla",
)  # fmt: skip
TOKENS, ROOM = Tokens(29, 30, 0), Room(rows=36, predictions=16, documents=4, patch=2, channels=1)
DOCUMENTS = (
    captioned(text_of(5, 6, 7), image_of(2, 2), TOKENS),
    illustrated(text_of(8, 9), image_of(1, 3, seed=1), TOKENS),
    Document((text_of(1, 2), image_of(1, 2, seed=2), text_of(3, 4, 5), image_of(2, 2, seed=3)), stop=0),
)


def batch_of(*documents: Document, room: Room = ROOM) -> Batch:
    return jax.tree.map(put, lay_out(documents, room))


BATCH = batch_of(*DOCUMENTS[:2])
TIME = np.linspace(0.05, 0.95, ROOM.segments, dtype=np.float32)
END = int(BATCH.sequence_offsets[-1])


@functools.cache
def model_of(config: MultimodalConfig) -> Multimodal:
    """With random parameters: initially images' blocks are the identity and all velocities zero."""
    model = nnx.eval_shape(lambda: Multimodal(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(path, p):
        name = jax.tree_util.keystr(path)
        drawn = rng.normal(size=p.shape) / (2 if "modulation" in name or "leave" in name else 4)
        return put(drawn + ("scale" in name), p.dtype)

    nnx.update(model, jax.tree.map_with_path(draw, nnx.state(model)))
    return model


@nnx.jit
def outputs(model: Multimodal, batch, time) -> tuple[jax.Array, jax.Array]:
    """Logits and velocities of all rows."""
    x, _ = model(batch, time)
    return model.logits(x), model.velocities(x)


def visible(batch) -> np.ndarray:
    """[T, T] bool, by the words of the paper: in the document a row sees what is before it, and its own image."""
    batch = jax.tree.map(np.asarray, batch)
    at = np.arange(batch.tokens.shape[0])
    of = lambda offsets: np.searchsorted(offsets, at, side="right")
    document, segment = of(batch.sequence_offsets), of(batch.segment_offsets)
    same = (document[:, None] == document[None, :]) & (at < batch.sequence_offsets[-1])[None, :]
    image = np.append(False, batch.is_image)[np.minimum(segment, len(batch.is_image))]
    own_image = (segment[:, None] == segment[None, :]) & image[:, None]
    return same & ((at[None, :] <= at[:, None]) | own_image)


def test_positions_and_ends():
    layout = jax.jit(layout_of)(batch_of(DOCUMENTS[2], DOCUMENTS[1]))
    assert layout.positions[:17].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 6, 6, 6, 0, 1, 2, 3, 3, 3]
    assert layout.visible_until[:17].tolist() == [1, 2, 4, 4, 5, 6, 7, 11, 11, 11, 11, 12, 13, 14, 17, 17, 17]
    assert layout.of_image.tolist() == [kind == "i" for kind in "ttiitttiiiitttiii" + 19 * "-"]
    assert layout.in_document.tolist() == 17 * [True] + 19 * [False]


def reference(config: MultimodalConfig, p, batch, time) -> tuple[jax.Array, jax.Array]:
    """Logits and velocities [T, ...] with dense masks, all experts for all rows, and norms row by row."""
    c, T = config, batch.tokens.shape[0]
    at = np.arange(T)
    segment = np.minimum(np.searchsorted(batch.segment_offsets, at, side="right") - 1, len(batch.is_image) - 1)
    image = (batch.is_image[segment] & (at < batch.sequence_offsets[-1]))[:, None]
    sees = visible(batch)
    there = jax.tree.map(put, batch)
    layout = layout_of(there)  # of which positions are used; tested above
    place = position_embedding(there.segment_offsets, there.grids, T, c.width)
    x = jnp.where(
        image, batch.patches @ p["enter"]["kernel"] + p["enter"]["bias"] + place, p["embed"]["embedding"][batch.tokens]
    )
    first, _, last = (p["time"]["layers"].get(i, {}) for i in range(3))
    cond = (
        jax.nn.silu(waves(1000 * time, c.width, 60_000.0) @ first["kernel"] + first["bias"]) @ last["kernel"]
        + last["bias"]
    )
    cond = jax.nn.silu(cond)[segment]

    def rms(x, scale=1.0):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + c.norm_epsilon) * scale

    def modulated(x, text_scale, scale, shift):
        return jnp.where(image, rms(x) * (1 + scale) + shift, rms(x) * text_scale)

    def rotated(x):
        half = c.head_dim // 2
        angle = layout.positions[:, None, None] * c.rope_base ** (-jnp.arange(half) / half)
        turn = jnp.exp(1j * angle) * (x[..., :half] + 1j * x[..., half:])
        return jnp.concatenate([turn.real, turn.imag], axis=-1)

    def attention(p, y):
        q, k, v = ((y @ p[name]["kernel"]).reshape(T, -1, c.head_dim) for name in "qkv")
        q, k = rotated(rms(q, p["q_norm"]["scale"])), rotated(rms(k, p["k_norm"]["scale"]))
        k, v = (jnp.repeat(z, c.heads // c.kv_heads, axis=1) for z in (k, v))
        scores = jnp.where(sees[None], jnp.einsum("thd,shd->hts", q, k) / c.head_dim**0.5, -1e30)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v).reshape(T, -1) @ p["out"]["kernel"]

    def experts(p, y):
        scores = jax.nn.softmax(y @ p["router"]["kernel"])
        least = jnp.sort(scores, axis=1)[:, -c.top_k, None]
        weights = jnp.where(scores >= least, scores, 0)
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        hidden = jax.nn.silu(jnp.einsum("td,edh->teh", y, p["gate"])) * jnp.einsum("td,edh->teh", y, p["up"])
        return jnp.einsum("te,teh,ehd->td", weights, hidden, p["down"])

    def block(x, b):
        m = jnp.split(cond @ b["modulation"]["head"]["kernel"] + b["modulation"]["head"]["bias"], 6, axis=1)
        h = attention(b["attention"], modulated(x, b["modulation"]["scale"][0], m[0], m[1]))
        x = x + jnp.where(image, m[2], 1) * h
        y = modulated(x, b["modulation"]["scale"][1], m[3], m[4])
        h = jnp.where(image, experts(b["moe"]["image"], y), experts(b["moe"]["text"], y))
        return x + jnp.where(image, m[5], 1) * h, None

    x, _ = jax.lax.scan(block, x, p["blocks"])
    m = jnp.split(cond @ p["modulation"]["head"]["kernel"] + p["modulation"]["head"]["bias"], 2, axis=1)
    x = modulated(x, p["modulation"]["scale"][0], *m)
    return x @ p["head"]["kernel"], x @ p["leave"]["kernel"] + p["leave"]["bias"]


@jax.numpy_rank_promotion("allow")  # for the reference
def test_gradients_are_those_of_a_dense_reference():
    model = model_of(CONFIG)
    graphdef, state = nnx.split(model, nnx.Param)
    batch = batch_of(DOCUMENTS[2], DOCUMENTS[0])
    end, rng = int(batch.sequence_offsets[-1]), np.random.default_rng(3)
    weights = [put(rng.normal(size=(end, n)), jnp.float32) for n in (CONFIG.vocab, CONFIG.patch_values)]

    def value(outs):
        return sum(jnp.sum(w * out[:end]) for w, out in zip(weights, outs, strict=True))

    def ours(state):
        model = nnx.merge(graphdef, state)
        x, _ = model(batch, TIME)
        return value((model.logits(x), model.velocities(x)))

    def theirs(p):
        return value(reference(CONFIG, p, host, TIME))

    plain, host = nnx.to_pure_dict(state), jax.tree.map(np.asarray, batch)
    got, want = jax.jit(jax.value_and_grad(ours))(state), jax.jit(jax.value_and_grad(theirs))(plain)
    assert got[0] == pytest.approx(float(want[0]), rel=1e-5)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(nnx.to_pure_dict(got[1])), jax.tree.leaves(want[1]), strict=True
    ):
        assert_close(one, other, "float32", jax.tree_util.keystr(path), scale=30)


NOISE_KEY = jax.random.key(1)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def loss_and_gradient(state, batch, image_weight, reading_noise):
    """The loss with that of balancing; the loss alone, and the routing."""
    model = nnx.merge(nnx.split(model_of(CONFIG))[0], state)
    how = {"image_weight": image_weight, "time_shift": 3.0, "reading_noise": reading_noise}
    loss, routed = loss_fn(model, batch, NOISE_KEY, **how)
    return loss + jnp.sum(routed.aux_loss), (loss, routed)


def test_loss_is_of_predicted_tokens_and_drawn_patches():
    """From the model's outputs for the same noise; an image that is read is clean, others have their own time."""
    model = model_of(CONFIG)
    drawn_key, _, noise_key = jax.random.split(NOISE_KEY, 3)
    odds = 3 * jnp.exp(jax.random.normal(drawn_key, (ROOM.segments,)))
    time = odds / (1 + odds) * ~BATCH.is_read
    assert float(time[1]) == 0
    noise = jax.random.normal(noise_key, BATCH.patches.shape)
    start, end = 12, 15  # of the only image that is drawn
    at = np.zeros((ROOM.rows, 1), np.float32)
    at[start:end] = time[4]
    logits, velocity = outputs(model, BATCH._replace(patches=(1 - at) * BATCH.patches + at * noise), time)
    predicted = BATCH.targets >= 0
    entropies = -jax.nn.log_softmax(logits)[BATCH.predicting[predicted], BATCH.targets[predicted]]
    errors = jnp.mean((velocity - (noise - BATCH.patches))[start:end] ** 2, axis=1)
    counted, text, image = int(BATCH.counted()), float(jnp.sum(entropies)), float(jnp.sum(errors))
    assert counted == predicted.sum() + 3
    found = [loss_and_gradient(nnx.state(model), BATCH, image_weight, 0.0)[0][1] for image_weight in (0.0, 1.0, 2.0)]
    none, once, twice = (counted * float(loss) for loss, _ in found)
    assert none == pytest.approx(text, rel=1e-4)
    assert twice - none == pytest.approx(2 * image, rel=1e-4)
    assert once == pytest.approx((none + twice) / 2, rel=1e-5)
    routed = found[0][1]
    np.testing.assert_array_equal(routed.load.sum(axis=1), CONFIG.layers * [CONFIG.top_k * END])
    assert routed.load.shape == (2, 5)
    text_rows = END - 7
    np.testing.assert_array_equal(routed.load[:, :3].sum(axis=1), 2 * [CONFIG.top_k * text_rows])


def test_rows_after_the_documents_reach_nothing():
    spoilt = BATCH._replace(tokens=BATCH.tokens.at[END:].set(7), patches=BATCH.patches.at[END:].set(jnp.nan))
    clean, same = (loss_and_gradient(nnx.state(model_of(CONFIG)), batch, 2.0, 0.5) for batch in (BATCH, spoilt))
    jax.tree.map(np.testing.assert_array_equal, clean, same)


def test_an_even_load_has_the_smallest_balancing_loss():
    """1, as of `jaxops.route`, whatever the share of each modality."""
    model = nnx.clone(model_of(dataclasses.replace(CONFIG, layers=1, top_k=1)))
    for side in (model.blocks.moe.text, model.blocks.moe.image):
        side.router.kernel[...] = jnp.zeros_like(side.router.kernel[...])
    routed = nnx.jit(lambda model, batch: model(batch, TIME)[1])(model, BATCH)
    assert_close(routed.aux_loss, jnp.ones(1), "float32")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"top_k": 3}, "top_k is 3, of 3 experts for text and 2 for images; it must be at most the smaller one"),
        ({"width": 20}, "width is 20; the embedding of a patch's place needs a multiple of 8"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"head_dim": 7}, "rotary positions need an even number"),
    ],
)
def test_a_configuration_that_is_none(change, error):
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(CONFIG, **change)


def test_fp8():
    """Near the same model in bfloat16: experts, which are tensorwise, in one product a modality. The loss of three
    patches of a random model scatters: it is 4 to 6 % off, either way."""
    config = dataclasses.replace(CONFIG, width=32, dtype="bfloat16", text_hidden=32, image_hidden=48, layers=1)
    model, key = model_of(config), jax.random.key(0)
    in_fp8 = nnx.eval_shape(lambda: Multimodal(dataclasses.replace(config, recipe="delayed"), rngs=nnx.Rngs(0)))
    nnx.update(in_fp8, jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), nnx.state(in_fp8, AmaxHistory)))
    nnx.update(in_fp8, nnx.state(model, nnx.Param))
    run = nnx.jit(lambda model: loss_fn(model, BATCH, key, image_weight=1.0, time_shift=1.0, reading_noise=0.0)[0])
    assert float(run(in_fp8)) == pytest.approx(float(run(model)), rel=0.1)
    assert float(run(in_fp8)) != float(run(model))
