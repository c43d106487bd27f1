"""The adaptive norms and the adaLN-Zero block: their options, how they start, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import AdaLayerNorm, AdaLNZeroBlock, AdaRMSNorm, MoE, Router
from jaxops.ops.adaln import Plan
from tests.arrays import normal
from tests.compare import assert_close
from tests.contracts.entry import reference

T, D, C, B = 13, 8, 6, 4
OFFSETS = (0, 5, 5, 6, 11)  # sequence 1 is empty, the last two rows are in no sequence
NORMS = {"layer": AdaLayerNorm, "rms": AdaRMSNorm}
WITHOUT_BIAS = functools.partial(nnx.Linear, use_bias=False)


# Compiled whole: operation by operation, JAX would compile every one of them.
apply = nnx.jit(lambda module, x, cond, offsets: module(x, cond, offsets))


def init(key, shape, dtype) -> jax.Array:
    return normal(7, *shape, dtype=dtype) / 2


def offsets() -> jax.Array:
    return jnp.array(OFFSETS, jnp.int32)


def inputs(per_token: bool = False, dtype=jnp.float32, columns: int = C) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, T, D, dtype=dtype), normal(1, T if per_token else B, columns, dtype=dtype), offsets()


class Mixer(nnx.Module):
    """Each row becomes a linear map of the running sum inside its own sequence."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, y, sequence_offsets):
        before = jnp.tril(jnp.ones((T, T), y.dtype))
        sequence = jnp.searchsorted(sequence_offsets, jnp.arange(T), side="right")
        return self.linear(jnp.where(sequence[:, None] == sequence[None, :], before, 0) @ y)


def mlp(*, rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(D, 2 * D, rngs=rngs), jax.nn.gelu, nnx.Linear(2 * D, D, rngs=rngs))


def block(**options) -> AdaLNZeroBlock:
    rngs = nnx.Rngs(0)
    options = {"cond_features": C, "mlp": mlp(rngs=rngs), "modulation_init": init} | options
    return AdaLNZeroBlock(D, mixer=Mixer(rngs=rngs), **options, rngs=rngs)


def norm_layer(norm: str, **options) -> AdaLayerNorm | AdaRMSNorm:
    module = NORMS[norm](D, **{"cond_features": C, "modulation_init": init, **options}, rngs=nnx.Rngs(0))
    head_bias = None if module.cond_features is None else module.modulation.bias
    for i, param in enumerate((head_bias, module.weight, module.bias)):
        if param is not None:
            param[...] = normal(20 + i, *param.shape, dtype=param.dtype)
    return module


def modulation(module, cond: jax.Array, parts: int) -> list[jax.Array]:
    cond = cond.astype(jnp.float32)
    if module.cond_features is None:
        made = cond + module.modulation[...].reshape(1, -1)
    else:
        made = jnp.matmul(jax.nn.silu(cond), module.modulation.kernel[...], precision="highest")
        made = made if module.modulation.bias is None else made + module.modulation.bias[...][None, :]
    return jnp.split(made, parts, axis=1)


def wanted_norm(module, x: jax.Array, scale: jax.Array, shift: jax.Array, epsilon: float, **options) -> jax.Array:
    """By the op's reference, of float32."""
    sequences = {"sequence_offsets": offsets(), "norm": module.norm, "per": module.per, "epsilon": epsilon}
    return reference("adaln", x=x, scale=scale, shift=shift, **sequences, **options)


def wanted_of_norm(module, x: jax.Array, cond: jax.Array) -> jax.Array:
    weight, bias = (None if p is None else p[...] for p in (module.weight, module.bias))
    options = {"weight": weight, "bias": bias, "activation": module.activation}
    return wanted_norm(module, x, *modulation(module, cond, 2), module.epsilon, **options)


def wanted_of_block(module: AdaLNZeroBlock, x: jax.Array, cond: jax.Array) -> jax.Array:
    scale1, shift1, gate1, scale2, shift2, gate2 = modulation(module, cond, 6)
    eps1, eps2 = module.epsilon if isinstance(module.epsilon, tuple) else (module.epsilon,) * 2
    gate = functools.partial(reference, "gated_residual", sequence_offsets=offsets(), per=module.per)
    mixed = module.mixer(wanted_norm(module, x, scale1, shift1, eps1), offsets())
    x = gate(residual=x, h=mixed, gate=gate1)
    return gate(residual=x, h=module.mlp(wanted_norm(module, x, scale2, shift2, eps2)), gate=gate2)


def check(module, wanted, per_token: bool) -> None:
    parts = 6 if wanted is wanted_of_block else 2
    x, cond, _ = inputs(per_token, columns=parts * D if module.cond_features is None else C)
    with jax.default_matmul_precision("highest"):
        assert_close(apply(module, x, cond, offsets()), nnx.jit(wanted)(module, x, cond), "float32")


# tests/contracts has these layers with their gradients; here their options.
@pytest.mark.parametrize(
    ("options", "per_token"),
    [
        ({"use_weight": True, "use_bias": True, "activation": "silu"}, True),
        ({"epsilon": 0.1, "activation": "gelu_tanh", "linear": WITHOUT_BIAS}, False),
        ({"cond_features": None, "per": "row"}, True),
    ],
    ids=["affine", "no-head-bias", "table"],
)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, options, per_token):
    module = norm_layer(norm, **options)
    used = [options.get("use_weight", False), options.get("use_bias", False)]
    assert [module.weight is not None, module.bias is not None] == used
    check(module, wanted_of_norm, per_token)


@pytest.mark.parametrize(
    ("options", "per_token"),
    [
        ({"epsilon": (0.3, 0.01)}, False),
        ({"norm": "rms", "per": "row"}, True),
        ({"cond_features": None, "epsilon": 0.1}, False),
        ({"linear": WITHOUT_BIAS, "norm": "rms"}, False),
    ],
    ids=["two-epsilons", "rms", "table", "no-head-bias"],
)
def test_block(options, per_token):
    check(block(**options), wanted_of_block, per_token)


@pytest.mark.parametrize("module", [functools.partial(norm_layer, "layer"), block], ids=["norm", "block"])
def test_backend_and_plan_are_passed_on(module):
    for options, runs in (({"backend": "pallas"}, True), ({"plan": Plan("pallas")}, True), ({"backend": "xla"}, False)):
        graphdef, state = nnx.split(module(**options))
        program = jax.make_jaxpr(lambda state, *args, graphdef=graphdef: nnx.merge(graphdef, state)(*args))(
            state, *inputs()
        )
        assert ("pallas_call" in str(program)) == runs


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("has_head", [True, False])
def test_norms_start_as_plain_norms(norm, has_head):
    """Without a head, as what the table is added to."""
    x, cond, _ = inputs(columns=C if has_head else 2 * D)
    module = NORMS[norm](D, C if has_head else None, use_weight=True, use_bias=True, rngs=nnx.Rngs(0))
    made = [jnp.zeros((B, D))] * 2 if has_head else jnp.split(cond, 2, axis=1)
    assert_close(apply(module, x, cond, offsets()), wanted_norm(module, x, *made, 1e-6), "float32")


@pytest.mark.parametrize("norm", NORMS)
def test_a_block_starts_as_the_identity(norm):
    rngs, (x, cond, _) = nnx.Rngs(0), inputs()
    module = AdaLNZeroBlock(D, C, Mixer(rngs=rngs), mlp(rngs=rngs), norm=norm, rngs=rngs)
    np.testing.assert_array_equal(apply(module, x, cond, offsets()), x)
    gradient = nnx.jit(nnx.grad(lambda module, *args: jnp.sum(jnp.sin(module(*args)))))(module, x, cond, offsets())
    assert np.abs(gradient.modulation.kernel[...]).max() > 1e-3, "the gates can open"


def test_a_block_in_bfloat16():
    seen = []

    def looks(y, sequence_offsets=None):
        seen.append(y.dtype)
        return y

    x, cond, _ = inputs(dtype=jnp.bfloat16)
    module = AdaLNZeroBlock(D, C, looks, looks, dtype=jnp.bfloat16, modulation_init=init, rngs=nnx.Rngs(0))
    got = apply(module, x, cond, offsets())
    assert got.dtype == jnp.bfloat16
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert_close(got, wanted_of_block(module, x.astype(jnp.float32), cond), "bfloat16")
    gradient = nnx.jit(nnx.grad(lambda module, *args: jnp.sum(module(*args).astype(jnp.float32))))(
        module, x, cond, offsets()
    )
    assert gradient.modulation.kernel[...].dtype == jnp.float32


def test_a_mixer_with_offsets_of_its_own():
    """With sequence parallelism: the mixer sees all rows, the norms those of one device."""
    seen = []

    def mixer(y: jax.Array, sequence_offsets: jax.Array) -> jax.Array:
        seen.append(sequence_offsets)
        return y

    made = AdaLNZeroBlock(D, C, mixer, lambda y: y, rngs=nnx.Rngs(0))
    x, cond, own = inputs()
    for given, wanted in (({}, own), ({"mixer_offsets": 2 * own}, 2 * own)):
        made(x, cond, own, **given)
        np.testing.assert_array_equal(seen.pop(), wanted)


def test_as_many_sequences_as_rows():
    """Then `per` says whose a condition is. Of the sequences all but the third are empty."""
    x, cond, each = normal(0, 5, D), normal(1, 5, C), jnp.array([0, 0, 0, 5, 5, 5], jnp.int32)
    norm = functools.partial(norm_layer, "layer")
    zero_block = functools.partial(AdaLNZeroBlock, D, C, lambda y, offsets: y, lambda y: y, rngs=nnx.Rngs(0))
    for make in (norm, zero_block):
        with pytest.raises(ValueError, match=r"B = T = 5.*pass per='sequence'"):
            make()(x, cond, each)
        for per in ("sequence", "row"):
            make(per=per)(x, cond, each)
    got = {per: apply(norm(per=per), x, cond, each) for per in ("sequence", "row")}
    scale, shift = jnp.split(norm().modulation(jax.nn.silu(cond)), 2, axis=1)
    plain = reference(
        "adaln", x=x, scale=jnp.zeros((1, D)), shift=jnp.zeros((1, D)), sequence_offsets=jnp.array([0, 5])
    )
    assert_close(got["row"], plain * (1 + scale) + shift, "float32")
    assert_close(got["sequence"], plain * (1 + scale[2:3]) + shift[2:3], "float32")


def test_a_mixture_of_experts_as_mlp():
    """Its routing is handed on."""
    x, cond, _ = inputs()
    experts = MoE(3, D, 12, router=functools.partial(Router, k=2), rngs=nnx.Rngs(1))
    got, routing = apply(block(mlp=experts), x, cond, offsets())
    assert routing.load.sum() == 2 * T
    alone = block(mlp=lambda y: experts(y)[0])
    assert_close(got, nnx.jit(wanted_of_block)(alone, x, cond), "float32")


@pytest.mark.parametrize(("x", "cond", "sequence_offsets", "says"), [
    ((T, D + 1), (B, C), (B + 1,), r"x has shape \(13, 9\); it must be \[T, num_features=8\].* without padding"),
    ((T, D), (B, C + 1), (B + 1,), r"cond has shape \(4, 7\); it must be \[B, cond_features\] = \(4, 6\)"),
    ((T, D), (C,), (B + 1,), r"cond has shape \(6,\)"),
    ((T, D), (B, C), (1, B + 1), r"sequence_offsets has shape \(1, 5\); it must be \[B \+ 1\].* with a 0 before it"),
])  # fmt: skip
@pytest.mark.parametrize("module", [functools.partial(norm_layer, "rms"), block], ids=["norm", "block"])
def test_wrong_shapes(module, x, cond, sequence_offsets, says):
    with pytest.raises(ValueError, match=says):
        module()(jnp.ones(x), jnp.ones(cond), jnp.zeros(sequence_offsets, jnp.int32))


@pytest.mark.parametrize(("name", "given", "error", "says"), [
    ("mixer", lambda y: y[:, :4], ValueError, r"mixer gave shape \(13, 4\); it must give .* \(13, 8\)"),
    ("mlp", lambda y: y[:, :4], ValueError, r"mlp gave shape \(13, 4\); it must give .* \(13, 8\)"),
    ("mixer", lambda y: (y, y), TypeError, r"mixer gave a tuple; it must give an array \[T, num_features\]"),
    ("mlp", lambda y: (y, y, y), TypeError, r"mlp gave a tuple; it must give an array"),
    ("mlp", lambda y: (None, y), TypeError, r"mlp gave a NoneType; it must give an array"),
])  # fmt: skip
def test_a_part_that_gives_something_else(name, given, error, says):
    parts = {"mixer": lambda y, offsets: y, "mlp": lambda y: y, name: lambda y, *_: given(y)}
    module = AdaLNZeroBlock(D, C, parts["mixer"], parts["mlp"], rngs=nnx.Rngs(0))
    with pytest.raises(error, match=says):
        module(*inputs())


def test_a_table_needs_the_whole_modulation():
    x, cond, _ = inputs()
    with pytest.raises(ValueError, match=r"cond has shape \(4, 6\); it must be \[B, 6 \* num_features\] = \(4, 48\)"):
        block(cond_features=None)(x, cond, offsets())
