"""The launch of Gluon kernels: layouts, arguments, and what XLA does around it; compiled for an absent H200."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import jaxops
from jaxops._lib.gluon import launch_triton
from tests.gluon import compiled
from tests.hopper import on_h200

pytestmark = pytest.mark.versions


@gluon.jit
def _double_gluon(x, y, BLOCK: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # one element a thread: Triton would choose four
    at = gl.arange(0, BLOCK, layout=LAYOUT)
    gl.store(y + at, 2 * gl.load(x + at))


@triton.jit
def _double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))


@pytest.mark.parametrize(("function", "vectors"), [(_double_gluon, 0), (_double, 2)], ids=["gluon", "triton"])
def test_only_gluon_keeps_its_layouts(function, vectors):
    """jax-triton runs Triton's layout passes over Gluon IR, too, and would launch 128 of the 384 threads above."""
    shape = jax.ShapeDtypeStruct((512,), "float32")

    def call(x):
        how = {"kernel": function, "out_type": shape, "grid": 1, "name": "double", "flops": 512}
        return launch_triton.triton_call(x, BLOCK=512, **how)

    (kernel,) = compiled(call, shape)
    assert len(re.findall(r"(?:ld|st)\.global\S*\.v4", kernel.ptx)) == vectors
    assert kernel.shared == 0
    assert kernel.num_warps == 4


def test_what_a_kernel_is_not_given():
    """All but the result's pointer is given: a forgotten operand is no second result."""
    x = jax.ShapeDtypeStruct((512,), "float32")
    how = {"kernel": _double_gluon, "out_type": x, "grid": 1, "name": "double", "flops": 512}
    with pytest.raises(TypeError, match=r"_double_gluon needs all .* not given: x, y"):
        compiled(lambda: launch_triton.triton_call(BLOCK=512, **how))
    with pytest.raises(TypeError, match="not given: y, BLOCK"):
        compiled(lambda x: launch_triton.triton_call(x, **how), x)
    with pytest.raises(TypeError, match="not given: none"):
        compiled(lambda x: launch_triton.triton_call(x, x, BLOCK=512, **how), x)


@gluon.jit
def _late_operand(x, y, z, BLOCK: gl.constexpr):
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(y + at, gl.load(x + at) + gl.load(z + at))


def test_results_come_behind_operands():
    """jax-triton would pass the buffer of z as y's."""
    x = jax.ShapeDtypeStruct((512,), "float32")
    with pytest.raises(TypeError, match="_late_operand takes z, an array, after the pointer of a result, y"):
        compiled(
            lambda x: launch_triton.triton_call(
                x, kernel=_late_operand, out_type=x, grid=1, name="late", flops=512, z=x, BLOCK=512
            ),
            x,
        )


def test_slices_are_not_read_or_written_in_place():
    """In a scan over stacked weights and results, barriers around the call keep XLA from fusing the slices into it."""
    s = jax.ShapeDtypeStruct

    def layers(x, weights, offsets):
        return jax.lax.scan(lambda _, w: (None, jaxops.grouped_matmul(x, w, offsets, backend="triton")), None, weights)[
            1
        ]

    call, barriers = call_and_barriers(
        layers, s((512, 256), "bfloat16"), s((3, 2, 256, 512), "bfloat16"), s((3,), "int32")
    )
    behind = [any(operand in barrier.outvars for barrier in barriers) for operand in call.invars]
    assert behind == [True, True, True, False]  # rows, weights, work list; and what is not initialised
    assert any(result in barrier.invars for barrier in barriers for result in call.outvars)


def is_product(equation) -> bool:
    """A call of a Triton kernel, work lists apart."""
    if equation.primitive.name != "triton_kernel_call":
        return False
    return not equation.params["name"].startswith("schedule_")


def call_and_barriers(fn, *shapes):
    """The one Triton call of fn for an H200, and the barriers beside it."""

    def jaxprs(jaxpr):
        yield jaxpr
        for equation in jaxpr.eqns:
            for sub in jaxprs_in_params(equation.params):
                yield from jaxprs(sub)

    with on_h200():
        whole = jax.make_jaxpr(fn)(*shapes).jaxpr
    (equations,) = [jaxpr.eqns for jaxpr in jaxprs(whole) if any(is_product(equation) for equation in jaxpr.eqns)]
    (call,) = [equation for equation in equations if is_product(equation)]
    return call, [equation for equation in equations if equation.primitive.name == "optimization_barrier"]


def test_a_result_in_an_operands_memory_is_none_of_a_slice():
    """An accumulator is updated in place; in a scan over stacked ones it is a slice, behind a barrier like operands."""
    s = jax.ShapeDtypeStruct

    def layers(x, dout, stacked, offsets):
        return jax.lax.scan(
            lambda _, into: (None, jaxops.grouped_wgrad(x, dout, offsets, accumulate_into=into, backend="triton")),
            None,
            stacked,
        )[1]

    arrays = s((512, 256), "bfloat16"), s((512, 512), "bfloat16"), s((3, 2, 256, 512), "float32"), s((3,), "int32")
    call, barriers = call_and_barriers(layers, *arrays)
    (accumulator,) = [operand for operand in call.invars if operand.aval.dtype == jnp.float32]
    assert dict(call.params["input_output_aliases"])[call.invars.index(accumulator)] == 0
    assert any(accumulator in barrier.outvars for barrier in barriers)
