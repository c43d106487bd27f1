"""The rectified flow against formulas: the training objective, the sampler, and the transformer itself."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.data.images import Batch
from models.dit.model import DiT, DiTConfig, generate, loss_fn
from tests.arrays import put
from tests.compare import assert_close

CLASSES = 5


class Stub:
    """Replaces the transformer: `velocity(tokens, time, labels)` of all rows, with each row's time and label.

    `seen` has the arguments of the last call.
    """

    def __init__(self, velocity):
        self.config = types.SimpleNamespace(classes=CLASSES)
        self.velocity, self.seen = velocity, ()

    def __call__(self, tokens, time, labels, sequence_offsets, grids):
        self.seen = tokens, time, labels
        row = jnp.clip(
            jnp.searchsorted(sequence_offsets, jnp.arange(tokens.shape[0]), side="right") - 1, 0, len(labels) - 1
        )
        return self.velocity(tokens, time[row][:, None], labels[row][:, None])


def test_what_is_trained_on():
    """Image and noise, mixed by each image's own time, towards noise - image.

    A tenth of the labels is "any class"; rows outside are not counted.
    """
    rng, B, rows = np.random.default_rng(0), 2000, 9
    offsets = np.r_[0, np.cumsum(rng.integers(1, 4, B))].astype(np.int32)
    end, T = offsets[-1], offsets[-1] + rows
    images = rng.uniform(-1, 1, (T, 4)).astype(np.float32)
    images[end:] = 1e3
    batch = Batch(
        put(images),
        put(offsets),
        jnp.ones((B, 2), jnp.int32),
        put(rng.integers(0, CLASSES, B), jnp.int32),
    )
    model = Stub(lambda tokens, time, labels: 0.5 * tokens + time - 0.1 * labels)
    loss, *seen = jax.jit(lambda batch: (loss_fn(model, batch, jax.random.key(1)), *model.seen))(batch)
    tokens, time, labels = map(np.asarray, seen)

    at = np.repeat(time, np.diff(offsets))[:, None].astype(np.float64)
    noise = (tokens[:end] - (1 - at) * images[:end]) / at
    velocity = 0.5 * tokens[:end] + at - 0.1 * np.repeat(labels, np.diff(offsets))[:, None]
    np.testing.assert_allclose(loss, np.mean((velocity - (noise - images[:end])) ** 2), rtol=1e-4)

    logits = np.log(time / (1 - time))  # normal, as the noise is
    for name, values in {"time": logits, "noise": noise}.items():
        moments = [np.mean(values**power) for power in (1, 2, 4)]
        np.testing.assert_allclose(moments, [0, 1, 3], atol=12 / np.sqrt(len(values)) * 1.2, err_msg=name)
    per_image = np.add.reduceat(noise[:, 0], offsets[:-1])
    assert np.abs(np.corrcoef([logits, per_image, labels])[np.triu_indices(3, 1)]).max() < 0.1, (
        "drawn with keys of their own"
    )
    dropped = labels == CLASSES
    assert 0.07 < dropped.mean() < 0.13
    np.testing.assert_array_equal(labels[~dropped], np.asarray(batch.labels)[~dropped])


def drawn(velocity, steps: int, guidance: float) -> tuple[np.ndarray, np.ndarray]:
    """(noise, what is drawn from it) of three images with labels 3, 0 and 4."""
    offsets, labels = jnp.array([0, 2, 3, 7], jnp.int32), jnp.array([3, 0, 4], jnp.int32)
    batch = Batch(jnp.full((7, 2), jnp.nan), offsets, jnp.ones((3, 2), jnp.int32), labels)
    out = jax.jit(lambda batch: generate(Stub(velocity), batch, jax.random.key(2), steps, guidance))(batch)
    return np.asarray(jax.random.normal(jax.random.key(2), (7, 2))), np.asarray(out)


def test_from_noise_to_image():
    """Along velocities linear in time a trapezoidal step is exact: x at 0 is x at 1 minus the integral of the velocity.

    The velocity is guided away from any class.
    """
    velocity = lambda tokens, time, labels: 2 * time * jnp.where(labels == CLASSES, 1.0, 2.0 + labels) + 0 * tokens
    noise, out = drawn(velocity, 4, 1.5)
    label = np.array([3, 3, 0, 4, 4, 4, 4])[:, None]
    np.testing.assert_allclose(out, noise - (1 + 1.5 * (2.0 + label - 1)), rtol=1e-5, atol=1e-5)


def test_steps_are_heuns():
    """Of x' = x a step of size h, back in time, multiplies with 1 - h + h^2 / 2."""
    noise, out = drawn(lambda tokens, time, labels: tokens, 3, 1.0)
    np.testing.assert_allclose(out, noise * (1 - 1 / 3 + 1 / 18) ** 3, rtol=1e-5)


def plain_dit(
    params: dict, config: DiTConfig, tokens: np.ndarray, time: float, label: int, grid: tuple[int, int]
) -> np.ndarray:
    """Of one image, in float64: Peebles & Xie's transformer, with adaLN-Zero."""
    width = config.width
    dense = lambda p, x: x @ p["kernel"] + p["bias"]
    silu = lambda x: x / (1 + np.exp(-x))
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def encode(x, features, longest):
        wavelengths = 2 * np.pi * (longest / (2 * np.pi)) ** (np.arange(features // 2) / (features // 2 - 1))
        return np.concatenate([np.sin(2 * np.pi * x / wavelengths), np.cos(2 * np.pi * x / wavelengths)])

    def norm(x, scale, shift):
        x = x - x.mean(axis=1, keepdims=True)
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * (1 + scale) + shift

    def attention(p, y):
        q, k, v = dense(p["qkv"], y).reshape(-1, config.heads, 3, width // config.heads).transpose(2, 1, 0, 3)
        scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(width // config.heads))
        return dense(p["out"], (scores / scores.sum(axis=2, keepdims=True) @ v).transpose(1, 0, 2).reshape(-1, width))

    steps = params["time"]["layers"]
    cond = (
        dense(steps[2], silu(dense(steps[0], encode(1000 * time, width, 60_000.0))))
        + params["label"]["embedding"][label]
    )
    rows, columns = grid
    places = [(r, c, rows - 1 - r, columns - 1 - c) for r in range(rows) for c in range(columns)]
    x = dense(params["enter"], tokens) + np.array(
        [np.concatenate([encode(edge, width // 4, 100.0) for edge in place]) for place in places]
    )
    for i in range(config.layers):
        p = jax.tree.map(lambda stack, i=i: stack[i], params["blocks"])
        scale1, shift1, gate1, scale2, shift2, gate2 = np.split(dense(p["modulation"], silu(cond)), 6)
        x = x + gate1 * attention(p["mixer"], norm(x, scale1, shift1))
        wide = gelu(dense(p["mlp"]["wide"], norm(x, scale2, shift2)))
        x = x + gate2 * dense(p["mlp"]["narrow"], wide)
    return dense(params["leave"], norm(x, *np.split(dense(params["norm"]["modulation"], silu(cond)), 2)))


def test_the_transformer():
    """Three packed images with random parameters, each beside a plain transformer of its own."""
    config = DiTConfig(layers=2, width=16, heads=2, token=4, classes=CLASSES, longest=9, backend="xla")
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.tree.map(lambda p: put(rng.normal(size=p.shape) / 4, p.dtype), nnx.state(model)))
    grids, times, labels = ((2, 3), (3, 3), (1, 4)), (0.2, 0.9, 0.5), (4, CLASSES, 0)
    offsets = np.array([0, 6, 15, 19], np.int32)
    tokens = rng.normal(size=(21, 4)).astype(np.float32)
    run = nnx.jit(lambda model, *given: model(*given))
    with jax.default_matmul_precision("highest"):
        out = run(model, tokens, jnp.array(times), jnp.array(labels, jnp.int32), offsets, jnp.array(grids, jnp.int32))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        wanted = plain_dit(params, config, tokens[start:end].astype(np.float64), times[i], labels[i], grids[i])
        assert_close(
            out[start:end], wanted, "float32", f"image {i}", scale=30
        )  # of an angle of 1000 t float32 has three digits less
