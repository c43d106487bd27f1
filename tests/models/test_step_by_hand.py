"""The training step against explicit arithmetic: objective, keys, schedule, clipping, AdamW, average, evaluation."""

import dataclasses
import io
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from models.data.packing import Documents
from models.data.text import Corpus
from models.training import lm as train_lm
from models.training import loop
from models.training.loop import Measured, Run, make_evaluate, make_step
from models.training.presets import Preset, of_bytes, rates
from models.training.schedule import Schedule

STEPS, PENALTY = 12, 0.05
# Trained past its end; ema is reached after step 3, and some of the gradients are clipped.
SCHEDULE = Schedule(weight_decay=0.3, clip_norm=4.0, accumulate=2, ema=0.3, **rates(10, 0.1, 3, 5))


class Points(NamedTuple):
    """Micro-batches of x [A, N], of which some points are counted."""

    x: Any
    there: Any

    def counted(self):
        return jnp.sum(self.there, dtype=jnp.int32)

    @property
    def size(self) -> int:
        return self.x.size


class Line(loop.Task):
    def model(self, rngs, *, sharded=False):
        return nnx.Linear(1, 1, rngs=rngs)

    def objective(self, model, batch, key):
        """Squared error against 3 x plus a random number, and a penalty that is not in the measured loss."""
        error = model(batch.x[:, None])[:, 0] - (3 * batch.x + jax.random.normal(key))
        loss = jnp.sum(jnp.where(batch.there, error**2, 0)) / jnp.sum(batch.there)
        return loss + PENALTY * jnp.sum(model.kernel[...] ** 2), Measured(loss)


def points(seed: int, parts: int = 2) -> Points:
    """Each micro-batch counts different points."""
    rng = np.random.default_rng(seed)
    return Points(
        rng.normal(size=(parts, 6)).astype(np.float32), np.arange(6)[None, :] < np.array([2, 6, 3])[:parts, None]
    )


def line() -> tuple[Any, nnx.State, nnx.State]:
    return nnx.split(Line(SCHEDULE).model(nnx.Rngs(0)), nnx.Param, ...)


def numbers(params: nnx.State) -> np.ndarray:
    """The kernel's and the bias's, float64; without a bias that is not there."""
    pure: Any = nnx.to_pure_dict(params)
    return np.array([pure["kernel"][0, 0], *pure.get("bias", [])], np.float64)


def rate_at(step: int) -> float:
    """Linear from 0 to the peak, then a cosine to a twentieth of it at the last step."""
    if step < 3:
        return 0.1 * step / 3
    return 0.1 * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * min(1, (step - 3) / (10 - 3)))))


@pytest.mark.parametrize("freeze", [(), ("bias",)])
def test_steps(freeze):
    """Kernel, bias, their average and the metrics of twelve steps of two micro-batches, in numpy and float64.

    A frozen bias stays, and is neither in the norm of the gradient nor in the average.
    """
    graphdef, params, rest = line()
    w, trained = numbers(params), np.array([1, not freeze])
    schedule, key = dataclasses.replace(SCHEDULE, freeze=freeze), jax.random.key(7)
    state, step = loop.init_state(schedule, params, rest), make_step(graphdef, Line(schedule))
    mean, square, average, drawn, clipped = np.zeros(2), np.zeros(2), w.copy(), [], []
    for number in range(STEPS):
        batch = points(number)
        draws = [float(jax.random.normal(k)) for k in jax.random.split(jax.random.fold_in(key, number), 2)]
        drawn += draws
        x, target, there = batch.x.astype(np.float64), 3.0 * batch.x + np.array(draws)[:, None], batch.there
        error = np.where(there, w[0] * x + w[1] - target, 0)
        gradient = 2 * np.array([(error * x).sum(), error.sum()]) / there.sum() + np.array([2 * PENALTY * w[0], 0])
        gradient *= trained
        norm, rate = np.linalg.norm(gradient), rate_at(number)

        state, metrics = step(state, jax.tree.map(jnp.asarray, batch), key)
        wanted = {
            "loss": (error**2).sum() / there.sum(),
            "tokens": 8,
            "fill": 8 / 12,
            "learning_rate": rate,
            "gradient_norm": norm,
        }
        for name, value in wanted.items():
            np.testing.assert_allclose(getattr(metrics, name), value, rtol=1e-4, err_msg=f"{name} of step {number}")

        clipped.append(norm > 4)
        gradient *= min(1, 4 / norm)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        adam = mean / (1 - 0.9 ** (number + 1)) / (np.sqrt(square / (1 - 0.98 ** (number + 1))) + 1e-8)
        w = w - rate * trained * (adam + 0.3 * np.array([w[0], 0]))  # the bias is not decayed
        keep = min(0.3, (1 + number) / (10 + number))
        average = keep * average + (1 - keep) * w
        np.testing.assert_allclose(numbers(state.params), w, rtol=1e-4, err_msg=f"step {number}")
        np.testing.assert_allclose(numbers(state.average), average[trained > 0], rtol=1e-4, err_msg=f"step {number}")
    assert len({*drawn}) == 2 * STEPS, "every micro-batch of every step has a key of its own"
    assert {True, False} == {*clipped}
    assert int(state.step) == STEPS


def test_evaluation():
    """The measured loss, not the minimized one, with equal weights of all points.

    Every micro-batch has its own random draws, every evaluation the same ones.
    """
    graphdef, params, rest = line()
    w, key, batches = numbers(params), jax.random.key(3), points(5, parts=3)
    evaluate = make_evaluate(graphdef, Line(SCHEDULE))
    draws = np.array([float(jax.random.normal(k)) for k in jax.random.split(key, 3)])[:, None]
    error = np.where(batches.there, w[0] * batches.x + w[1] - (3 * batches.x + draws), 0)
    for _ in range(2):
        np.testing.assert_allclose(
            evaluate(params, rest, jax.tree.map(jnp.asarray, batches), key), (error**2).sum() / 11, rtol=1e-5
        )


def test_an_evaluation_is_in_evaluation_mode():
    """A dropout layer zeroes half of its input in training, nothing in evaluation."""
    graphdef, params, rest = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Param, ...)

    class ShareOfZeros(loop.Task):
        def objective(self, model, batch, key):
            loss = jnp.mean(model(batch.x, rngs=key) == 0)
            return loss, Measured(loss)

    task = ShareOfZeros(SCHEDULE)
    batches = Points(jnp.ones((1, 1000)), jnp.ones((1, 1000), bool))
    assert make_evaluate(graphdef, task)(params, rest, batches, jax.random.key(0)) == 0
    value = jax.jit(loop.make_value(graphdef, task.objective, None, training=True))
    assert 0.4 < value(params, rest, jax.tree.map(lambda x: x[0], batches), jax.random.key(0))[0] < 0.6


SPARSE = dataclasses.replace(of_bytes(layers=2, width=8, heads=2, experts=4, top_k=2, hidden=8), backend="xla")
TINY = Preset(
    SPARSE, context=16, batch=4, eval_windows=99, ema=0.9, pack=False, buckets=1, balance_weight=0.5,
    **rates(3, 0.1, 1, 3),
)  # fmt: skip


def text(start: int, count: int) -> Documents:
    """Documents of 5 to 16 tokens from `start` to `start + 99`."""
    rng = np.random.default_rng(start)
    lengths = rng.integers(5, 17, count)
    return Documents((start + rng.integers(0, 100, lengths.sum())).astype(np.uint8), np.cumsum([0, *lengths]))


CORPUS = Corpus(text(0, 40), text(128, 12))


def test_the_objective_of_a_language_model():
    """optax's cross-entropy without padding, and the weighted mean of the layers' balancing losses."""
    batch = train_lm.heldout_batches(TINY, CORPUS.heldout)
    batch = jax.tree.map(lambda x: jnp.asarray(x[-1]), batch)
    inside = np.asarray(batch.documents) >= 0
    assert 0 < inside.sum() < inside.size
    task = train_lm.LmTask(TINY)
    graphdef, state = loop.first_state(task)
    model = nnx.merge(graphdef, state.params, state.histories)
    logits, routed = nnx.jit(lambda model: model(batch.tokens, batch.documents))(model)
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.astype(jnp.int32))[inside].mean()
    loss, measured = nnx.jit(lambda model: task.heldout_objective(model, batch, jax.random.key(0)))(model)
    np.testing.assert_allclose(measured.loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(measured.balance, np.mean(routed.aux_loss), rtol=1e-5)
    np.testing.assert_allclose(loss, wanted + 0.5 * np.mean(routed.aux_loss), rtol=1e-5)
    assert np.mean(routed.aux_loss) > 0.9
    np.testing.assert_allclose(measured.load, routed.load / (2 * inside.sum()), rtol=1e-5)


class Seen(NamedTuple):
    """What the steps got, the average that they left, the losses of evaluations, and the returned model."""

    params: Any
    batches: list
    key: np.ndarray
    average: Any
    heldout: list
    model: Any


def train_seen(monkeypatch, out, preset: Preset) -> Seen:
    """Without compiled steps: the first one sets the average to other parameters."""
    seen: dict[str, Any] = {"batches": []}

    def step(state, batch, key):
        host = jax.device_get(state.params)
        average = jax.tree.map(lambda p: p + 0.1 * np.cos(np.arange(p.size, dtype=p.dtype)).reshape(p.shape), host)
        seen["batches"].append(jax.device_get(batch))
        seen.update(params=host, key=jax.device_get(jax.random.key_data(key)), average=average)
        zero = jax.device_put(np.float32(0))
        return state._replace(average=jax.device_put(average)), loop.Metrics(zero, None, None, *4 * [zero])

    monkeypatch.setattr(loop, "make_step", lambda *_: step)
    model, history = train_lm.train(preset, CORPUS, "nats", Run(out, Console(file=io.StringIO())))
    return Seen(**seen, heldout=history.heldout, model=model)


def same(one: Any, other: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), one, other)))


def test_the_averaged_language_model_is_evaluated_and_kept(monkeypatch, tmp_path):
    """On the held-out documents, packed into rows, independent of each other."""
    seen = train_seen(monkeypatch, tmp_path, TINY)
    params = nnx.state(seen.model, nnx.Param)
    assert same(params, seen.average)
    ends = CORPUS.heldout.offsets
    alone = np.zeros((len(ends) - 1, 16), np.int32)
    for row, start, end in zip(alone, ends[:-1], ends[1:], strict=True):
        row[: end - start] = CORPUS.heldout.tokens[start:end]
    log_probs = np.asarray(nnx.jit(lambda model: jax.nn.log_softmax(model(alone)[0]))(seen.model))
    nats = [
        -log_probs[row, i, alone[row, i + 1]] for row, length in enumerate(np.diff(ends)) for i in range(length - 1)
    ]
    assert [step for step, _ in seen.heldout] == [1, 3]
    np.testing.assert_allclose([loss for _, loss in seen.heldout], np.mean(nats), rtol=1e-4)


def test_what_a_run_draws_from_its_seed(monkeypatch, tmp_path):
    """Parameters, batches and keys; it trains on data that is not held out."""
    zero, again, one = (train_seen(monkeypatch, tmp_path, dataclasses.replace(TINY, seed=seed)) for seed in (0, 0, 1))
    drawn = lambda seen: (seen.params, seen.key, seen.batches)
    assert same(drawn(zero), drawn(again))
    assert not any(same(mine, other) for mine, other in zip(drawn(zero), drawn(one), strict=True))
    assert all(batch.tokens.max() < 100 and batch.counted() > 0 for batch in zero.batches)
