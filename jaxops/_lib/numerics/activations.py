"""Activation functions: `activate` for JAX to differentiate, `activate_and_slope` for Pallas kernels, too."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.checks import check_choice
from jaxops._lib.numerics.instructions import exp2, rsqrt

OAI_LIMIT, OAI_SLOPE = 7.0, 1.702  # of gpt-oss' unit
_SQRT_HALF, _SQRT_2_OVER_PI, _DENSITY_AT_0 = 0.7071067811865476, 0.7978845608028654, 0.3989422804014327


def quick_sigmoid(u):
    """jax.nn.sigmoid(u) with a relative error of at most 6e-7 + 8e-8 |u|, where it is a normal number.

    In Pallas' Triton kernels exp is a function of libdevice, and a division scales its operands first: this takes 5
    instructions instead of about 18. Only for kernels: past |u| = 88 its derivative by JAX would be 0 * infinity.
    """
    root = rsqrt(1 + exp2(u * -1.4426950408889634))
    return root * root


def _silu(u, sigmoid=jax.nn.sigmoid):
    s = sigmoid(u)
    return u * s, s * (1 + u * (1 - s))


def _gelu(u, _=None):
    cdf = 0.5 + 0.5 * _erf(u * _SQRT_HALF)
    return u * cdf, cdf + u * jnp.exp(-0.5 * u * u) * _DENSITY_AT_0


def _gelu_tanh(u, sigmoid=jax.nn.sigmoid):
    # (1 + tanh(z)) / 2 = sigmoid(2 z). As jax.nn.gelu(u, approximate=True), whose float32 slope is off by up to 3.5e-6,
    # this one's by up to 2.1e-6.
    s = sigmoid((2 * _SQRT_2_OVER_PI) * u * (1 + 0.044715 * u * u))
    return u * s, s + u * s * (1 - s) * (2 * _SQRT_2_OVER_PI) * (1 + 3 * 0.044715 * u * u)


def _relu(u, _=None):
    # ones_like: jnp.where of two Python numbers is float64 under jax_enable_x64. No maximum: of NaN and zero a Pallas
    # kernel on a GPU makes zero.
    return jnp.where(u < 0, 0.0, u), jnp.where(u > 0, jnp.ones_like(u), 0.0)


def _relu2(u, _=None):
    root, _ = _relu(u)
    return root * root, 2 * root


def _sigmoid(u, sigmoid=jax.nn.sigmoid):
    s = sigmoid(u)
    return s, s * (1 - s)


def _swiglu_oai_gate(u, sigmoid=jax.nn.sigmoid):
    # The slope at the bound itself is that of below, as torch.clamp's. Comparisons, not minimum: as in _relu.
    inside = jnp.logical_not(u > OAI_LIMIT)
    v = jnp.where(inside, u, OAI_LIMIT)
    s = sigmoid(OAI_SLOPE * v)
    return v * s, jnp.where(inside, s * (1 + OAI_SLOPE * v * (1 - s)), 0.0)


def _swiglu_oai_up(u):
    below, above = u < -OAI_LIMIT, u > OAI_LIMIT
    return jnp.where(above, OAI_LIMIT, jnp.where(below, -OAI_LIMIT, u)) + 1, above | below


def _erf(x: jax.Array) -> jax.Array:
    """Abramowitz and Stegun 7.1.26, error at most 1.5e-7: Pallas does not lower erf to Triton."""
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    size = 1 - series * jnp.exp(-x * x)
    return jnp.where(x < 0, -size, size)


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "sigmoid": _sigmoid,
}
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"] | Callable[..., Any]
# Of a gated unit, besides: gpt-oss', which clamps gate and up, and adds 1 to up.
UNITS = ACTIVATIONS | {"swiglu_oai": _swiglu_oai_gate}
UnitActivation = Literal["swiglu_oai"] | Activation
# Names in configurations of other libraries, and functions that are known by identity.
_ALIASES: dict[Any, str] = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swigluoai": "swiglu_oai",
    jax.nn.silu: "silu",
    jax.nn.gelu: "gelu_tanh",  # by default it is the approximation
    jax.nn.relu: "relu",
    jax.nn.sigmoid: "sigmoid",
}


def activation_name(activation: Any, *, optional: bool = False, unit: bool = False) -> Any:
    """The key of ACTIVATIONS that a user's activation means, with unit of UNITS; optional: or None.

    Raises:
      ValueError: another name or function.
    """
    name = activation
    if isinstance(activation, functools.partial) and activation.func is jax.nn.gelu and not activation.args:
        approximate = activation.keywords.get("approximate") if len(activation.keywords) == 1 else None
        name = "gelu_tanh" if approximate is True else "gelu" if approximate is False else activation
    elif isinstance(activation, Hashable):
        name = _ALIASES.get(activation, activation)
    functions = "one of jax.nn.silu, jax.nn.gelu, jax.nn.relu or jax.nn.sigmoid"
    known = UNITS if unit else ACTIVATIONS
    check_choice("activation", name, (None, *known) if optional else known, functions)
    return name


def activate(u: jax.Array, activation: str | None) -> jax.Array:
    """The activation of u, u itself for None; differentiable to any order: exact erf in gelu, slope 0 of relu at 0."""
    if activation == "gelu":
        return jax.nn.gelu(u, approximate=False)
    if activation == "relu":
        return jax.nn.relu(u)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(u))
    return u if activation is None else UNITS[activation](u)[0]


def activate_and_slope(
    u: jax.Array, activation: str | None, sigmoid: Callable = jax.nn.sigmoid
) -> tuple[jax.Array, jax.Array | None]:
    """The activation and its derivative at float32 u; (u, None) without activation."""
    return (u, None) if activation is None else ACTIVATIONS[activation](u, sigmoid)


def unit(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gated unit act(gate) * up, in float32."""
    value, _ = UNITS[activation](gate.astype(jnp.float32))
    return value * linear_part(activation, up.astype(jnp.float32))[0]


def unit_gradients(activation: str, gate: jax.Array, up: jax.Array, dh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate and up from that of the gated unit, in float32."""
    value, slope = UNITS[activation](gate.astype(jnp.float32))
    dh = dh.astype(jnp.float32)
    factor, clamped = linear_part(activation, up.astype(jnp.float32))
    return dh * factor * slope, dh * value if clamped is None else jnp.where(clamped, 0.0, dh * value)


def linear_part(activation: str, up: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The unit's factor beside the activated gate, and where float32 up is clamped, None for nowhere: its derivative is
    0 there, and else 1."""
    return _swiglu_oai_up(up) if activation == "swiglu_oai" else (up, None)
