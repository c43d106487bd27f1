"""The activation functions of activations.py, for Gluon kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from jaxops._lib.numerics import activations

NAN = gl.constexpr(PropagateNan.ALL)
OAI_LIMIT, OAI_SLOPE = gl.constexpr(activations.OAI_LIMIT), gl.constexpr(activations.OAI_SLOPE)


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
def tanh(x):
    """Absolute error at most 2^-20."""
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@gluon.jit
def exp2_of(x, shift):
    """2^(x log2(e) - shift), two instructions; shift [rows, 1]."""
    assembly: gl.constexpr = """{
        .reg .f32 e;
        fma.rn.f32 e, $1, 0f3FB8AA3B, $2;
        ex2.approx.ftz.f32 $0, e;
    }"""
    negative = (-shift).broadcast_to(x.shape)
    return gl.inline_asm_elementwise(assembly, "=f,f,f", [x, negative], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate_and_slope(x, ACTIVATION: gl.constexpr):
    """The activation and its derivative, in float32."""
    x = x.to(gl.float32)
    if ACTIVATION == "relu":
        # One instruction, NaN stays NaN; a select keeps a predicate of every element alive.
        y = gl.maximum(x, 0.0, propagate_nan=NAN)
        slope = gl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        root = gl.maximum(x, 0.0, propagate_nan=NAN)
        y = root * root
        slope = 2.0 * root
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
    elif ACTIVATION == "swiglu_oai":
        v = gl.minimum(x, OAI_LIMIT, propagate_nan=NAN)
        s = _sigmoid(OAI_SLOPE * v)
        y = v * s
        slope = gl.where(x > OAI_LIMIT, 0.0, s + OAI_SLOPE * (y - y * s))
    else:
        gl.static_assert(ACTIVATION == "silu")
        s = _sigmoid(x)
        y = x * s
        slope = s + (y - y * s)
    return y, slope


@gluon.jit
def linear_part(up, ACTIVATION: gl.constexpr):
    """The unit's factor beside the activated gate, in float32."""
    up = up.to(gl.float32)
    if ACTIVATION == "swiglu_oai":
        up = gl.maximum(gl.minimum(up, OAI_LIMIT, propagate_nan=NAN), -OAI_LIMIT, propagate_nan=NAN) + 1.0
    return up


@gluon.jit
def through_linear_part(gradient, up, ACTIVATION: gl.constexpr):
    """up's gradient from that of `linear_part`."""
    if ACTIVATION == "swiglu_oai":
        up = up.to(gl.float32)
        gradient = gl.where((up > OAI_LIMIT) | (up < -OAI_LIMIT), 0.0, gradient)
    return gradient


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    y, _ = activate_and_slope(x, ACTIVATION)
    return y


@gluon.jit
def _plus(a, b):
    """a + b, with a product among them rounded first, as XLA compiles Pallas kernels."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _quick_sigmoid(x):
    assembly: gl.constexpr = """{
        .reg .f32 e;
        mul.rn.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.rn.f32 e, e, 0f3F800000;
        rsqrt.approx.ftz.f32 e, e;
        mul.rn.f32 $0, e, e;
    }"""
    return gl.inline_asm_elementwise(assembly, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _erf(x):
    """With the exponential of libdevice and its division that does not scale the operands."""
    assembly: gl.constexpr = """{
        .reg .f32 t, p, e, f, g;
        .reg .b32 i;
        abs.f32 t, $1;
        mul.rn.f32 t, t, 0f3EA7BA05;
        add.rn.f32 t, t, 0f3F800000;
        mov.f32 p, 0f3F800000;
        div.full.f32 t, p, t;
        mul.rn.f32 p, t, 0f3F87DC22;
        add.rn.f32 p, p, 0fBFBA00E3;
        mul.rn.f32 p, t, p;
        add.rn.f32 p, p, 0f3FB5F0E3;
        mul.rn.f32 p, t, p;
        add.rn.f32 p, p, 0fBE91A98E;
        mul.rn.f32 p, t, p;
        add.rn.f32 p, p, 0f3E827906;
        mul.rn.f32 p, t, p;
        neg.f32 t, $1;
        mul.rn.f32 t, $1, t;
        fma.rn.f32 e, t, 0f3BBB989D, 0f3F000000;
        cvt.sat.f32.f32 e, e;
        mov.f32 f, 0f437C0000;
        mov.f32 g, 0f4B400001;
        fma.rm.f32 e, e, f, g;
        add.rn.f32 f, e, 0fCB40007F;
        neg.f32 f, f;
        fma.rn.f32 f, t, 0f3FB8AA3B, f;
        fma.rn.f32 f, t, 0f32A57060, f;
        ex2.approx.ftz.f32 f, f;
        mov.b32 i, e;
        shl.b32 i, i, 23;
        mov.b32 e, i;
        mul.rn.f32 e, f, e;
        mul.rn.f32 p, p, e;
        mov.f32 t, 0f3F800000;
        sub.rn.f32 $0, t, p;
    }"""
    size = gl.inline_asm_elementwise(assembly, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return gl.where(x < 0.0, -size, size)


@gluon.jit
def round_pairs(x):
    """float32 as bfloat16, two numbers by one instruction. (Triton rounds one at a time where it is widened again.)"""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widen_pairs(x):
    """bfloat16 as float32, one instruction a number."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def activate_as_pallas(x, ACTIVATION: gl.constexpr):
    """The activation of float32 x, equal to the bit to that of activations.py with `quick_sigmoid` in a Pallas kernel,
    which fuses no product into a sum."""
    if ACTIVATION == "relu":
        y = gl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        root = gl.where(x < 0.0, 0.0, x)
        y = root * root
    elif ACTIVATION == "gelu":
        y = x * _plus(0.5 * _erf(x * 0.7071067811865476), 0.5)
    elif ACTIVATION == "gelu_tanh":
        y = x * _quick_sigmoid(1.5957691216057308 * x * _plus(0.044715 * x * x, 1.0))
    elif ACTIVATION == "sigmoid":
        y = _quick_sigmoid(x)
    else:
        gl.static_assert(ACTIVATION == "silu")
        y = x * _quick_sigmoid(x)
    return y
