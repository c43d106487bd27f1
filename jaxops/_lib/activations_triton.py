"""The activation functions of activations.py, for Gluon kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _sigmoid(x):
    """4 instructions, error at most 2^-21; an exponential exact for subnormals and a division take 20."""
    assembly: gl.constexpr = """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
    }"""
    return gl.inline_asm_elementwise(assembly, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate_and_slope(x, ACTIVATION: gl.constexpr):
    """The activation and its derivative, in float32."""
    x = x.to(gl.float32)
    if ACTIVATION == "relu":
        # One instruction, NaN stays NaN; a select keeps a predicate of every element alive.
        y = gl.maximum(x, 0.0, propagate_nan=NAN)
        slope = gl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * gl.erf(x * 0.7071067811865476)
        y = x * cdf
        slope = cdf + x * gl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = x * s
        slope = s + y * (1.0 - s) * (1.5957691216057308 + 0.2140644488178 * x * x)
    elif ACTIVATION == "sigmoid":
        y = _sigmoid(x)
        slope = y - y * y
    else:
        gl.static_assert(ACTIVATION == "silu")
        s = _sigmoid(x)
        y = x * s
        slope = s + (y - y * s)
    return y, slope


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    y, _ = activate_and_slope(x, ACTIVATION)
    return y
