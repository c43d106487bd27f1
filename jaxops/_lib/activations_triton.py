"""The gated units' activations for inside Gluon kernels: those of activations.py, by the functions that Gluon has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    """In float32."""
    x = x.to(gl.float32)
    if ACTIVATION == "relu":
        y = gl.where(x <= 0.0, 0.0, x)  # NaN stays
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 x (1 + tanh(z)) = x sigmoid(2 z)
        y = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + gl.exp(-x))
    else:
        gl.static_assert(ACTIVATION == "silu")
        y = x / (1.0 + gl.exp(-x))
    return y


@gluon.jit
def slope_of(x, ACTIVATION: gl.constexpr):
    """Its derivative, in float32."""
    x = x.to(gl.float32)
    if ACTIVATION == "relu":
        slope = gl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        slope = 0.5 + 0.5 * gl.erf(x * 0.7071067811865476) + x * gl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        s = 1.0 / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = s * (1.0 + x * (1.0 - s) * (1.5957691216057308 + 0.2140644488178 * x * x))
    elif ACTIVATION == "sigmoid":
        s = 1.0 / (1.0 + gl.exp(-x))
        slope = s * (1.0 - s)
    else:
        s = 1.0 / (1.0 + gl.exp(-x))
        slope = s * (1.0 + x * (1.0 - s))
    return slope
