"""What is proposed, from what was measured; and the measuring."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxops.offload import Policy, Residual, propose, scan
from jaxops.offload.proposals import choose

MEASURED = {  # of a step of 900 us that needs 1,000 bytes: 240 us of copies hide
    "carry": Residual(100, 0.0, 50.0, "recompute"),
    "attention": Residual(200, 150.0, 100.0, "recompute"),
    "mlp": Residual(600, 120.0, 300.0, "recompute"),
    "norm": Residual(100, 10.0, 50.0, "recompute"),
}


@pytest.mark.parametrize(("budget", "choices", "device", "host"), [
    (1900, {"attention": "keep", "mlp": "keep", "norm": "keep"}, 1900, 0),
    (1899, {"carry": "offload", "attention": "keep", "mlp": "keep", "norm": "keep"}, 1800, 100),
    (1700, {"carry": "offload", "attention": "keep", "mlp": "keep", "norm": "offload"}, 1700, 200),
    (1500, {"carry": "offload", "attention": "keep", "norm": "keep"}, 1200, 100),  # mlp neither fits nor hides
    (1050, {"carry": "offload", "attention": "offload", "norm": "keep"}, 1000, 300),
    (950, {"carry": "offload", "attention": "offload", "norm": "offload"}, 900, 400),
])  # fmt: skip
def test_choices(budget, choices, device, host):
    """What saves most for its bytes is kept while it fits, then offloaded while its copies hide."""
    found = choose(MEASURED, 900.0, 1000, budget)
    assert {name: r.choice for name, r in found.residuals.items() if r.choice != "recompute"} == choices
    assert (found.device_bytes, found.host_bytes) == (device, host)
    assert found.step_us == 900 - sum(MEASURED[name].saves_us for name in choices)
    assert all(found.policy.choice(name) == choices.get(name, "recompute") for name in MEASURED)
    assert "as proposed: " in str(found)


def test_kept_and_offloaded_together_with_a_budget():
    """By hand, of 140 bytes of room and 96 us of copies that hide (0.8 of a third of 360 us): by time saved per byte, a
    leaves 40 bytes, b's copy 36 us, c neither fits nor hides, d leaves no byte, and e's copy no time."""
    of = {"a": (100, 200.0, 60.0), "b": (80, 100.0, 60.0), "c": (50, 50.0, 40.0), "d": (40, 20.0, 30.0)}
    of |= {"e": (60, 10.0, 36.0), "f": (1, 0.0, 1.0)}
    found = choose({name: Residual(*sizes, "recompute") for name, sizes in of.items()}, 360.0, 1000, 1140)
    assert found.policy == Policy(keep=("a", "d"), offload=("b", "e"))
    assert (found.device_bytes, found.host_bytes, found.step_us) == (1140, 140, 30.0)


def test_a_copy_that_does_not_hide_is_no_choice():
    slow = {name: Residual(r.bytes, r.saves_us, 1e9, "recompute") for name, r in MEASURED.items()}
    assert choose(slow, 900.0, 1000, 1100).policy == Policy(keep=("norm",))
    assert choose(slow, 900.0, 1000, 1200).policy == Policy(keep=("attention",))


def step(weights, x, *, policy):
    def layer(x, w):
        return x + jnp.tanh(checkpoint_name(x @ w, "product")), None

    return jax.grad(lambda w: jnp.sum(scan(layer, x, w, policy=policy)[0]))(weights)


def test_measures_a_step():
    weights, x = jnp.ones((3, 8, 8)) / 8, jnp.ones((4, 8))
    found = propose(step, weights, x, device_budget=1 << 30, donate_argnums=(0,))
    assert {name: r.bytes for name, r in found.residuals.items()} == {"carry": 3 * 4 * 8 * 4, "product": 3 * 4 * 8 * 4}
    assert not weights.is_deleted()
    assert found.policy.offload == () or jax.default_backend() == "gpu"
    assert found.recompute_bytes >= weights.nbytes


def test_no_policy_fits():
    with pytest.raises(ValueError, match="fits into 100 bytes"):
        propose(step, jnp.ones((3, 8, 8)) / 8, jnp.ones((4, 8)), device_budget=100)


def test_a_step_without_names():
    with pytest.raises(ValueError, match="no values with a checkpoint_name"):
        propose(functools.partial(lambda x, policy: jnp.sin(x)), jnp.ones(3), device_budget=1)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [(-1, ValueError, "device_budget is -1"), (1e9, TypeError, "device_budget is a float")],
)
def test_bad_budgets(budget, error, message):
    with pytest.raises(error, match=message):
        propose(step, jnp.ones((3, 8, 8)), jnp.ones((4, 8)), device_budget=budget)
