"""Which choice a policy makes for a name."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxops
from jaxops.offload import Policy, policy, scan

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(("names", "choices"), [
    ({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"},
     {"moe_mlp.gate": "offload", "moe_mlp_2": "recompute", "adaln.out": "recompute", "router": "keep",
      "another": "recompute"}),
    ({"moe_mlp": "offload", "moe_mlp.gate": "keep", "moe_mlp.gate.x": "recompute"},
     {"moe_mlp.gate": "keep", "moe_mlp.gate.x": "recompute", "moe_mlp.up": "offload"}),
    ({"adaln": "keep", "adaln.out": "offload"}, {"adaln.out": "offload", "adaln.in": "keep"}),
])  # fmt: skip
def test_the_longest_name_decides(names, choices):
    found = policy(names)
    assert {name: found.choice(name) for name in choices} == choices
    on_device = {name: "keep" if choice == "offload" else choice for name, choice in choices.items()}
    assert {name: found.on_device().choice(name) for name in choices} == on_device


def test_of_lists():
    """As configurations read from files have them; and hashable."""
    assert {Policy(["a"], ["b"]): 1}[policy({"a": "keep", "b": "offload"})] == 1  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: policy({"a": "ofload"}), ValueError, "'ofload'; it must be one of 'keep', 'offload', 'recompute'"),
    (lambda: policy({"moe_mlp.": "keep"}), ValueError, r"names has the name 'moe_mlp\.'"),
    (lambda: policy({3: "keep"}), TypeError, "names has 3, an int; names are strings"),
    (lambda: policy(["carry"]), TypeError, "names is a list; write a choice for each name"),
    (lambda: Policy(("carry",), ("carry",)), ValueError, r"'carry' is in Policy\(.* twice"),
    (lambda: Policy(("carry",), recompute=("carry",)), ValueError, "'carry' is in .* twice"),
    (lambda: Policy("carry"), TypeError, r"keep is a str; write a tuple of names, as in Policy\(keep="),
    (lambda: Policy((), {"carry": 1}), TypeError, "offload is a dict"),
    (lambda: Policy((), (b"carry",)), TypeError, "offload has b'carry', a bytes"),
    (lambda: Policy(recompute=(".gate",)), ValueError, r"recompute has the name '\.gate'"),
])  # fmt: skip
def test_bad_policies(make, error, message):
    with pytest.raises(error, match=message):
        make()


def of_mine(x, w):
    """A layer with its own names, one of which JAX drops, because no gradient needs it."""
    hidden = checkpoint_name(x @ w, "mine.hidden")
    return checkpoint_name(x + jnp.tanh(hidden), "not_needed"), None


def of_an_op(x, w):
    """A layer whose names exist only under differentiation."""
    return x + jaxops.grouped_glu(x, w[None], w[None], jnp.array([0, 3], jnp.int32), backend="xla"), None


X, WS = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.ones((2, 4, 4)) / 4


def gradient(body, policy):
    return jax.eval_shape(jax.grad(lambda x: jnp.sum(scan(body, x, WS, policy=policy)[0])), X)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (of_mine, ("carry", "mine", "not_needed")),
        (of_mine, ("mine.hidden",)),
        (of_mine, ("moe_mlp", "adaln.stats", "router")),  # of another layer: one policy for both
        (of_an_op, ("carry", "grouped_glu.gate", "grouped_glu")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_known_names(body, names):
    for by in (Policy(keep=names), Policy(offload=names)):
        gradient(body, by)
        by.check(body, X, WS[0])


@pytest.mark.parametrize(("body", "name", "message"), [
    (of_mine, "carrry", "no value of body .* Did you mean 'carry'. Its names are carry, mine.hidden, not_needed"),
    (of_mine, "mine.hiden", "'mine.hiden', .* Did you mean 'mine.hidden'"),
    (of_mine, "min", "'min', .* Did you mean 'mine'"),
    (of_mine, "hidden", "'hidden', .* Its names are"),
    (of_an_op, "grouped_glu.gat", "'grouped_glu.gate'.* Its names are carry, grouped_glu.gate, grouped_glu.out"),
    (of_an_op, "moe_mpl", "'moe_mpl', .* Did you mean 'moe_mlp'"),
    (of_an_op, "mine", "no value of body"),
])  # fmt: skip
def test_a_name_that_no_value_has(body, name, message):
    """The error is raised when a loop is differentiated, or by policy.check."""
    for by in (Policy(keep=(name,)), Policy(keep=("grouped_glu",), offload=("carry", name))):
        with pytest.raises(ValueError, match=message):
            gradient(body, by)
        with pytest.raises(ValueError, match=f"{name!r}, but no value of the function"):
            by.check(body, X, WS[0])
    scan(body, X, WS, policy=Policy(keep=(name,)))  # without a gradient a policy has nothing to say


def test_a_policy_of_another_kind():
    with pytest.raises(TypeError, match=r"policy is a function; pass a jaxops\.offload\.Policy"):
        gradient(of_mine, jax.checkpoint_policies.nothing_saveable)


def test_in_jax_checkpoint():
    """It works as a policy of jax.checkpoint."""

    def f(x):
        return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(jnp.sin(x), "first")), "second"))

    def spaces(policy):
        closed = jax.make_jaxpr(lambda x: jax.vjp(jax.checkpoint(f, policy=policy), x)[1])(jnp.ones(3))
        return sorted(aval.memory_space.name for aval in closed.out_avals)

    assert spaces(Policy(keep=("first",), offload=("second",))) == [
        "Device",
        "Device",
        "Host",
    ]  # x, which the first sine's gradient needs, is the third
    assert spaces(Policy()) == ["Device"]
