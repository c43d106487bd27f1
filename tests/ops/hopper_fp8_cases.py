"""Random problems for the Hopper kernels of FP8 products, as in hopper_cases.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.device import current_device
from jaxops._lib.ragged.offsets import padded_rows, padded_starts
from jaxops.ops.fp8_matmul import RECIPES, Tiles
from jaxops.ops.fp8_matmul.operand import Operand
from jaxops.ops.fp8_matmul.xla import multiply_xla
from jaxops.ops.moe_mlp.unit_fp8 import unit_cast
from tests.arrays import put
from tests.ops.fp8_matmul.cases import operand_shapes
from tests.ops.hopper_cases import ACTIVATIONS, KINDS, Problem, groups, inside_of, kind, offsets_of, whole, wild_indices

__all__ = ["KINDS"]


def _operand(rng, scaling: str, *shape: int, dtype=jnp.float8_e4m3fn, nan=None) -> Operand:
    """Whole numbers, and scales that are powers of two. nan: rows that are NaN, and so are their scales."""
    values = whole(rng, *shape, most=2, dtype=dtype)
    scales = np.asarray(np.exp2(rng.integers(-2, 3, operand_shapes(scaling, *shape).scales.shape)), np.float32)
    if nan is not None:
        values[nan] = np.nan
        if scaling in ("rowwise", "block_1x128"):
            scales[..., nan] = np.nan
    return Operand(put(values), put(scales), scaling)


SCALINGS = {
    "tensor": ("tensorwise", "tensorwise"),
    "fast": ("tensorwise", "tensorwise"),
    "rowwise": ("rowwise", "rowwise"),
    "rowwise-fast": ("rowwise", "rowwise"),
    "blocks": ("block_1x128", "block_128x128"),
    "outer": ("block_1x128", "block_1x128"),
}


# Columns of the result, length of the sums, tiles, and whether the result is in 32 bits.
_WAYS = [
    (264, 272, (128, 128, 5), False),
    (131, 700, (192, 128, 3), False),
    (200, 160, (128, 64, 6), True),
    (272, 96, (192, 128, 4), True),
    (131, 272, (128, 128, 6), False),  # without room for a tile that is stored
    (144, 384, (128, 64, 8), False),
]


def _fp8(name: str, way: tuple, a: Operand, b: Operand, offsets, length=None) -> Problem:
    fast, out = "fast" in name, ("bfloat16", "float32")[way[3]]
    bm, bn, stages = (128, 256, 3) if fast and way[2] == (128, 128, 5) else way[2]
    tiles = Tiles("triton", bm, bn, stages=stages, panel=2)

    def run(a, b, offsets):
        from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton

        how = {"fast": fast, "tiles": tiles, "cores": current_device().cores, "out_dtype": jnp.dtype(out)}
        return multiply_triton(a, b, offsets, length=length, **how)

    def want():
        return (np.asarray(multiply_xla(a, b, offsets, length=length, out_dtype=jnp.dtype(out))),)

    return Problem(run, (a, b, offsets), want)


@kind("fp8_dense", *SCALINGS)
def _fp8_dense(name: str, rng) -> Problem:
    (M, way), (left, right) = (int(rng.integers(300, 500)), _WAYS[list(SCALINGS).index(name)]), SCALINGS[name]
    return _fp8(name, way, *(_operand(rng, scaling, n, way[1]) for scaling, n in ((left, M), (right, way[0]))), None)


@kind("fp8_rows", *[name for name in SCALINGS if name != "outer"])
def _fp8_rows(name: str, rng) -> Problem:
    M, G, way = int(rng.integers(300, 500)), 5, _WAYS[list(SCALINGS).index(name) - 2]
    (N, K, _, _), offsets = way, offsets_of(rng, M, G)
    offsets[-2] = max(offsets[-2], M - 30)  # a short group, whose scale may be NaN
    outside = ~inside_of(offsets, M)
    a = _operand(rng, SCALINGS[name][0], M, K, nan=outside)
    b = _operand(rng, SCALINGS[name][1], G, N, K)
    if name.startswith(("tensor", "fast")):  # one scale a group
        scales = np.exp2(rng.integers(-2, 3, G)).astype(np.float32)
        scales[-1] = np.nan  # reaches no row behind its group
        b = dataclasses.replace(b, scales=put(scales))
    if name.startswith("rowwise"):
        b = dataclasses.replace(b, scales=put(np.exp2(rng.integers(-2, 3, (G, N))), jnp.float32))
    return _fp8(name, way, a, b, put(offsets))


@kind("fp8_contraction", "tensor", "fast", "rowwise", "outer")
def _fp8_contraction(name: str, rng) -> Problem:
    """Groups of several steps, whose column layouts are padded with zeros."""
    length, G, way = 900, 5, _WAYS[list(SCALINGS).index(name) - 4]
    M, N = int(rng.choice([200, 131])), way[0]
    offsets = offsets_of(rng, length, G)
    Kp = padded_rows(length, G)
    a, b = (_operand(rng, scaling, n, Kp) for scaling, n in zip(SCALINGS[name], (M, N), strict=True))
    starts, inside = np.asarray(padded_starts(put(offsets), length)), np.zeros(Kp, bool)
    for (_, rows), start in zip(groups(offsets), starts[:-1], strict=True):
        inside[start : start + rows.stop - rows.start] = True
    a, b = (dataclasses.replace(x, values=put(np.where(inside, x.values, 0), x.values.dtype)) for x in (a, b))
    return _fp8(name, way, a, b, put(offsets), length)


@kind("fp8_unit", *ACTIVATIONS, "silu-gathered", "gelu-gathered")
def _fp8_unit(name: str, rng) -> Problem:
    """The bits of the product, and the unit and its cast by Pallas."""
    activation, _, gathered = name.partition("-")
    M, K, F, G = 430, int(rng.choice([272, 150])), 256, 5
    T, offsets = 300 if gathered else M, offsets_of(rng, M, G)
    if name == "gelu-gathered":  # no index is read behind the last one
        offsets[-1] = M
    b = _operand(rng, "block_128x128", G, 2 * F, K)
    indices = wild_indices(rng, T, M)
    indices[8], indices[-7] = 0, T - 1
    tokens = _operand(rng, "block_1x128", T, K, nan=None if gathered else ~inside_of(offsets, M))
    zero = 0 if gathered else 8  # a row of zeros: its scale is the smallest one
    tokens = dataclasses.replace(tokens, values=tokens.values.at[zero].set(0))
    b = dataclasses.replace(b, scales=b.scales.at[2, 0].set(jnp.nan))  # of gate alone
    at = np.clip(indices, 0, T - 1)
    rows = Operand(tokens.values[at], tokens.scales[:, at], tokens.scaling) if gathered else tokens
    tiles = Tiles("triton", 128, 128, stages=int(rng.integers(2, 5)), panel=2)
    pow2, save, inside = bool(rng.integers(2)), activation != "relu", inside_of(offsets, M)

    def run(tokens, b, starts, indices):
        from jaxops.ops.fp8_matmul.unit_triton import unit_triton

        given = (indices,) if gathered else ()
        how = {"activation": activation, "pow2": pow2, "save": save, "tiles": tiles, "cores": current_device().cores}
        values, scales, *saved = unit_triton(tokens, b, starts, *given, **how)
        return values, jnp.where(inside, scales, 0), *saved

    def want():
        gate_up = multiply_xla(rows, b, put(offsets), out_dtype=jnp.dtype("bfloat16"))
        recipe = RECIPES["blockwise"].with_pow2_scales() if pow2 else RECIPES["blockwise"]
        h = unit_cast(activation, recipe, gate_up, put(offsets), backend="pallas")
        values = np.where(inside[:, None], np.asarray(h.values).astype(np.float32), 0)
        return (values, np.where(inside, h.scales, 0), *[np.asarray(gate_up)] * save)

    return Problem(run, (tokens, b, put(offsets), put(indices, jnp.int32)), want, close=1)
