"""`jaxops.offload.scan` against `jax.lax.scan`: values, all gradients, and where residuals are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops import offload
from jaxops.offload import Policy, scan
from tests.compare import OPTIMISED, assert_close
from tests.jaxprs import equations

pytestmark = pytest.mark.versions

LAYERS, T, D = 5, 6, 4
CHOICES = ("keep", "offload", "recompute")


def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "in": 0.5 * jax.random.normal(keys[0], (LAYERS, D, 2 * D)),
        "out": 0.5 * jax.random.normal(keys[1], (LAYERS, 2 * D, D)),
    }
    return weights, jax.random.normal(keys[2], (T, D)), jnp.float32(0.7)


def body(scale, offsets, carry, layer):
    """Closes over float and integer arrays; some carries and results have no gradient."""
    x, seen = carry
    weights, number = layer
    hidden = jnp.tanh(checkpoint_name(x @ weights["in"], "mlp.hidden"))
    mixed = checkpoint_name(jnp.take(hidden, offsets, axis=0) * scale, "mixed")
    return (x + mixed @ weights["out"], seen + number), {"mean": jnp.mean(hidden), "seen": seen}


def loss(run, weights, x, scale):
    offsets = jnp.array([1, 0, 2, 3, 5, 4])
    init = (x, jnp.int32(0))
    (x, seen), ys = run(functools.partial(body, scale, offsets), init, (weights, jnp.arange(LAYERS)))
    return jnp.sum(x**2) + jnp.sum(jnp.sin(ys["mean"])), (seen, ys)


def gradients(run):
    return jax.jit(
        jax.value_and_grad(functools.partial(loss, run), argnums=(0, 1, 2), has_aux=True), compiler_options=OPTIMISED
    )(*inputs())


def same(ours, wanted):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def kept():
    return gradients(functools.partial(scan, policy=Policy(keep=("mlp.hidden", "mixed", "carry"))))


def test_as_lax_scan(kept):
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(gradients(jax.lax.scan)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "choices",
    [(a, b, CHOICES[(i + j) % 3]) for i, a in enumerate(CHOICES) for j, b in enumerate(CHOICES)],
    ids="-".join,
)
def test_every_choice(choices, kept):
    """The same bits for every pair of choices."""
    names = ("mlp", "mixed", "carry")
    policy = offload.policy(dict(zip(names, choices, strict=True)))
    same(gradients(functools.partial(scan, policy=policy)), kept)


def spaces(policy):
    """(shape, whether on the host) of all stacks that the forward's loop saves: a row a layer, on the host one more."""
    weights, x, scale = inputs()
    closed = jax.make_jaxpr(
        lambda *args: jax.vjp(functools.partial(loss, functools.partial(scan, policy=policy)), *args, has_aux=True)[1]
    )(weights, x, scale)
    found = [
        (aval.shape[1:], aval.memory_space == jax.memory.Space.Host)
        for aval in closed.out_avals
        if aval.ndim == 3 and aval.shape[1] == T
    ]
    assert all(
        aval.shape[0] == LAYERS + (aval.memory_space == jax.memory.Space.Host)
        for aval in closed.out_avals
        if aval.ndim == 3
    )
    return sorted(found)


def test_where_residuals_lie():
    assert spaces(Policy(offload=("mlp", "carry"))) == [((T, D), True), ((T, 2 * D), True)]
    assert spaces(Policy(keep=("mlp",), offload=("carry",))) == [((T, D), True), ((T, 2 * D), False)]
    assert spaces(Policy(offload=("carry",))) == [((T, D), True)]
    assert spaces(Policy()) == [((T, D), False)]  # a layer's input, which recomputing begins with


def test_gradients_are_stacked_once_all_has_come():
    """So that XLA hides the prefetch behind a layer's products (a GPU test checks its schedule)."""
    weights, x, scale = inputs()
    gradient = jax.grad(lambda w: loss(functools.partial(scan, policy=Policy(offload=("carry",))), w, x, scale)[0])
    barriers = [
        equation
        for equation in equations(jax.make_jaxpr(gradient)(weights).jaxpr)
        if equation.primitive.name == "optimization_barrier"
    ]
    assert [{v.aval.shape for v in barrier.invars} for barrier in barriers] == [{(T, D), (D, 2 * D), (2 * D, D)}]


def test_products():
    """Keeping or offloading the residuals saves the products that compute them."""
    weights, x, scale = inputs()

    def dots(policy):
        gradient = jax.grad(lambda *args: loss(functools.partial(scan, policy=policy), *args)[0], argnums=(0, 1, 2))
        text = jax.jit(gradient).lower(weights, x, scale).compile().as_text()
        return sum(" dot(" in line or "__onednn$matmul" in line for line in text.splitlines())

    kept, offloaded, recomputed = (
        dots(Policy(keep=("mlp", "mixed", "carry"))),
        dots(Policy(offload=("mlp", "mixed", "carry"))),
        dots(Policy(offload=("carry",))),
    )
    assert kept == offloaded == 6  # two forward, two for the carry, two for the weights
    assert recomputed == 7  # and once more what `mlp.hidden` comes from; the layer's own result is not needed again


def stacks(jaxpr, shape):
    """Types of the loop results of that shape, in all inner jaxprs."""
    return [
        v.aval.dtype
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "scan"
        for v in eqn.outvars
        if v.aval.shape == shape
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_of_what_is_cast_once_are_stacked_in_the_narrower_type(whole):
    weights, x, _ = inputs()
    half = lambda w: w.astype(jnp.bfloat16)

    def layer(c, w):
        """Casts "in" once and uses it twice; casts "out" twice, or also uses it uncast."""
        inward = half(w["in"])
        c = c + (jnp.tanh(c @ inward) + jnp.sin(c @ inward)) @ half(w["out"])
        return c, (inward[0], jnp.sum(w["out"] if whole else half(w["out"])))

    def loss(run, w, x):
        c, (rows, sums) = run(layer, half(x), w)
        return jnp.sum(c.astype(jnp.float32)) + jnp.sum(jnp.sin(rows.astype(jnp.float32))) + jnp.sum(sums**2)

    ours, wanted = (
        jax.grad(functools.partial(loss, run))
        for run in (functools.partial(scan, policy=Policy(keep=("carry",))), jax.lax.scan)
    )
    traced = jax.make_jaxpr(ours)(weights, x).jaxpr
    assert stacks(traced, weights["in"].shape) == [jnp.bfloat16]
    assert stacks(traced, weights["out"].shape) == [jnp.float32]
    for a, b in zip(
        jax.tree.leaves(jax.jit(ours)(weights, x)), jax.tree.leaves(jax.jit(wanted)(weights, x)), strict=True
    ):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


def test_gradients_of_what_is_widened_stay_narrow():
    weights, x, _ = inputs()
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)

    def loss(w):
        layer = lambda c, w: (c + jnp.tanh(c @ w["in"].astype(jnp.float32)) @ w["out"].astype(jnp.float32), None)
        return jnp.sum(scan(layer, x, w, policy=Policy(offload=("carry",)))[0])

    assert stacks(jax.make_jaxpr(jax.grad(loss))(weights).jaxpr, weights["in"].shape) == [jnp.bfloat16]


def test_devices(kept):
    """Over four devices: rows sharded, weights replicated."""
    weights, x, scale = inputs()
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    run = functools.partial(scan, policy=Policy(offload=("carry", "mlp")))
    placed = jax.device_put(jnp.concatenate([x] * 4), NamedSharding(mesh, P("data")))
    of = lambda w, x: loss(run, w, x.reshape(4, T, D).mean(0), scale)[0]
    got = jax.jit(jax.grad(of), compiler_options=OPTIMISED)(weights, placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(kept[1][0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


X = jnp.arange(1.0, D + 1) / D


def plainly(body, init, xs=None, length=None, **how):
    """What `scan` stands for."""
    policy = jax.checkpoint_policies.save_only_these_names("mlp.hidden")
    how.pop("policy")
    return jax.lax.scan(jax.checkpoint(body, policy=policy), init, xs, length, **how)


def small(carry, w):
    hidden = checkpoint_name(jnp.tanh(carry @ w), "mlp.hidden")
    return carry + jnp.sin(hidden), jnp.sum(hidden)


def total(run, w, x, body=small, **how):
    carry, y = run(body, x, w, **how)
    return jnp.sum(carry**2) + jnp.sum(y)


def with_key(state, w):
    carry, key = state
    key, own = jax.random.split(key)
    return (small(carry, w)[0] * jax.random.bernoulli(own, 0.5, carry.shape), key), None


def complex_body(carry, w):
    hidden = checkpoint_name(jnp.real(carry) @ w, "mlp.hidden")
    return carry * jnp.exp(1j * hidden), jnp.sum(jnp.abs(carry.imag))


def of_length(run, w, x, **how):
    step = lambda carry, nothing: (jnp.sin(checkpoint_name(carry @ w[0], "mlp.hidden")), nothing)
    return jnp.sum(run(step, x, None, 3, **how)[0])


def numbers(state, w):
    carry, n, none, is_first = state
    assert none is None
    return (jnp.where(is_first, small(carry, w)[0], carry), n + 1, None, is_first), n


def over_devices(run, w, x, **how):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    mean = jax.shard_map(
        lambda w, x: jax.lax.pmean(total(run, w, x[0], **how), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    return mean(w, jnp.stack([x, 2 * x]))


def with_numbers(run, w, x, **how):
    (carry, n, _, _), seen = run(numbers, (x, 0, None, True), w, **how)
    return jnp.sum(carry) + n + jnp.sum(seen)


# A transformation of f(w, x) beside what jax.checkpoint and lax.scan make of it.
TRANSFORMED = {
    "vmap of grad": lambda f, w, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f, w, x: jax.grad(lambda w: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x)))(w),
    "vmap of vmap": lambda f, w, x: jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))(
        jnp.stack([w, -w]), jnp.stack([x, 2 * x])
    ),
    "remat": lambda f, w, x: jax.grad(jax.checkpoint(f))(w, x),
    "vjp": lambda f, w, x: jax.jit(lambda pull: pull(jnp.float32(2)))(jax.jit(lambda w: jax.vjp(f, w, x)[1])(w)),
    "donated": lambda f, w, x: jax.jit(jax.grad(f, (0, 1)), donate_argnums=1)(w, x + 0),
    "micro-batches": lambda f, w, x: jax.lax.scan(
        lambda total, x: (total + jax.grad(f)(w, x), None), 0 * w, jnp.stack([x, 2 * x])
    )[0],
}
CASES = {
    **{name: (total, how, {}) for name, how in TRANSFORMED.items()},
    "reverse": (total, jax.grad, {"reverse": True}),
    "unroll": (total, jax.grad, {"unroll": 2}),
    "length": (of_length, jax.grad, {}),
    "one layer": (lambda run, w, x, **how: total(run, w[:1], x, **how), jax.grad, {}),
    "no layer": (lambda run, w, x, **how: total(run, w[:0], x, **how), jax.grad, {}),
    "keys": (lambda run, w, x, **how: jnp.sum(run(with_key, (x, jax.random.key(0)), w, **how)[0][0]), jax.grad, {}),
    "complex": (lambda run, w, x, **how: jnp.sum(run(complex_body, x + 0j, w, **how)[1]), jax.grad, {}),
    "numbers": (with_numbers, jax.grad, {}),
    "in scan": (lambda run, w, x, **how: total(functools.partial(nesting, run), w, x, **how), jax.grad, {}),
    "shard_map": (over_devices, jax.grad, {}),
    "closed-over tracer": (
        lambda run, w, x, **how: total(run, w, x, lambda c, w: small(c * x, w), **how),
        lambda f: lambda w, x: jax.vmap(jax.grad(f, 1), (None, 0))(w, jnp.stack([x, 2 * x])), {},
    ),
}  # fmt: skip


def nesting(run, body, init, w, **how):
    return run(lambda carry, w: run(body, carry, jnp.stack([w, -w]), **how), init, w, **how)


@pytest.mark.parametrize("name", CASES)
def test_as_a_scan_of_checkpoint_under_other_transformations(name):
    of, how, more = CASES[name]

    def both(w, x):
        for run, policy in ((scan, Policy(offload=("mlp.hidden", "carry"))), (plainly, None)):
            f = functools.partial(of, run, policy=policy, **more)
            yield how(f, w, x) if name in TRANSFORMED else how(f)(w, x)

    compiled = (lambda f: f) if name in ("vjp", "donated") else jax.jit  # which are several programs
    found = compiled(lambda *given: [*both(*given)])(inputs()[0]["in"][:, :, :D], X)
    # Over the RMS of each array: sums of both programs are rounded in another order, on some processors.
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close(got, want, "float32")


def test_second_derivatives():
    w = inputs()[0]["in"][:, :, :D]
    of = lambda run, **how: jax.hessian(lambda x: total(run, w, x, **how))(X)
    policy = Policy(offload=("mlp.hidden", "carry"))
    np.testing.assert_allclose(of(scan, policy=policy.on_device()), of(plainly, policy=None), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"second derivative.*pass policy=policy.on_device\(\)"):
        of(scan, policy=policy)


def test_bad_input():
    weights, x, _ = inputs()
    policy = Policy()
    with pytest.raises(ValueError, match="different leading axis sizes"):
        scan(lambda c, w: (c, None), x, {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}, policy=policy)
    for xs, length, message in (
        (jnp.ones((2, 3)), 3, "scan got"), (None, None, "scan got"), (jnp.ones(()), None, "one leading axis"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            scan(lambda c, w: (c, None), x, xs, length, policy=policy)
    with pytest.raises(TypeError, match="bfloat16"):
        scan(lambda c, w: (c.astype(jnp.bfloat16), None), x, weights, policy=policy)
    with pytest.raises(TypeError, match="structure"):
        scan(lambda c, w: ((c, c), None), x, weights, policy=policy)
