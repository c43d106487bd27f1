"""Which choice a policy makes for a name."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxops.offload import Policy, policy

SIZES = {"moe_mlp.gate": 30, "moe_mlp.up": 30, "moe_mlp_2": 1, "adaln.out": 10, "router": 5}


def test_one_line():
    found = policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})
    assert [found.choice(name) for name in (*SIZES, "another")] == ["offload", "offload", "recompute", "recompute", "keep", "recompute"]
    assert {found: 1}[Policy(keep=("router",), offload=("moe_mlp",))] == 1


@pytest.mark.parametrize(("budget", "offloaded"), [(None, {"moe_mlp.gate", "moe_mlp.up", "adaln.out"}), (70, {"moe_mlp.gate", "moe_mlp.up", "adaln.out"}),
                                                   (69, {"moe_mlp.gate", "moe_mlp.up"}), (45, {"moe_mlp.gate", "adaln.out"}), (0, set())])  # fmt: skip
def test_budget(budget, offloaded):
    """In the names' order, as long as they fit."""
    found = policy({"moe_mlp": "offload", "adaln": "offload", "router": "keep"}, budget_bytes=budget, sizes=SIZES)
    assert {name for name in SIZES if found.choice(name) == "offload"} == offloaded
    assert [found.choice(name) for name in ("router", "moe_mlp_2")] == ["keep", "recompute"]


def test_a_longer_name_is_for_its_own_values():
    found = policy({"moe_mlp": "offload", "moe_mlp.gate": "keep"}, sizes=SIZES)
    assert (found.choice("moe_mlp.gate"), found.choice("moe_mlp.up")) == ("keep", "offload")


@pytest.mark.parametrize(("names", "options", "message"), [
    ({"a": "ofload"}, {}, "'ofload'; it must be one of 'keep', 'offload', 'recompute'"),
    ({"a": "offload"}, {"budget_bytes": 3}, "budget_bytes is given, and that needs sizes"),
    ({"a": "offload", "a.b": "keep"}, {}, "'a.b' stands under another name"),
    ({"moe": "offload"}, {"sizes": SIZES}, "no value is called 'moe'; the names are adaln.out, "),
])  # fmt: skip
def test_bad_input(names, options, message):
    with pytest.raises(ValueError, match=message):
        policy(names, **options)


def test_a_name_that_is_kept_and_offloaded():
    """It is offloaded, whichever of the two covers it by a longer name."""
    both = Policy(keep=("moe_mlp.gate", "adaln", "router"), offload=("moe_mlp", "adaln.out", "router"))
    assert {name: both.choice(name) for name in ("moe_mlp.gate", "moe_mlp.up", "adaln.out", "adaln.in", "router")} == {
        "moe_mlp.gate": "offload",
        "moe_mlp.up": "offload",
        "adaln.out": "offload",
        "adaln.in": "keep",
        "router": "offload",
    }
    assert {both.on_device().choice(name) for name in ("moe_mlp.up", "adaln.out", "router")} == {"keep"}


def test_in_jax_checkpoint():
    """It is a policy of JAX's own."""

    def f(x):
        return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(jnp.sin(x), "first")), "second"))

    def spaces(policy):
        closed = jax.make_jaxpr(lambda x: jax.vjp(jax.checkpoint(f, policy=policy), x)[1])(jnp.ones(3))
        return sorted(aval.memory_space.name for aval in closed.out_avals)

    assert spaces(Policy(keep=("first",), offload=("second",))) == ["Device", "Device", "Host"]  # x, which the first sine's gradient needs, is the third
    assert spaces(Policy()) == ["Device"]
