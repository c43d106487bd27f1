"""Arrays of more than 2**31 elements: no kernel counts their elements in 32 bits."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import jaxops
from tests.contracts.entry import Arguments, Dims, Op
from tests.contracts.run import EVERYTHING, is_float
from tests.hopper import on_h200
from tests.jaxprs import kernel_arrays, overflow_int32

MANY = 2**31
CASES = [
    pytest.param(name, i, mapped, id=f"{name}-{i}-{'vmap' if mapped else 'one'}")
    for name, op in EVERYTHING.items() for i in range(len(op.large)) for mapped in (False, True)
]  # fmt: skip


def half(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Rows and matrices as they are trained: in bfloat16. What a Routing or a Quantized has keeps its dtypes."""
    if not is_float(x) or x.ndim < 2 or name in ("routing.weights", "routing", "accumulate_into"):
        return x
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)


def operands(op: Op, sizes: Dims) -> Arguments:
    """Shapes for these sizes."""
    shapes = op.shapes(sizes)
    return {
        name: x if isinstance(x, jaxops.Quantized) else jax.tree.map(functools.partial(half, name), x)
        for name, x in shapes.items()
    }


@pytest.mark.parametrize(("name", "i", "mapped"), CASES)
@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_offsets_of_elements(name, i, mapped, backend):
    """Pallas indexes arrays of more than 2**32 bytes in 64 bits: FP8 arrays of 2**31 to 2**32 elements would overflow.
    The launch gives a kernel more rows then (jaxops/_lib/pallas/launch_pallas.py)."""
    op = EVERYTHING[name]
    sizes, how = op.large[i]
    how = dict(how) | ({"backend": backend} if op.pallas else {})
    given = operands(op, sizes)
    if mapped:
        rows = max(op.sizes, key=lambda size: sizes[size])  # a third as many in each of three
        given = operands(op, sizes | {rows: sizes[rows] // 3})
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), given)
    held = {} if "out_dtype" in how else {key: given[key] for key in op.wrt}
    others = {key: x for key, x in given.items() if key not in held}

    def step(held, others):
        f = functools.partial(op.call, **how)
        f = jax.vmap(f) if mapped else f
        if not held:
            return f(others)
        return jax.grad(
            lambda held: sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(f(held | others)) if is_float(x))
        )(held)

    largest = max(math.prod(x.shape) for x in jax.tree.leaves(given))
    with on_h200():
        jaxpr = jax.make_jaxpr(step)(held, others).jaxpr
    assert largest > MANY or "out_dtype" in how
    seen = kernel_arrays(jaxpr)
    assert not overflow_int32(seen)
    assert not [x for x in seen if any(size >= MANY for size in x.shape)], (
        "one dimension alone is more than int32 counts"
    )
