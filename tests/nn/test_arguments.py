"""Layers made with what cannot work: an error where they are made, which names the argument."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import (
    AdaLayerNorm,
    AdaLNZeroBlock,
    AdaRMSNorm,
    Fp8DotGeneral,
    Fp8Linear,
    GroupedLinear,
    MoE,
    PackedAttention,
    Router,
    SharedExperts,
)
from jaxops.nn.arguments import make_part


def mixer(y, sequence_offsets):
    return y


# A layer and what it is made of; all sizes are positional.
LAYERS = {
    "GroupedLinear": (GroupedLinear, {"num_groups": 4, "in_features": 8, "out_features": 8}),
    "Fp8Linear": (Fp8Linear, {"in_features": 8, "out_features": 8}),
    "Fp8DotGeneral": (Fp8DotGeneral, {}),
    "AdaLayerNorm": (AdaLayerNorm, {"num_features": 8, "cond_features": 4}),
    "AdaRMSNorm": (AdaRMSNorm, {"num_features": 8, "cond_features": 4}),
    "AdaLNZeroBlock": (AdaLNZeroBlock, {"num_features": 8, "cond_features": 4, "mixer": mixer, "mlp": jnp.tanh}),
    "PackedAttention": (PackedAttention, {"num_heads": 4, "in_features": 8}),
    "Router": (Router, {"in_features": 8, "num_experts": 4, "k": 2}),
    "MoE": (
        MoE,
        {"num_experts": 4, "in_features": 8, "hidden_features": 8, "router": functools.partial(Router, k=2)},
    ),
    "SharedExperts": (SharedExperts, {"in_features": 8, "hidden_features": 8}),
}


def absent(make) -> nnx.Module:
    """A layer with shapes in place of parameters: nothing is computed while tests are collected."""
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def make(name: str, **change):
    layer, arguments = LAYERS[name]
    rngs = {} if layer is Fp8DotGeneral else {"rngs": nnx.Rngs(0)}
    return layer(**arguments | change, **rngs)


@pytest.mark.parametrize("name", LAYERS)
def test_what_the_errors_differ_from_is_right(name):
    make(name)


# How a layer is called with tokens [M, 8].
CALLS = {
    "GroupedLinear": lambda layer, x: layer(x, jnp.array([0, 1, 1, 2, 2], jnp.int32)),
    "Fp8Linear": lambda layer, x: layer(x),
    "PackedAttention": lambda layer, x: layer(x, jnp.array([0, 2], jnp.int32)),
    "Router": lambda layer, x: layer(x),
    "MoE": lambda layer, x: layer(x),
    "SharedExperts": lambda layer, x: layer(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_tokens(name):
    layer = make(name)
    with pytest.raises(TypeError, match=r"x is int32; it must be one of bfloat16.*Cast it"):
        CALLS[name](layer, jnp.ones((2, 8), jnp.int32))
    with pytest.raises(TypeError, match=r"x is a list; pass a JAX array \[.*=8\]"):
        CALLS[name](layer, [[1.0] * 8] * 2)


SIZES = [
    (name, size)
    for name, (_, arguments) in LAYERS.items()
    for size, value in arguments.items()
    if isinstance(value, int)
]


@pytest.mark.parametrize(("name", "size"), [*SIZES, ("Fp8Linear", "history"), ("Fp8DotGeneral", "history")])
def test_sizes(name, size):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=rf"{size}={wrong} must be"):
            make(name, **{size: wrong})
    for wrong in (2.0, "2"):
        with pytest.raises(TypeError, match=rf"{size} is a (float|str); it must be an? .*integer"):
            make(name, **{size: wrong})


def test_sizes_may_be_of_numpy():
    assert make("GroupedLinear", num_groups=np.int32(3)).kernel.shape == (3, 8, 8)


@pytest.mark.parametrize("name", LAYERS)
def test_backend(name):
    without = dict.fromkeys(("AdaLayerNorm", "AdaRMSNorm", "AdaLNZeroBlock", "Router"), ())
    more = (without | {"PackedAttention": ("triton", "cudnn")}).get(name, ("triton",))
    for backend in ("auto", *more, "pallas", "xla"):
        make(name, backend=backend)
    known = ", ".join(map(repr, ("auto", *more, "pallas"))) + " or 'xla'"
    for wrong in ("cublas", None, *({"triton", "cudnn"} - {*more})):
        with pytest.raises(ValueError, match=f"backend={wrong!r}: write {known}"):
            make(name, backend=wrong)


@pytest.mark.parametrize("name", LAYERS)
def test_dtypes(name):
    named = {"dtype", "param_dtype"} & set(inspect.signature(LAYERS[name][0].__init__).parameters)
    assert named or name == "Fp8DotGeneral"
    for argument in named:
        make(name, **{argument: jnp.float16})
        for wrong in ("bf16", jnp.int32, jnp.float64):
            with pytest.raises(TypeError, match=rf"{argument}=.*; it must be one of bfloat16, float16, float32"):
                make(name, **{argument: wrong})


@pytest.mark.parametrize(("name", "change", "error", "says"), [
    ("Router", {"k": 5}, ValueError, "k=5 must be from 1 to E=4, the number of experts"),
    ("Router", {"score": "tanh"}, ValueError, "score='tanh': write 'softmax', 'sigmoid'"),
    ("Router", {"expert_groups": 3}, ValueError, "expert_groups=3 must divide the E=4 experts"),
    ("Router", {"capacity": 0}, ValueError, "capacity=0 must be at least 1, or None"),
    ("MoE", {"activation": "swiglu"}, ValueError, "activation='swiglu': write 'silu', 'gelu'"),
    ("SharedExperts", {"activation": "swiglu"}, ValueError, "activation='swiglu': write 'silu', 'gelu'"),
    ("MoE", {"recipe": "delayed"}, NotImplementedError, "recipe is 'delayed', which has no grouped form"),
    ("MoE", {"recipe": "rowwise", "precision": "high"}, ValueError, "it must be None: recipe='rowwise' sets the prec"),
    ("MoE", {"pow2_scales": True}, ValueError, "pow2_scales=True needs an FP8 recipe"),
    ("SharedExperts", {"recipe": "delayed"}, NotImplementedError, "recipe is 'delayed'.*Take 'tensorwise'"),
    ("SharedExperts", {"recipe": "rowwise", "precision": "high"}, ValueError, "precision is 'high'; it must be"),
    ("SharedExperts", {"pow2_scales": True}, ValueError, "pow2_scales=True needs an FP8 recipe"),
    ("MoE", {"router": 2}, TypeError, r"router=2 cannot be called; pass e\.g\. functools\.partial\(jaxops\.nn\.Router"),
    ("MoE", {"router": functools.partial(Router, k=5)}, ValueError, "k=5 must be from 1 to E=4"),
    ("MoE", {"router": absent(functools.partial(Router, 9, 4, 2))}, ValueError,
     r"router has .* = \(9, 4\); this layer has \(8, 4\)"),
    ("Fp8Linear", {"recipe": "rows"}, ValueError, "recipe is 'rows'; it must be one of 'tensorwise'"),
    ("GroupedLinear", {"recipe": "rows"}, ValueError, "recipe is 'rows'; it must be one of"),
    ("GroupedLinear", {"recipe": "delayed"}, NotImplementedError, "recipe is 'delayed'.*Take 'tensorwise'"),
    ("GroupedLinear", {"recipe": "rowwise", "precision": "high"}, ValueError, "precision is 'high'; it must be None"),
    ("GroupedLinear", {"pow2_scales": True}, ValueError, "pow2_scales=True needs an FP8 recipe"),
    ("Fp8DotGeneral", {"recipe": "rows"}, ValueError, "recipe is 'rows'; it must be one of"),
    ("AdaLNZeroBlock", {"norm": "batch"}, ValueError, "norm='batch': write 'layer', 'rms'"),
    ("AdaLNZeroBlock", {"per": "token"}, ValueError, "per='token': write None, 'sequence', 'row'"),
    ("AdaLNZeroBlock", {"epsilon": (1e-6, -1)}, ValueError, "epsilon is -1; it must be at least 0"),
    ("AdaLNZeroBlock", {"epsilon": (1e-6,)}, ValueError, r"epsilon=\(1e-06,\): write one number, or two"),
    ("AdaLayerNorm", {"epsilon": float("nan")}, ValueError, "epsilon is nan; it must be finite"),
    ("AdaLayerNorm", {"activation": "elu"}, ValueError,
     "activation='elu': write None, 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2', 'sigmoid'"),
    ("AdaRMSNorm", {"per": "sequences"}, ValueError, "per='sequences': write None, 'sequence', 'row'"),
], ids=str)  # fmt: skip
def test_options(name, change, error, says):
    with pytest.raises(error, match=says):
        make(name, **change)


LINEAR = absent(functools.partial(nnx.Linear, 8, 8))


@pytest.mark.parametrize(
    "takes_no_offsets",
    [
        LINEAR,
        nnx.Sequential(LINEAR, jnp.tanh),
        absent(functools.partial(nnx.MultiHeadAttention, 2, 8, decode=False)),
        lambda y: y,
        lambda y, *, scale=1: y,
    ],
    ids=["linear", "sequential", "attention", "one-argument", "keyword"],
)
def test_a_mixer_that_takes_no_offsets(takes_no_offsets):
    with pytest.raises(ValueError, match=r"mixer is a .* it is called with \(y, sequence_offsets\)\. Wrap a layer"):
        make("AdaLNZeroBlock", mixer=takes_no_offsets)


@pytest.mark.parametrize(
    "takes_offsets",
    [
        lambda y, o: y,
        lambda y, sequence_offsets=None: y,
        lambda *args: args[0],
        nnx.Sequential(lambda y, offsets: y, LINEAR),
    ],
    ids=["any-name", "optional", "any-number", "sequential"],
)
def test_a_mixer_that_takes_offsets(takes_offsets):
    make("AdaLNZeroBlock", mixer=takes_offsets)


def test_parts_are_made_of_classes():
    rngs = nnx.Rngs(0)
    made = make_part(functools.partial(nnx.Linear, use_bias=False), 3, 5, rngs=rngs)
    assert made.kernel.shape == (3, 5)
    assert made.bias is None
    for given in (made, jnp.tanh, functools.partial(jnp.sum, axis=0)):
        assert make_part(given, 3, 5, rngs=rngs) is given
