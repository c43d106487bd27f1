"""The shapes and dtypes of every public function, as jaxtyping signatures, and calls that they check. Run by test_jaxtyping.py.

In a process of its own: the import hook below puts beartype on every function of jaxops, and its error would come before the errors that the ops raise
themselves, which the other tests look at.
"""

import inspect

import pytest
from beartype import beartype
from jaxtyping import Array, Float, Int, Int32, TypeCheckError, install_import_hook, jaxtyped

with install_import_hook("jaxops", "beartype.beartype"):
    import jaxops
    from jaxops.ops.adaln import Plan as RowPlan
    from jaxops.ops.grouped_matmul import Plan

import jax
import jax.numpy as jnp

typed = jaxtyped(typechecker=beartype)


@typed
def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_offsets: Int32[Array, "G+1"],
    *,
    bias: Float[Array, "G N"] | None = None,
    **options,
) -> Float[Array, "M N"]:
    return jaxops.grouped_matmul(lhs, rhs, group_offsets, bias=bias, **options)


@typed
def grouped_matmul_transposed(lhs: Float[Array, "M K"], rhs: Float[Array, "G N K"], group_offsets: Int32[Array, "G+1"]) -> Float[Array, "M N"]:
    return jaxops.grouped_matmul(lhs, rhs, group_offsets, transpose_rhs=True)


@typed
def grouped_wgrad(
    lhs: Float[Array, "M K"],
    dout: Float[Array, "M N"],
    group_offsets: Int32[Array, " offsets"],
    *,
    accumulate_into: Float[Array, "offsets-1 K N"] | None = None,
    **options,
) -> Float[Array, "offsets-1 K N"]:
    return jaxops.grouped_wgrad(lhs, dout, group_offsets, accumulate_into=accumulate_into, **options)


@typed
def ragged_dot(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"],
    group_sizes: Int[Array, " H"],
    *,
    group_offset: Int[Array, "1"] | None = None,
    **options,
) -> Float[Array, "M N"]:
    return jaxops.ragged_dot(lhs, rhs, group_sizes, group_offset=group_offset, **options)


@typed
def adaln(
    x: Float[Array, "T D"],
    scale: Float[Array, "B D"],
    shift: Float[Array, "B D"],
    sequence_offsets: Int32[Array, "B+1"] | None = None,
    *,
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    **options,
) -> Float[Array, "T D"]:
    return jaxops.adaln(x, scale, shift, sequence_offsets, weight=weight, bias=bias, **options)


@typed
def adaln_per_row(
    x: Float[Array, "T D"], scale: Float[Array, "T D"], shift: Float[Array, "T D"], sequence_offsets: Int32[Array, " offsets"]
) -> Float[Array, "T D"]:
    return jaxops.adaln(x, scale, shift, sequence_offsets)


@typed
def gated_residual(
    residual: Float[Array, "T D"], h: Float[Array, "T D"], gate: Float[Array, "B D"], sequence_offsets: Int32[Array, "B+1"] | None = None, **options
) -> Float[Array, "T D"]:
    return jaxops.gated_residual(residual, h, gate, sequence_offsets, **options)


@typed
def gated_residual_adaln(
    residual: Float[Array, "T D"],
    h: Float[Array, "T D"],
    gate: Float[Array, "B D"],
    scale: Float[Array, "B D"],
    shift: Float[Array, "B D"],
    sequence_offsets: Int32[Array, "B+1"] | None = None,
    *,
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    **options,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    return jaxops.gated_residual_adaln(residual, h, gate, scale, shift, sequence_offsets, weight=weight, bias=bias, **options)


SIGNATURES = {
    "adaln": adaln,
    "gated_residual": gated_residual,
    "gated_residual_adaln": gated_residual_adaln,
    "grouped_matmul": grouped_matmul,
    "grouped_wgrad": grouped_wgrad,
    "ragged_dot": ragged_dot,
}

M, K, N, G = 5, 3, 4, 2
B = G  # sequences
LHS, RHS, BIAS, DOUT = jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.ones((G, N)), jnp.ones((M, N))
OFFSETS, SIZES = jnp.array([0, 2, 5], jnp.int32), jnp.array([2, 3])
VECTORS, VECTOR = jnp.ones((G, K)), jnp.ones(K)  # of two sequences, beside LHS as their rows


def test_every_public_function_has_a_signature():
    assert set(SIGNATURES) == set(jaxops.__all__)
    for name, signature in SIGNATURES.items():
        named = {p.name for p in inspect.signature(signature).parameters.values() if p.kind is not p.VAR_KEYWORD}
        assert named <= set(inspect.signature(getattr(jaxops, name)).parameters)


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_pass(backend, dtype):
    def calls(lhs, rhs, bias, dout):
        return [
            grouped_matmul(lhs, rhs, OFFSETS, bias=bias, backend=backend),
            grouped_matmul(lhs, RHS, OFFSETS, compute_dtype=dtype, plan=Plan(backend)),
            grouped_matmul_transposed(lhs, rhs.mT, OFFSETS),
            grouped_wgrad(lhs, dout, OFFSETS, accumulate_into=RHS, backend=backend),
            ragged_dot(lhs, rhs, SIZES, preferred_element_type=jnp.float32, backend=backend),
            ragged_dot(lhs, rhs[:1], SIZES, group_offset=jnp.array([1]), backend=backend),
        ]

    # Traced, not run: shapes and dtypes are all that is looked at here.
    outs = jax.eval_shape(calls, *(x.astype(dtype) for x in (LHS, RHS, BIAS, DOUT)))
    assert [out.dtype for out in outs] == [dtype, dtype, dtype, jnp.float32, jnp.float32, dtype]


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_of_rows_pass(backend, dtype):
    def calls(x, vectors, vector):
        return [
            adaln(x, vectors, vectors, OFFSETS, weight=vector, bias=vector, activation="gelu", backend=backend),
            adaln(x, vectors[:1], vectors[:1], norm="rms", plan=RowPlan(backend)),
            adaln_per_row(x, x, x, OFFSETS),
            gated_residual(x, x, vectors, OFFSETS, backend=backend),
            gated_residual_adaln(x, x, vectors, vectors, vectors, OFFSETS, weight=vector, out_dtype=jnp.float32, backend=backend),
        ]

    outs = jax.eval_shape(calls, *(x.astype(dtype) for x in (LHS, VECTORS, VECTOR)))
    assert [out.dtype for out in jax.tree.leaves(outs)] == [*[dtype] * 5, jnp.float32]
    grads = jax.eval_shape(jax.grad(lambda x, scale: adaln(x, scale, VECTORS, OFFSETS, backend=backend).sum(), argnums=(0, 1)), LHS, VECTORS)
    assert [g.shape for g in grads] == [(M, K), (G, K)]


def test_right_shapes_pass_under_transformations():
    grads = jax.jit(jax.grad(lambda *args: grouped_matmul(*args[:2], OFFSETS, bias=args[2]).sum(), argnums=(0, 1, 2)))(LHS, RHS, BIAS)
    assert [g.shape for g in grads] == [(M, K), (G, K, N), (G, N)]
    assert jax.vmap(lambda x: grouped_matmul(x, RHS, OFFSETS))(jnp.stack([LHS, LHS])).shape == (2, M, N)


@pytest.mark.parametrize(
    "call",
    [
        lambda: grouped_matmul(LHS, RHS.mT, OFFSETS),
        lambda: grouped_matmul(LHS, RHS, OFFSETS[:-1]),
        lambda: grouped_matmul(LHS, RHS, OFFSETS.astype(jnp.float32)),
        lambda: grouped_matmul(LHS, RHS, OFFSETS, bias=BIAS.T),
        lambda: grouped_wgrad(LHS, DOUT[1:], OFFSETS),
        lambda: grouped_wgrad(LHS, DOUT, OFFSETS, accumulate_into=RHS.mT),
        lambda: ragged_dot(LHS, RHS[0], SIZES),
        lambda: ragged_dot(LHS, RHS, SIZES, group_offset=jnp.array([0, 1])),
        lambda: adaln(LHS, VECTORS.T, VECTORS, OFFSETS),
        lambda: adaln(LHS, VECTORS, VECTORS, OFFSETS[:-1]),
        lambda: adaln(LHS, VECTORS, VECTORS, OFFSETS, weight=VECTORS),
        lambda: adaln_per_row(LHS, VECTORS, VECTORS, OFFSETS),
        lambda: gated_residual(LHS, LHS[1:], VECTORS, OFFSETS),
        lambda: gated_residual_adaln(LHS, LHS, VECTORS, VECTORS, LHS, OFFSETS),
    ],
)
def test_wrong_shapes_are_refused(call):
    with pytest.raises(TypeCheckError):
        call()
