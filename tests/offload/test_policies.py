"""Which choice a policy makes for a name."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxops
from jaxops.offload import Policy, policy, scan

pytestmark = pytest.mark.versions

SIZES = {"moe_mlp.gate": 30, "moe_mlp.up": 30, "moe_mlp_2": 1, "adaln.out": 10, "router": 5}


def test_one_line():
    found = policy({"moe_mlp": "offload", "adaln": "recompute", "router": "keep"})
    assert [found.choice(name) for name in (*SIZES, "another")] == [
        "offload",
        "offload",
        "recompute",
        "recompute",
        "keep",
        "recompute",
    ]
    assert {found: 1}[Policy(keep=("router",), offload=("moe_mlp",))] == 1


@pytest.mark.parametrize(
    ("budget", "keep", "offload"),
    [  # "d" has 40, "a" 50, "e" 10 bytes; kept ones are no part of the budget
        (None, ("b.x", "b.y", "c"), ("d", "a", "e")),
        (99, ("b.x", "b.y", "c"), ("d", "a")),
        (60, ("b.x", "b.y", "c"), ("d", "e")),
        (50, ("b.x", "b.y", "c"), ("d", "e")),
        (49, ("b.x", "b.y", "c"), ("d",)),
        (39, ("b.x", "b.y", "c"), ("e",)),
        (9, ("b.x", "b.y", "c"), ()),
    ],
)
def test_kept_and_offloaded_together_with_a_budget(budget, keep, offload):
    """The choices by hand."""
    sizes = {"a": 50, "b.x": 1000, "b.y": 7, "c": 60, "d": 40, "e": 10, "f": 1}
    choices = {"d": "offload", "b": "keep", "a": "offload", "c": "keep", "e": "offload", "f": "recompute"}
    assert policy(choices, budget_bytes=budget, sizes=sizes) == Policy(keep, offload)


def test_a_longer_name_is_for_its_own_values():
    found = policy({"moe_mlp": "offload", "moe_mlp.gate": "keep"}, sizes=SIZES)
    assert (found.choice("moe_mlp.gate"), found.choice("moe_mlp.up")) == ("keep", "offload")


@pytest.mark.parametrize(("names", "options", "message"), [
    ({"a": "ofload"}, {}, "'ofload'; it must be one of 'keep', 'offload', 'recompute'"),
    ({"a": "offload"}, {"budget_bytes": 3}, "budget_bytes needs sizes"),
    ({"a": "offload", "a.b": "keep"}, {}, "another name covers 'a.b' too"),
    ({"moe": "offload"}, {"sizes": SIZES}, "no value is called 'moe'; the names are adaln.out, "),
    ({"adalm": "offload"}, {"sizes": SIZES}, "no value is called 'adalm'.* Did you mean 'adaln'"),
    ({"router": "keep"}, {"sizes": SIZES, "budget_bytes": -1}, "budget_bytes is -1; it must be at least 0"),
    ({"router": "keep"}, {"sizes": {"router": -5}}, r"sizes\['router'\] is -5; it must be at least 0"),
    ({"": "keep"}, {}, "names has the name ''"),
    ({"moe_mlp.": "keep"}, {}, r"names has the name 'moe_mlp\.'"),
])  # fmt: skip
def test_bad_input(names, options, message):
    with pytest.raises(ValueError, match=message):
        policy(names, **options)


def test_a_name_that_is_kept_and_offloaded():
    """A longer name may be offloaded where a shorter one is kept. The reverse would have no effect, and is an error."""
    both = Policy(keep=("adaln", "router"), offload=("moe_mlp", "adaln.out"))
    assert {name: both.choice(name) for name in ("moe_mlp.up", "adaln.out", "adaln.in", "router")} == {
        "moe_mlp.up": "offload",
        "adaln.out": "offload",
        "adaln.in": "keep",
        "router": "keep",
    }
    assert {both.on_device().choice(name) for name in ("moe_mlp.up", "adaln.out", "router")} == {"keep"}


@pytest.mark.parametrize(("names", "options", "message"), [
    ("carry", {}, "names is a str; write a choice for each name"),
    (["carry"], {}, "names is a list"),
    ({3: "keep"}, {}, "names has 3, an int; names are strings"),
    ({"router": "offload"}, {"sizes": SIZES, "budget_bytes": 1e9}, "budget_bytes is a float; it must be a"),
    ({"router": "offload"}, {"sizes": SIZES, "budget_bytes": True}, "budget_bytes is a bool"),
    ({"router": "offload"}, {"sizes": SIZES, "budget_bytes": "8GB"}, "budget_bytes is a str"),
    ({"router": "offload"}, {"sizes": 5}, "sizes is an int; pass sizes=jaxops.offload.residual_bytes"),
    ({"router": "offload"}, {"sizes": {"router": 0.5}}, r"sizes\['router'\] is a float"),
])  # fmt: skip
def test_bad_types(names, options, message):
    with pytest.raises(TypeError, match=message):
        policy(names, **options)


@pytest.mark.parametrize(("keep", "offload", "error", "message"), [
    (("carry",), ("carry",), ValueError, r"'carry' is in keep, and offload=\('carry',\) covers it too"),
    (("router", "moe_mlp.gate"), ("moe_mlp",), ValueError, "'moe_mlp.gate' is in keep, and offload="),
    ("carry", (), TypeError, r"keep is a str; write a tuple of names, as in Policy\(keep="),
    ((), "carry", TypeError, "offload is a str"),
    ((), {"carry": 1}, TypeError, "offload is a dict"),
    ((), (b"carry",), TypeError, "offload has b'carry', a bytes"),
    (("",), (), ValueError, "keep has the name ''"),
    ((".gate",), (), ValueError, r"keep has the name '\.gate'"),
])  # fmt: skip
def test_bad_policies(keep, offload, error, message):
    with pytest.raises(error, match=message):
        Policy(keep, offload)


def test_of_lists():
    """As configurations read from files have them."""
    assert hash(Policy(["a"], ["b"])) == hash(Policy(("a",), ("b",)))  # pyright: ignore[reportArgumentType]


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
