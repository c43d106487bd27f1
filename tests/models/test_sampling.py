"""Draws are as likely as temperature, top_k and top_p say, and depend on a row's own key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate.sampling import Sampling, likeliest, pick

ROWS = 4000


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(2.0, 0, 0.7), (0.4435, 0.3136, 0.2429, 0)),  # 0.370, 0.262 and 0.203 of all; at 1: 0.5 and 0.25
        (Sampling(0.5, 0, 0.7), (1, 0, 0, 0)),  # 0.725
        (Sampling(2.0, 2, 0.55), (1, 0, 0, 0)),  # 0.586 of two, 0.370 of all
        (Sampling(2.0, 3, 0.75), (0.5858, 0.4142, 0, 0)),  # 0.443 and 0.314 of three, 0.370 and 0.262 of all
        (Sampling(1e-6, 0, 0.999), (1, 0, 0, 0)),
        (Sampling(1e30), (0.25, 0.25, 0.25, 0.25)),
    ],
    ids=str,
)
def test_temperature_then_top_k_then_top_p(sampling, wanted):
    """By hand, of probabilities 0.5, 0.25, 0.15 and 0.1: at 2 their square roots count, at 0.5 their squares."""
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1])) + 30, (ROWS, 4))
    drawn = np.asarray(pick(logits, jax.random.split(jax.random.key(1), ROWS), sampling))
    frequency = np.bincount(drawn, minlength=4) / ROWS
    np.testing.assert_array_equal(frequency > 0, np.array(wanted) > 0)
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-7}, "temperature is 1e-07; it must be 0, or 1e-06 or more"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 1e-50}, "top_p is 1e-50"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
    ],
)
def test_what_is_wrong(given, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**given)
