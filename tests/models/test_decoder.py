"""The decoder: packed documents do not affect each other, attention is causal, recomputed blocks give the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxops.nn import AmaxHistory
from jaxops.offload import Policy
from models.data.packing import Batch, Documents, build
from models.data.text import Corpus
from models.decoder import Decoder, DecoderConfig, document_starts
from models.decoder.model import within_documents
from models.training import lm as train_lm
from models.training.lm import LmTask
from models.training.loop import Run
from models.training.presets import Preset
from tests.arrays import put
from tests.compare import assert_close
from tests.models.test_decoder_parts import logits_of, model_of

DENSE = DecoderConfig(
    vocab=31, width=12, layers=2, heads=4, kv_heads=2, head_dim=6, hidden=20, qk_norm=True, backend="xla"
)
SPARSE = dataclasses.replace(DENSE, experts=5, top_k=2, tie_embeddings=True, qk_norm=False, policy=Policy())
PLAIN = dataclasses.replace(SPARSE, dtype="bfloat16", qk_norm=True)
TOKENS = put(np.random.default_rng(0).integers(0, 31, (2, 17)), jnp.int32)


@functools.cache
def started(config: DecoderConfig) -> Decoder:
    """As a training starts: FP8 is near bfloat16 while no expert's choice is near another's."""
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()


def histories_of(model: Decoder) -> list[np.ndarray]:
    """How many numbers each layer has written, for each of the four products of attention."""
    found = [
        np.count_nonzero(np.asarray(leaf)[:, 0], axis=1) for leaf in jax.tree.leaves(nnx.state(model, AmaxHistory))
    ]
    assert len(found) == 4
    return found


def in_fp8(plain: Decoder, **options) -> Decoder:
    """The same parameters with delayed scaling, and empty histories."""
    config = dataclasses.replace(plain.config, recipe="delayed", **options)
    graphdef, _, histories = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    empty = jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), histories)
    return nnx.merge(graphdef, nnx.state(plain, nnx.Param), empty)


@pytest.mark.parametrize("unroll", [False, True], ids=["loop", "unrolled"])
def test_fp8(unroll):
    """Close to bfloat16, and not equal; delayed scaling writes histories."""
    plain = started(PLAIN)
    model = in_fp8(plain, unroll=unroll)
    logits, wanted = logits_of(model, TOKENS), logits_of(plain, TOKENS)
    assert 1e-3 < np.linalg.norm(logits - wanted) / np.linalg.norm(wanted) < 0.2
    for layers in histories_of(model):
        np.testing.assert_array_equal(layers, 1)


def test_an_evaluation_writes_no_histories():
    model = in_fp8(started(PLAIN))
    model.eval()
    logits_of(model, TOKENS)
    for layers in histories_of(model):
        np.testing.assert_array_equal(layers, 0)


@pytest.mark.parametrize("config", [DENSE, dataclasses.replace(SPARSE, policy=None)], ids=["dense", "sparse"])
def test_blocks_keep_no_float32_copies_for_the_backward(config):
    """No float32 residual has a vector a token, or a head."""
    config = dataclasses.replace(config, dtype="bfloat16", layers=3)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    backward = jax.eval_shape(
        lambda state: jax.vjp(lambda state: nnx.merge(graphdef, state)(TOKENS)[0], state)[1], state
    )
    stacked = [
        x for x in jax.tree.leaves(backward) if x.shape[:1] == (3,) and x.shape[-1] in (config.width, config.head_dim)
    ]
    vectors = [x for x in stacked if x.size % (3 * TOKENS.size) == 0]
    assert len(vectors) > 5
    assert {str(x.dtype) for x in vectors} == {"bfloat16"}


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("length", [8, 7], ids=["padded", "full"])
def test_there_is_room_for_the_documents_of_every_row(backend, length):
    """Seven documents of one prediction in each row, alone or with padding; by hand, and NaN where one more comes."""
    documents = Documents(np.arange(14, dtype=np.uint8), np.arange(0, 15, 2))
    preset = Preset(DENSE, context=length, batch=2, steps=1, learning_rate=1.0, warmup_steps=0, eval_every=1)
    rows = train_lm.make_rows(preset, documents)
    most = train_lm.with_room(preset, rows).model.max_documents
    assert most == 8
    given = lambda count: dataclasses.replace(preset, model=dataclasses.replace(DENSE, max_documents=count))
    assert [train_lm.with_room(given(count), rows).model.max_documents for count in (3, 20)] == [8, 20]
    batch = train_lm.make_batches(preset, documents, rows)(0)
    numbers = batch.documents[0]
    assert numbers.tolist() == 2 * [[*range(7), -1][:length]]
    nothing = build(documents, rows[0], np.array([-1, -1])).documents
    shapes = ((2, length, 2, 16), (2, length, 1, 16), (2, length, 1, 16))
    q, k, v = (put(np.random.default_rng(i).normal(size=shape), jnp.float32) for i, shape in enumerate(shapes))
    attend = jax.jit(
        lambda numbers, most: within_documents(document_starts(numbers), most, backend)(q, k, v), static_argnums=1
    )
    np.testing.assert_allclose(attend(numbers, most), jnp.broadcast_to(v, q.shape), rtol=1e-6)  # each sees itself
    assert jnp.isfinite(attend(nothing, most)).all()
    assert jnp.isnan(attend(numbers, length - 1)).all()


def test_there_is_room_for_heldout_documents(tmp_path, monkeypatch):
    """One document in a row of the training, seven in one of the evaluation; with padding one more."""
    one, seven = (
        Documents(np.arange(offsets[-1], dtype=np.uint8), offsets)
        for offsets in (np.array([0, 9]), np.arange(0, 15, 2))
    )
    preset = Preset(DENSE, context=8, batch=1, steps=1, learning_rate=1.0, warmup_steps=0, eval_every=1)
    monkeypatch.setattr(train_lm, "LmTask", lambda preset: pytest.fail(f"{preset.model.max_documents}"))
    with pytest.raises(pytest.fail.Exception, match=r"^8$"):
        train_lm.train(preset, Corpus(one, seven), "nats", Run(tmp_path, Console()))


@pytest.mark.gpu
def test_documents_by_kernels():
    """Logits of packed documents are those of XLA's masked attention; with more than max_documents they are NaN."""
    config = DecoderConfig(64, 128, layers=2, heads=4, kv_heads=2, head_dim=64, hidden=64, dtype="bfloat16")
    tokens = jax.random.randint(jax.random.key(0), (3, 256), 0, 64)
    documents = jnp.cumsum(jax.random.bernoulli(jax.random.key(1), 0.02, (3, 256)), axis=1)
    most = int(jnp.max(documents)) + 1

    def logits(**how):
        model = Decoder(dataclasses.replace(config, **how), rngs=nnx.Rngs(0))
        return nnx.jit(lambda model: model(tokens, documents)[0])(model)

    for attention in ("auto", "cudnn"):
        assert_close(logits(attention=attention, max_documents=most), logits(), "bfloat16", scale=4)
        assert jnp.isnan(logits(attention=attention, max_documents=1)).any()
        with pytest.raises(ValueError, match="max_documents must say"):
            logits(attention=attention)


@pytest.mark.parametrize("packed", [True, False])
def test_padding_is_no_text(packed):
    """Two documents of 8 and 5 predictions: the balancing loss, load, loss and gradient of the same tokens do not
    depend on how long the rows are, nor on rows of nothing but padding, which alone give zeros."""
    drawn = np.random.default_rng(3).integers(1, 31, (2, 9))
    config = dataclasses.replace(SPARSE, layers=1, policy=None)
    task = LmTask(Preset(config, 8, 2, steps=1, learning_rate=1e-2, warmup_steps=1, eval_every=1, pack=packed))
    graphdef, params = nnx.split(model_of(config))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params, batch):
        return task.objective(nnx.merge(graphdef, params, copy=True), batch, jax.random.key(0))

    def batch(rows: int, length: int, lengths=(8, 5)) -> Batch:
        made = Batch(*(np.full((rows, length), fill, np.int32) for fill in (0, 0, -1)))
        for row, (tokens, size) in enumerate(zip(drawn, lengths, strict=True)):
            made.tokens[row, :size], made.targets[row, :size] = tokens[:size], tokens[1 : size + 1]
            made.documents[row, :size] = 0
        return jax.tree.map(put, made)

    (loss, measured), gradient = run(params, batch(2, 8))
    choices = 13 * SPARSE.top_k * np.asarray(measured.load)
    np.testing.assert_allclose(choices, np.round(choices), atol=1e-5)  # of 13 tokens, not of 16
    (same, again), also = run(params, batch(5, 20))
    assert_close(same, loss, "float32")
    assert_close(again.balance, measured.balance, "float32")
    np.testing.assert_array_equal(again.load, measured.load)
    for (path, got), wanted in zip(jax.tree.leaves_with_path(also), jax.tree.leaves(gradient), strict=True):
        assert_close(got, wanted, "float32", jax.tree_util.keystr(path), scale=5)
    (loss, measured), gradient = run(params, batch(2, 8, (0, 0)))
    assert (float(loss), float(measured.balance), np.asarray(measured.load).any()) == (0, 0, False)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradient))
