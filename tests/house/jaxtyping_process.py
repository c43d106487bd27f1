"""The shapes and dtypes of every public function, as jaxtyping signatures, and calls that they check. Run by test_jaxtyping.py in a process of its own:
the import hook below puts beartype on every function of jaxops, and its error would come before the ops' own, which the other tests look at."""

import inspect

import pytest
from beartype import beartype
from jaxtyping import Array, Float, Float32, Int, Int32, TypeCheckError, UInt32, install_import_hook, jaxtyped

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
def grouped_matmul_transposed(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G N K"], group_offsets: Int32[Array, "G+1"]
) -> Float[Array, "M N"]:
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
def grouped_glu(
    x: Float[Array, "M K"],
    w_gate: Float[Array, "G K F"],
    w_up: Float[Array, "G K F"],
    group_offsets: Int32[Array, "G+1"],
    **options,
) -> Float[Array, "M F"]:
    return jaxops.grouped_glu(x, w_gate, w_up, group_offsets, **options)


@typed
def grouped_glu_joined(
    h: Float[Array, "M F"], x: Float[Array, "M K"], w_gate: Float[Array, "G K 2*F"], group_offsets: Int32[Array, "G+1"]
) -> Float[Array, "M F"]:
    """h: of the shape of the result, of any values."""
    return jaxops.grouped_glu(x, w_gate, None, group_offsets)


@typed
def modality_grouped_matmul(
    lhs: Float[Array, "M K"], rhs: tuple[Float[Array, "_ _ _"], ...], group_offsets: Int32[Array, " offsets"], **options
) -> Float[Array, "M _"]:
    return jaxops.modality_grouped_matmul(lhs, rhs, group_offsets, **options)


@typed
def modality_grouped_matmul_of_two(
    lhs: Float[Array, "M K"],
    wide: Float[Array, "G K n"],
    narrow: Float[Array, "B k N"],
    group_offsets: Int32[Array, "G+B+1"],
) -> Float[Array, "M N"]:
    """The first one is the widest in, the second one the widest out."""
    return jaxops.modality_grouped_matmul(lhs, (wide, narrow), group_offsets)


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
    x: Float[Array, "T D"],
    scale: Float[Array, "T D"],
    shift: Float[Array, "T D"],
    sequence_offsets: Int32[Array, " offsets"],
) -> Float[Array, "T D"]:
    return jaxops.adaln(x, scale, shift, sequence_offsets)


@typed
def gated_residual(
    residual: Float[Array, "T D"],
    h: Float[Array, "T D"],
    gate: Float[Array, "B D"],
    sequence_offsets: Int32[Array, "B+1"] | None = None,
    **options,
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
    return jaxops.gated_residual_adaln(
        residual, h, gate, scale, shift, sequence_offsets, weight=weight, bias=bias, **options
    )


@typed
def quantize(
    x: Float[Array, "M K"] | Float[Array, "G M K"],
    *,
    group_offsets: Int32[Array, " offsets"] | None = None,
    amax: Float32[Array, ""] | None = None,
    key: UInt32[Array, "2"] | None = None,
    **options,
) -> jaxops.Quantized:
    return jaxops.quantize(x, group_offsets=group_offsets, amax=amax, key=key, **options)


@typed
def quantize_both(
    x: Float[Array, "M K"], blocks: Float[Array, "KB MB"]
) -> tuple[Float[Array, "M K"], Float[Array, "KB M"], Float[Array, "K M"], Float[Array, "MB K"]]:
    """blocks: as many as there are scales, of any values."""
    q = jaxops.quantize(x, layouts="both")
    return q.values, q.scales, q.values_t, q.scales_t


@typed
def dequantize(q: jaxops.Quantized, dtype=None) -> Float[Array, "*stack M K"]:
    return jaxops.dequantize(q, dtype)


@typed
def fp8_matmul(x: Float[Array, "*leading K"], w: Float[Array, "K N"], **options) -> Float[Array, "*leading N"]:
    return jaxops.fp8_matmul(x, w, **options)


@typed
def fp8_matmul_delayed(
    x: Float[Array, "*leading K"], w: Float[Array, "K N"], amax: tuple[Float32[Array, ""], Float32[Array, ""]]
) -> tuple[Float[Array, "*leading N"], tuple[Float32[Array, ""], Float32[Array, ""]]]:
    return jaxops.fp8_matmul(x, w, recipe="delayed", amax=amax)


@typed
def fp8_grouped_matmul(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], group_offsets: Int32[Array, "G+1"], **options
) -> Float[Array, "M N"]:
    return jaxops.fp8_grouped_matmul(lhs, rhs, group_offsets, **options)


@typed
def route(
    logits: Float[Array, "T E"], k: int, *, selection_bias: Float32[Array, " E"] | None = None, **options
) -> jaxops.Routing:
    return jaxops.route(logits, k, selection_bias=selection_bias, **options)


@typed
def route_parts(
    logits: Float[Array, "T E"], places: Int[Array, "T k"], rows: Int[Array, " T*k"], **options
) -> tuple[
    Float32[Array, "T k"],
    Int32[Array, "T k"],
    Int32[Array, " T*k"],
    Int32[Array, "T k"],
    Int32[Array, " E+1"],
    Int32[Array, " E"],
    Float32[Array, ""],
]:
    """places, rows: as many as there are choices, of any values."""
    r = jaxops.route(logits, places.shape[1], **options)
    return r.weights, r.experts, r.row_indices, r.row_positions, r.group_offsets, r.load, r.aux_loss + r.z_loss


def routing_of(weights, positions, indices, offsets) -> jaxops.Routing:
    return jaxops.Routing(weights, positions, indices, positions, offsets, offsets[1:], weights[0, 0], weights[0, 0])


@typed
def permute(x: Float[Array, "T D"], routing: jaxops.Routing, **options) -> Float[Array, "R D"]:
    return jaxops.permute(x, routing, **options)


@typed
def combine(rows: Float[Array, "R D"], routing: jaxops.Routing, **options) -> Float[Array, "T D"]:
    return jaxops.combine(rows, routing, **options)


@typed
def moe_mlp(
    x: Float[Array, "T D"],
    w_gate: Float[Array, "E D F"],
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F N"],
    routing: jaxops.Routing,
    **options,
) -> Float[Array, "T N"]:
    return jaxops.moe_mlp(x, w_gate, w_up, w_down, routing, **options)


@typed
def permute_and_combine(
    x: Float[Array, "T D"],
    weights: Float32[Array, "T k"],
    positions: Int32[Array, "T k"],
    indices: Int32[Array, " T*k"],
    **options,
) -> tuple[Float[Array, "T*k D"], Float32[Array, "T D"]]:
    routing = routing_of(weights, positions, indices, OFFSETS)
    rows = permute(x, routing, **options)
    return rows, combine(rows, routing, out_dtype=jnp.float32, **options)


@typed
def update_router_bias(
    selection_bias: Float32[Array, " E"], load: Int[Array, " E"] | Float[Array, " E"], rate: float
) -> Float32[Array, " E"]:
    return jaxops.update_router_bias(selection_bias, load, rate)


@typed
def all_gather_matmul(x: Float[Array, "m K"], w: Float[Array, "K n"], axis_name: str, **options) -> Float[Array, "_ n"]:
    return jaxops.all_gather_matmul(x, w, axis_name, **options)


@typed
def matmul_reduce_scatter(
    h: Float[Array, "M n"], w: Float[Array, "n K"], axis_name: str, **options
) -> Float[Array, "_ K"]:
    return jaxops.matmul_reduce_scatter(h, w, axis_name, **options)


SIGNATURES = {
    "adaln": adaln,
    "all_gather_matmul": all_gather_matmul,
    "combine": combine,
    "dequantize": dequantize,
    "fp8_grouped_matmul": fp8_grouped_matmul,
    "fp8_matmul": fp8_matmul,
    "gated_residual": gated_residual,
    "gated_residual_adaln": gated_residual_adaln,
    "grouped_glu": grouped_glu,
    "grouped_matmul": grouped_matmul,
    "grouped_wgrad": grouped_wgrad,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "moe_mlp": moe_mlp,
    "modality_grouped_matmul": modality_grouped_matmul,
    "permute": permute,
    "quantize": quantize,
    "ragged_dot": ragged_dot,
    "route": route,
    "update_router_bias": update_router_bias,
}

M, K, N, G, B = 5, 3, 4, 2, 2  # of rows, columns, groups and sequences
LHS, RHS, BIAS, DOUT = jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.ones((G, N)), jnp.ones((M, N))
OFFSETS, SIZES = jnp.array([0, 2, 5], jnp.int32), jnp.array([2, 3])
VECTORS, VECTOR = jnp.ones((G, K)), jnp.ones(K)  # of two sequences, beside LHS as their rows


def test_every_public_function_of_arrays_has_a_signature():
    assert set(SIGNATURES) == {name for name in jaxops.__all__ if not inspect.isclass(getattr(jaxops, name))} - {
        "bucket_length"
    }
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
            grouped_glu(lhs, rhs, rhs, OFFSETS, activation="gelu", save="nothing", backend=backend),
            grouped_glu_joined(dout[:, : N // 2], lhs, rhs, OFFSETS),
            modality_grouped_matmul(lhs, (rhs[:1], rhs[1:, :2]), OFFSETS, backend=backend),
            modality_grouped_matmul_of_two(lhs, rhs[:1, :, :2], rhs[1:, :2], OFFSETS),
        ]

    # Traced, not run: shapes and dtypes are all that is looked at here.
    outs = jax.eval_shape(calls, *(x.astype(dtype) for x in (LHS, RHS, BIAS, DOUT)))
    assert [out.dtype for out in outs] == [
        dtype,
        dtype,
        dtype,
        jnp.float32,
        jnp.float32,
        dtype,
        dtype,
        dtype,
        dtype,
        dtype,
    ]


def test_right_shapes_across_devices_pass():
    for op in (all_gather_matmul, matmul_reduce_scatter):
        assert jax.eval_shape(jax.vmap(lambda x, op=op: op(x, RHS[0], "i"), axis_name="i"), LHS[None]).shape == (
            1,
            M,
            N,
        )


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_of_rows_pass(backend, dtype):
    def calls(x, vectors, vector):
        return [
            adaln(x, vectors, vectors, OFFSETS, weight=vector, bias=vector, activation="gelu", backend=backend),
            adaln(x, vectors[:1], vectors[:1], norm="rms", plan=RowPlan(backend)),
            adaln_per_row(x, x, x, OFFSETS),
            gated_residual(x, x, vectors, OFFSETS, backend=backend),
            gated_residual_adaln(
                x, x, vectors, vectors, vectors, OFFSETS, weight=vector, out_dtype=jnp.float32, backend=backend
            ),
        ]

    outs = jax.eval_shape(calls, *(x.astype(dtype) for x in (LHS, VECTORS, VECTOR)))
    assert [out.dtype for out in jax.tree.leaves(outs)] == [*[dtype] * 5, jnp.float32]
    grads = jax.eval_shape(
        jax.grad(lambda x, scale: adaln(x, scale, VECTORS, OFFSETS, backend=backend).sum(), argnums=(0, 1)),
        LHS,
        VECTORS,
    )
    assert [g.shape for g in grads] == [(M, K), (G, K)]


def test_right_shapes_of_quantised_tensors_pass():
    for scaling in ("tensorwise", "rowwise", "block_1x128", "block_128x128"):
        for x in (LHS, RHS):
            assert (
                jax.eval_shape(
                    lambda x, scaling=scaling: dequantize(quantize(x, scaling=scaling, layouts="both")), x
                ).shape
                == x.shape
            )
    jax.eval_shape(quantize_both, jnp.ones((300, 130)), jnp.ones((2, 3)))
    jax.eval_shape(
        lambda x: quantize(x, group_offsets=OFFSETS, layouts="col", key=jnp.zeros(2, jnp.uint32)).values_t, LHS
    )
    jax.eval_shape(lambda x: quantize(x, scaling="tensorwise", amax=jnp.float32(1)).values, LHS)


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_of_fp8_products_pass(backend, dtype):
    def calls(lhs, rhs, amax):
        cached = jaxops.quantize(rhs, scaling="block_128x128", layouts="both", backend=backend)
        loss = lambda rhs: fp8_grouped_matmul(lhs, rhs, OFFSETS, rhs_quantized=cached, backend=backend).sum()
        return [
            fp8_matmul(lhs.reshape(1, M, K), rhs[0], recipe="rowwise", out_dtype=jnp.float32, backend=backend),
            fp8_matmul_delayed(lhs, rhs[0], (amax, amax))[0],
            jax.grad(lambda w: fp8_matmul(lhs, w, backend=backend).sum())(rhs[0]),
            fp8_grouped_matmul(lhs, rhs, OFFSETS, recipe="tensorwise", backend=backend),
            jax.grad(loss)(rhs),
        ]

    outs = jax.eval_shape(calls, LHS.astype(dtype), RHS.astype(dtype), jnp.float32(1))
    assert [out.dtype for out in outs] == [jnp.float32, *[dtype] * 4]


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_of_routings_pass(backend, dtype):
    def calls(logits, bias):
        parts = route_parts(
            logits, jnp.zeros((M, 2), jnp.int32), jnp.zeros(2 * M, jnp.int32), capacity=2, backend=backend
        )
        return (
            parts,
            route(
                logits, 2, selection_bias=bias, expert_groups=3, top_expert_groups=2, score="sigmoid", backend=backend
            ).load,
            update_router_bias(bias, parts[5], 0.1),
        )

    logits = LHS.astype(dtype)
    jax.eval_shape(calls, logits, VECTOR)
    assert jax.eval_shape(jax.grad(lambda x: route(x, 2, backend=backend).weights.sum()), logits).dtype == dtype


@pytest.mark.parametrize(("backend", "dtype"), [("xla", jnp.float16), ("pallas", jnp.bfloat16)])
def test_right_shapes_of_rows_of_experts_pass(backend, dtype):
    weights, positions, indices = jnp.ones((M, 2)), jnp.zeros((M, 2), jnp.int32), jnp.zeros(2 * M, jnp.int32)
    call = lambda x, weights: permute_and_combine(x, weights, positions, indices, backend=backend)[1].sum()
    grads = jax.eval_shape(jax.grad(call, argnums=(0, 1)), LHS.astype(dtype), weights)
    assert [(g.shape, g.dtype) for g in grads] == [((M, K), dtype), ((M, 2), jnp.float32)]

    def experts(x, weights, w):
        routing = routing_of(weights, positions, indices, OFFSETS)
        return moe_mlp(
            x,
            w,
            w,
            w.mT,
            routing,
            activation="gelu",
            save="nothing",
            out_dtype=jnp.float32,
            backend=backend,
            compute_dtype=dtype,
        ).sum()

    operands = (LHS.astype(dtype), weights, RHS)
    grads = jax.eval_shape(jax.grad(experts, argnums=(0, 1, 2)), *operands)
    assert [(g.shape, g.dtype) for g in grads] == [(a.shape, a.dtype) for a in operands]


def test_right_shapes_pass_under_transformations():
    grads = jax.jit(jax.grad(lambda *args: grouped_matmul(*args[:2], OFFSETS, bias=args[2]).sum(), argnums=(0, 1, 2)))(
        LHS, RHS, BIAS
    )
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
        lambda: modality_grouped_matmul(LHS, (RHS[0],), OFFSETS),
        lambda: modality_grouped_matmul(LHS, (RHS[:1], RHS[1:]), OFFSETS.astype(jnp.float32)),
        lambda: modality_grouped_matmul_of_two(LHS, RHS[:1, :, :2], RHS[1:, :2], OFFSETS[:-1]),
        lambda: grouped_glu(LHS, RHS, RHS.mT, OFFSETS),
        lambda: grouped_glu(LHS, RHS, RHS, OFFSETS[:-1]),
        lambda: grouped_glu_joined(LHS, LHS, RHS, OFFSETS),
        lambda: adaln(LHS, VECTORS.T, VECTORS, OFFSETS),
        lambda: adaln(LHS, VECTORS, VECTORS, OFFSETS[:-1]),
        lambda: adaln(LHS, VECTORS, VECTORS, OFFSETS, weight=VECTORS),
        lambda: adaln_per_row(LHS, VECTORS, VECTORS, OFFSETS),
        lambda: gated_residual(LHS, LHS[1:], VECTORS, OFFSETS),
        lambda: gated_residual_adaln(LHS, LHS, VECTORS, VECTORS, LHS, OFFSETS),
        lambda: route(LHS, 2, selection_bias=VECTORS),
        lambda: route(VECTOR, 2),
        lambda: route_parts(LHS, SIZES, SIZES),
        lambda: update_router_bias(VECTOR, SIZES, 0.1),
        lambda: permute(VECTOR, routing_of(VECTORS, SIZES, SIZES, OFFSETS)),
        lambda: permute_and_combine(LHS, jnp.ones((M, 2)), jnp.zeros((M, 2), jnp.int32), SIZES),
        lambda: permute_and_combine(LHS, jnp.ones((M, 1)), jnp.zeros((M, 2), jnp.int32), jnp.zeros(2 * M, jnp.int32)),
        lambda: moe_mlp(
            LHS,
            RHS,
            RHS,
            RHS,
            routing_of(jnp.ones((M, 1)), jnp.zeros((M, 1), jnp.int32), jnp.zeros(M, jnp.int32), OFFSETS),
        ),
        lambda: quantize(VECTOR),
        lambda: quantize(LHS, scaling="tensorwise", amax=VECTOR),
        lambda: quantize_both(jnp.ones((300, 130)), jnp.ones((3, 2))),
        lambda: dequantize(LHS),
        lambda: fp8_matmul(LHS, RHS),
        lambda: fp8_matmul(LHS, RHS[0].T),
        lambda: fp8_matmul_delayed(LHS, RHS[0], (VECTOR, VECTOR)),
        lambda: fp8_grouped_matmul(LHS, RHS.mT, OFFSETS),
        lambda: fp8_grouped_matmul(LHS, RHS, OFFSETS[:-1]),
    ],
)
def test_wrong_shapes_are_refused(call):
    with pytest.raises(TypeCheckError):
        call()
