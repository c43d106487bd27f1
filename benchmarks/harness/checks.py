"""Correctness before timing: sampled rows of a result are compared with float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness.packing import Sequences
from benchmarks.shapes import GroupedShape, sampled_packed_rows, sampled_rows

# Largest error over the row's RMS, and RMS error over it. bfloat16 rounds the result to 2^-9 of itself, and a row of
# normal data reaches about 5 RMS. AdaLN multiplies two normal factors: elements reach 15 RMS, and one factor is
# rounded with the new residual. An MLP rounds what is between its products, and their gradients. Attention rounds its
# probabilities and their gradients to bfloat16 before the products. FP8 of normal data: a tensor in e4m3 has an RMS
# error of 0.026, a product of two 0.042, of one in e5m2 0.067, for any length of the sum; a missing block of 128 of
# 16,384 adds 0.088.
LIMITS = {
    "bfloat16": (4e-2, 1e-2),
    "float32": (1e-3, 1e-4),
    "bfloat16 adaln": (1e-1, 1e-2),
    "bfloat16 mlp": (1e-1, 1e-2),
    "bfloat16 attention": (2.5e-1, 2.5e-2),
    "fp8 cast": (4e-1, 3.5e-2),
    "fp8": (3e-1, 6e-2),
    "fp8 e5m2": (4.5e-1, 9e-2),
    "fp8 short sums": (4.5e-1, 1e-1),  # of a few products: a row has one factor's whole error, 0.06 at most
}
_PER_SEQUENCE = ("dgate", "dscale", "dshift")
_CHUNK_ROWS = 2048  # of float32 rows at a time: the reference needs little memory beside what is on trial


def within_limits(max_err: float, rms_err: float, dtype: str) -> bool:
    """Whether both errors are within the limits of the dtype; NaN is not."""
    return max_err <= LIMITS[dtype][0] and rms_err <= LIMITS[dtype][1]


def demand_right(max_err: float, rms_err: float, dtype: str) -> float:
    """max_err.

    Raises:
      ArithmeticError: the errors exceed the limits of the dtype.
    """
    if not within_limits(max_err, rms_err, dtype):
        raise ArithmeticError(f"wrong result: max error {max_err:.2e}, RMS error {rms_err:.2e} of the row's RMS")
    return max_err


def grouped_errors(
    pass_name: str, shape: GroupedShape, out: jax.Array, inputs: tuple[jax.Array, ...], offsets: np.ndarray
) -> tuple[float, float]:
    """(largest error over RMS, RMS error over RMS) of a pass's result, the worst of the sampled rows.

    Infinite for a nonzero row that must be 0. inputs are lhs, rhs, dout.
    """
    groups, rows = sampled_rows(pass_name, shape, offsets)
    right_shape = {"fwd": (shape.M, shape.N), "dgrad": (shape.M, shape.K), "wgrad": (shape.G, shape.K, shape.N)}[
        pass_name
    ]
    if out.shape != right_shape:
        raise ValueError(f"{pass_name} returned {out.shape}, it must be {right_shape}.")
    worst = errors_of_rows(pass_name, out, *inputs, jnp.asarray(offsets), jnp.asarray(groups), jnp.asarray(rows))
    return float(worst[0]), float(worst[1])


@functools.partial(jax.jit, static_argnums=0)
def errors_of_rows(pass_name: str, out, lhs, rhs, dout, offsets, groups, rows):
    # One row at a time, as a multiply and a reduction: exact float32 (no TF32), no [G, M, K], and no GEMM to autotune.
    def row_errors(index):
        g, r = index
        if pass_name == "fwd":
            want, got = jnp.sum(lhs[r].astype(jnp.float32)[:, None] * rhs[g].astype(jnp.float32), axis=0), out[r]
        elif pass_name == "dgrad":
            want, got = jnp.sum(dout[r].astype(jnp.float32)[None, :] * rhs[g].astype(jnp.float32), axis=1), out[r]
        else:
            m = jnp.arange(lhs.shape[0])
            column = jnp.where((offsets[g] <= m) & (m < offsets[g + 1]), lhs[:, r].astype(jnp.float32), 0)
            want, got = jnp.sum(column[:, None] * dout.astype(jnp.float32), axis=0), out[g, r]
        return _relative(got, want)

    return jnp.max(lax.map(row_errors, (groups, rows)), axis=0)  # max passes NaN on


def _relative(got: jax.Array, want: jax.Array) -> jax.Array:
    """[largest, RMS] error of each row (last axis) over its RMS, in float32; infinite if a row must be 0 and is not."""
    diff = got.astype(jnp.float32) - want
    rms, max_err, rms_err = (
        jnp.sqrt(jnp.mean(want**2, axis=-1)),
        jnp.max(jnp.abs(diff), axis=-1),
        jnp.sqrt(jnp.mean(diff**2, axis=-1)),
    )
    relative = jnp.stack([max_err, rms_err]) / jnp.where(rms > 0, rms, 1)[None]
    return jnp.where(((rms > 0) | (max_err == 0))[None], relative, jnp.inf)


def relative_errors(got: jax.Array, want: jax.Array) -> jax.Array:
    """[largest error, RMS error] over the row's RMS, the worst of all rows."""
    return jnp.max(_relative(got, want), axis=1)  # max passes NaN on


@jax.jit
def _worst_errors(got, want) -> jax.Array:
    rows = lambda x: x.reshape(-1, x.shape[-1])
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jnp.max(jnp.stack([relative_errors(rows(g), rows(w)) for g, w in pairs]), axis=0)  # max passes NaN on


def worst_errors(got, want) -> tuple[float, float]:
    """(largest, RMS) error of each row (last axis) over its RMS, the worst of all arrays of two trees."""
    max_err, rms_err = _worst_errors(got, want)
    return float(max_err), float(rms_err)


def packed_errors(
    results: dict[str, jax.Array], inputs: dict[str, jax.Array], offsets: np.ndarray
) -> tuple[float, float]:
    """As grouped_errors, of results of adaln or gated_residual_adaln.

    results: of y, new_residual, dx and dh sampled rows are checked, of dgate, dscale and dshift all.
    inputs: x (the residual), scale, shift, dy and, for gated_residual_adaln, h, gate and dnew_residual.
    """
    for name, result in results.items():
        like = inputs["x" if name in ("y", "new_residual") else name.removeprefix("d")]
        if result.shape != like.shape:
            raise ValueError(f"{name} has shape {result.shape}, it must be {like.shape}.")
    _, rows = sampled_packed_rows(offsets)
    worst = _packed_errors(results, inputs, jnp.asarray(offsets), jnp.asarray(rows))
    return float(worst[0]), float(worst[1])


@jax.jit
def _packed_errors(results, inputs, offsets, rows):
    per_row = {name: result for name, result in results.items() if name not in _PER_SEQUENCE}
    want = _reference_rows(inputs, offsets, rows)
    errors = [_relative(result[rows], want[name]) for name, result in per_row.items()]
    if sums := {
        name: jnp.zeros(result.shape, jnp.float32) for name, result in results.items() if name in _PER_SEQUENCE
    }:
        T = inputs["x"].shape[0]

        def add_chunk(sums, start):
            chunk = start + jnp.arange(_CHUNK_ROWS)
            shares = _reference_rows(inputs, offsets, jnp.minimum(chunk, T - 1))
            mine = _sequence_of(offsets, chunk)  # T and beyond: past the last sequence, and dropped
            return {name: total.at[mine].add(shares[name], mode="drop") for name, total in sums.items()}, None

        want, _ = lax.scan(add_chunk, sums, jnp.arange(0, T, _CHUNK_ROWS))
        errors += [_relative(results[name], want[name]) for name in sums]
    return jnp.max(jnp.concatenate(errors, axis=1), axis=1)  # max passes NaN on


def _sequence_of(offsets, rows):
    return jnp.searchsorted(offsets, rows, side="right") - 1


def _reference_rows(inputs, offsets, rows) -> dict[str, jax.Array]:
    """All results for some rows, [n, D] in float32; dgate, dscale and dshift are a row's term of the sum."""
    mine = _sequence_of(offsets, rows)
    zeros = jnp.zeros((rows.shape[0], inputs["x"].shape[1]), jnp.float32)

    def of(name, index):
        return inputs[name][index].astype(jnp.float32) if name in inputs else zeros

    def forward(x, h, gate, scale, shift):
        new_residual = x + gate * h
        n = new_residual - jnp.mean(new_residual, axis=-1, keepdims=True)
        return new_residual, n * lax.rsqrt(jnp.mean(n**2, axis=-1, keepdims=True) + 1e-6) * (1 + scale) + shift

    operands = (of("x", rows), of("h", rows), of("gate", mine), of("scale", mine), of("shift", mine))
    (new_residual, y), vjp = jax.vjp(forward, *operands)
    grads = vjp((of("dnew_residual", rows), of("dy", rows)))
    return {"new_residual": new_residual, "y": y} | dict(
        zip(("dx", "dh", "dgate", "dscale", "dshift"), grads, strict=True)
    )


def linear_errors(results: dict[str, jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[float, float]:
    """As grouped_errors, of any of y, dx and dw [K, N], against the products of unquantised operands; the worst."""
    shape, offsets = GroupedShape("", 1, x.shape[0], *w.shape), np.array([0, x.shape[0]], np.int32)
    passes = {"y": "fwd", "dx": "dgrad", "dw": "wgrad"}
    grouped = {name: result[None] if name == "dw" else result for name, result in results.items()}
    errors = [
        grouped_errors(passes[name], shape, result, (x, w[None], dy), offsets) for name, result in grouped.items()
    ]
    return float(np.max([e[0] for e in errors])), float(np.max([e[1] for e in errors]))  # np.max passes NaN on


@jax.jit
def attention_reference(q, k, v, dout, sequences: Sequences) -> dict[str, jax.Array]:
    """out, dq [T, N, H], dk, dv [T, K, H] in float32: one sequence and one head of its keys after another."""
    rows, inside = sequences.rows()
    (T, N, H), K = q.shape, k.shape[1]

    def of_sequence(index):
        rows, inside = index
        seen = (rows[None, :] >= sequences.first[rows][:, None]) & (rows[None, :] < sequences.until[rows][:, None])
        mask = inside[None, :] & seen

        def of_head(operands):
            def attend(q, k, v):
                logits = jnp.einsum("ignh,jnh->ngij", q, k, precision="highest") * H**-0.5
                weights = jax.nn.softmax(jnp.where(mask[None, None], logits, -1e30), axis=-1)
                return jnp.einsum("ngij,jnh->ignh", weights, v, precision="highest")

            *qkv, dout = operands
            out, vjp = jax.vjp(attend, *qkv)
            return out, *vjp(dout)

        def heads_first(x):
            x = jnp.where(inside[:, None, None], x[rows].astype(jnp.float32), 0)
            return jnp.moveaxis(x.reshape(x.shape[0], K, -1, 1, H), 1, 0)

        q_heads, dout_heads = heads_first(q), heads_first(dout)
        k_heads, v_heads = (heads_first(x)[:, :, 0] for x in (k, v))
        return lax.map(of_head, (q_heads, k_heads, v_heads, dout_heads))

    # [B, K, longest, N / K, 1, H], of keys [B, K, longest, 1, H].
    out, dq, dk, dv = lax.map(of_sequence, (rows, inside))
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return {
        name: jnp.moveaxis(x, 1, 2)[sequences.places()].reshape(T, N if x.ndim == 6 else K, H)
        for name, x in found.items()
    }


def attention_errors(results: dict[str, jax.Array], want: dict[str, jax.Array]) -> tuple[float, float]:
    """As grouped_errors, of all rows of the results; a row is a token with all its heads. An error counts over at least
    the RMS of all rows: a row that sees itself alone has a dq of zero, which is the difference of two roundings."""
    worst = [_attention_errors(result, want[name]) for name, result in results.items()]
    return float(np.max([w[0] for w in worst])), float(np.max([w[1] for w in worst]))  # np.max passes NaN on


@jax.jit
def _attention_errors(result, want):
    result, want = (x.reshape(x.shape[0], -1) for x in (result, want))
    diff, every = result.astype(jnp.float32) - want, jnp.mean(want**2)
    rms = jnp.sqrt(jnp.maximum(jnp.mean(want**2, axis=1), every))
    largest, mean = jnp.max(jnp.abs(diff), axis=1), jnp.sqrt(jnp.mean(diff**2, axis=1))
    return jnp.stack([jnp.max(largest / rms), jnp.max(mean / rms)])
