"""Draws are as likely as temperature, top_k and top_p say, and depend on a row's own key."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Sampling, likeliest, pick

CHANCES = np.array([0.1, 0.05, 0.4, 0.25, 0.2])
ROWS = 4000


def left(chances: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities of one row, token by token."""
    scaled = chances ** (1 / sampling.temperature)
    scaled /= scaled.sum()
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = order[: sampling.top_k or None]
    within = scaled[order] / scaled[order].sum()
    count = next(n for n in range(1, len(order) + 1) if n == len(order) or within[:n].sum() >= sampling.top_p)
    found = np.zeros_like(scaled)
    found[order[:count]] = scaled[order[:count]]
    return found / found.sum()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(*given) for given in ((1.0,), (0.5,), (3.0,), (1.0, 3), (2.0, 0, 0.7), (0.7, 4, 0.6), (1.0, 1), (1.0, 9))]
    + [Sampling(1.0, top_p=1e-9), Sampling(1.0, top_p=0.39), Sampling(1.0, top_p=0.95)],
)
def test_frequencies(sampling):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(CHANCES, jnp.float32))[None, :], (ROWS, 5))
    drawn = np.asarray(pick(logits, jax.random.split(jax.random.key(0), ROWS), sampling))
    wanted = left(CHANCES, sampling)
    frequency = np.bincount(drawn, minlength=5) / ROWS
    np.testing.assert_array_equal(frequency > 0, wanted > 0)
    np.testing.assert_allclose(frequency, wanted, atol=0.03)


def test_the_likeliest_token():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, -jnp.inf, -1.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    np.testing.assert_array_equal(pick(logits, keys, Sampling(0.0, 1, 0.3)), [1, 0])


def test_equally_likely_tokens_are_left_together():
    logits = jnp.log(jnp.array([[0.3, 0.3, 0.3, 0.1]]))
    for sampling in (Sampling(1.0, 1), Sampling(1.0, 2), Sampling(1.0, top_p=0.5)):
        np.testing.assert_array_equal(likeliest(logits, sampling) > -jnp.inf, [[True, True, True, False]])


def test_a_row_is_drawn_with_its_own_key():
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    keys, sampling = jax.random.split(jax.random.key(0), 6), Sampling(1.5, 20, 0.95)
    drawn = np.asarray(pick(logits, keys, sampling))
    for order in ((5, 4, 3, 2, 1, 0), (2,)):
        chosen = np.array(order)
        np.testing.assert_array_equal(pick(logits[chosen], keys[chosen], sampling), drawn[chosen])
    same = pick(jnp.broadcast_to(logits[:1], (6, 50)), keys, sampling)
    assert len(set(np.asarray(same).tolist())) > 1


def test_independence_of_places():
    """Draws with keys folded from positions do not follow from each other."""
    keys = jax.random.split(jax.random.key(0), ROWS)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(CHANCES, jnp.float32))[None, :], (ROWS, 5))
    places = [jax.vmap(lambda key, at=at: jax.random.fold_in(key, at))(keys) for at in range(3)]
    drawn = np.stack([np.asarray(pick(logits, own, Sampling(1.0))) for own in places])
    assert max(abs(np.corrcoef(drawn[i], drawn[j])[0, 1]) for i, j in itertools.combinations(range(3), 2)) < 0.06


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
    ],
)
def test_what_is_wrong(given, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**given)
