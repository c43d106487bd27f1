"""FP8 quantisation in numpy, with float64 divisions and roundings: every backend must give the same bits."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.quantize import Beside, Format, Gathered, Plan, Tiles, cast
from tests.arrays import put

# "interpret": the kernels in Pallas' interpreter, on the CPU; on the GPU, "gpu" the kernels and "gpu-xla" plain XLA.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("gpu-xla", marks=pytest.mark.gpu)]
KERNELS = RUNS[1:3]
SCALINGS = ["tensorwise", "rowwise", "block_1x128", "block_128x128"]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MOST = {E4M3: 448.0, E5M2: 57344.0}
# Half an ulp: relative to a normal number (3 and 2 bits of mantissa), and half the least subnormal.
RELATIVE, ABSOLUTE = {E4M3: 2.0**-4, E5M2: 2.0**-3}, {E4M3: 2.0**-10, E5M2: 2.0**-17}
LEAST_NORMAL = {E4M3: 2.0**-6, E5M2: 2.0**-14}
MANTISSA = {E4M3: 3, E5M2: 2}
KEY = jax.random.key(7)
R = 300  # rows of these groups
OFFSETS = {
    "unaligned": [0, 70, 201, 202, 300],
    "empty": [0, 0, 128, 128, 300],
    "outside": [17, 45, 45, 174, 290],
    "nothing": [9, 9, 9, 9, 9],
    "whole-blocks": [0, 128, 256, 256, 256],
}


def backend_of(run: str) -> str:
    return "xla" if "xla" in run else "pallas"


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is static in a call."""

    scaling: str = "block_1x128"
    layouts: str = "both"
    dtype: str = E4M3
    pow2: bool = False
    stochastic: bool = False
    ragged: bool = False
    tile: Tiles | None = None
    amax: Tiles | None = None

    def __str__(self):
        return "-".join(
            [
                self.scaling,
                self.layouts,
                *(name for name in ("pow2", "stochastic", "ragged") if getattr(self, name)),
                self.dtype[7:11],
            ]
        )


@functools.cache
def compiled(run: str, v: Variant):
    """A jitted function from a tensor or another source (and offsets, amax) to a Quantized."""
    form = Format(v.scaling, v.dtype, v.pow2)
    plan = Plan(backend_of(run), cast=v.tile, amax=v.amax)  # pyright: ignore[reportArgumentType]

    def call(source, offsets=None, amax=None) -> jaxops.Quantized:
        options = {"group_offsets": offsets, "amax": amax, "key": KEY if v.stochastic else None, "plan": plan}
        if isinstance(source, (Gathered, Beside)):
            return cast(source, form, v.layouts, **options)[0]
        of_form = {"scaling": v.scaling, "dtype": v.dtype, "pow2_scales": v.pow2}
        return jaxops.quantize(source, layouts=v.layouts, **of_form, **options)

    return jax.jit(call)


def make_x(shape, dtype="bfloat16", seed: int = 0) -> jax.Array:
    """Normal numbers; where they fit, huge, tiny, zero and NaN rows, and single NaN, infinities, zeros, subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    M = shape[-2]
    if M > 12:
        for i, scale in {5: 0.0, 6: 1e-30, 7: 1e20, 8: 1e-42, 9: 3.2e38, 10: 1e-5, 11: 200.0, 12: np.nan}.items():
            x[..., i, :] *= scale
    x = x.ravel()
    if x.size > 1000:
        x[70:1000:131] = (np.nan, np.inf, -np.inf, -0.0, 1e-40, 448.0, 2.0**-9, 0.0)
    with np.errstate(over="ignore"):
        return put(x.reshape(shape).astype(np.float32).astype(jnp.dtype(dtype)))


def np_scale(amax, dtype: str, pow2: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(scale, factor), float32, of float32 magnitudes."""
    amax = np.clip(np.asarray(amax, np.float64), 2.0**-92, float(jnp.finfo(jnp.bfloat16).max))
    mantissa, exponent = np.frexp(amax)
    m = np.ldexp(np.ceil(mantissa * 256) / 256, exponent)  # to 8 bits, up
    most = MOST[dtype]
    if pow2:
        mantissa, exponent = np.frexp(m / most)
        scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
        return scale.astype(np.float32), (1 / scale).astype(np.float32)
    mantissa, exponent = np.frexp(most / m)
    factor = np.ldexp(np.floor(mantissa * 2**15 + 0.5) / 2**15, exponent)  # to 15 bits, nearest
    return m.astype(np.float32) * np.float32(1 / most), factor.astype(np.float32)


def np_cast(values: np.ndarray, dtype: str, random: np.ndarray | None = None) -> np.ndarray:
    """float32 to FP8; random: uint32 of the same shape, for stochastic rounding."""
    clipped = np.where(np.isnan(values), values, np.clip(values, -MOST[dtype], MOST[dtype])).astype(np.float32)
    if random is None:
        return clipped.astype(jnp.dtype(dtype))
    drop = 23 - MANTISSA[dtype]
    size = np.abs(clipped.astype(np.float64))
    with np.errstate(invalid="ignore"):
        step = np.ldexp(1.0, np.frexp(np.maximum(np.nan_to_num(size), LEAST_NORMAL[dtype]))[1] - 1 - MANTISSA[dtype])
        steps = (np.rint(np.nan_to_num(size) / step * 2**drop).astype(np.int64) + (random >> (32 - drop))) >> drop
    signed = np.copysign(steps * step, clipped)
    return np.where(np.isnan(clipped), np.nan, signed).astype(np.float32).astype(jnp.dtype(dtype))


def _hash(h: np.ndarray, *rounds: tuple[int, int]) -> np.ndarray:
    for shift, factor in rounds:
        h = ((h ^ (h >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return h


def np_random(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """uint32 [len(rows), len(columns)] of the key `KEY`."""
    words = np.asarray(jax.random.bits(KEY, (2,), np.uint32)).astype(np.uint64)
    both, mask = ((16, 0x7FEB352D), (15, 0x846CA68B)), np.uint64(0xFFFFFFFF)
    r = _hash((rows.astype(np.uint64) * np.uint64(0x9E3779B1) & mask) ^ words[0], *both) | np.uint64(1)
    c = _hash((columns.astype(np.uint64) * np.uint64(0x85EBCA77) & mask) ^ words[1], *both) | np.uint64(1)
    return _hash((r[:, None] * c[None, :]) & mask, both[1]).astype(np.uint32)


def np_rows(x: np.ndarray, v: Variant, random: np.ndarray | None, amax=None) -> tuple[np.ndarray, np.ndarray]:
    """values and scales of the row layout of float32 x [R, C]."""
    R, C = x.shape
    size = np.where(np.isfinite(x), np.abs(x), 0)
    if v.scaling == "tensorwise":
        scale, factor = np_scale(size.max(initial=0) if amax is None else amax, v.dtype, v.pow2)
        factors = np.broadcast_to(factor, x.shape)
    elif v.scaling == "rowwise":
        scale, factor = np_scale(size.max(axis=1, initial=0), v.dtype, v.pow2)
        factors = np.broadcast_to(factor[:, None], x.shape)
    else:
        height = 128 if v.scaling == "block_128x128" else 1
        scale, factors = np.zeros((-(-R // height), -(-C // 128)), np.float32), np.zeros(x.shape, np.float32)
        for j in range(scale.shape[1]):
            columns = slice(128 * j, 128 * j + 128)
            of_rows = size[:, columns].max(axis=1)
            of_blocks = np.array([of_rows[i : i + height].max() for i in range(0, R, height)])
            scale[:, j], factor = np_scale(of_blocks, v.dtype, v.pow2)
            factors[:, columns] = np.repeat(factor, height)[:R, None]
        scale = scale if height > 1 else scale.T
    with np.errstate(all="ignore"):
        values = (
            np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x) * factors
        )  # too small to be seen in any format
    return np_cast(np.where(np.isinf(x), np.nan, values), v.dtype, random), scale


def np_quantize(x, v: Variant, offsets=None, amax=None) -> dict[str, np.ndarray]:
    """values, scales, values_t, scales_t of one matrix. Ragged: scales -1 and values 0 behind the last group."""
    x = np.asarray(x).astype(np.float32)
    M, K = x.shape
    random = np_random(np.arange(M), np.arange(K)) if v.stochastic else None
    if offsets is not None and v.scaling == "tensorwise" and amax is None:
        inside = x[offsets[0] : offsets[-1]]
        amax = np.where(np.isfinite(inside), np.abs(inside), 0).max(initial=0)
    row = np_rows(x, v, random, amax)
    if offsets is None:
        col = np_rows(x.T, v, None if random is None else random.T, amax)
    else:
        padded = 128 * (-(-M // 128) + len(offsets) - 1)
        held = np.zeros((padded, K), np.float32)
        bits = np.zeros((padded, K), np.uint32)
        at = 0
        for lo, hi in itertools.pairwise(offsets):
            held[at : at + hi - lo] = x[lo:hi]
            if random is not None:
                bits[at : at + hi - lo] = random[lo:hi]
            at += -(-(hi - lo) // 128) * 128
        col = np_rows(held.T, v, None if random is None else bits.T, amax)
    return dict(zip(("values", "scales", "values_t", "scales_t"), (*row, *col), strict=True))


def bits_of(a) -> np.ndarray:
    """Its bytes, with one number for every NaN: formats have several, and who makes which differs."""
    a = np.asarray(a)
    unsigned = a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize])
    return np.where(np.isnan(a.astype(np.float32)), np.array(255, unsigned.dtype), unsigned)


def check_bits(name: str, got, want) -> None:
    """Shape, dtype and every bit."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    wrong = bits_of(got) != bits_of(want)
    where = np.argwhere(wrong)[:5].tolist()
    shown = "; ".join(f"{at}: got {got[tuple(at)]}, wanted {want[tuple(at)]}" for at in where)
    assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.size} differ: {shown}"


def check_equal(got, want: dict[str, np.ndarray], v: Variant, offsets=None) -> None:
    """The layouts that v asks for are there, with the very bits wanted; and no others."""
    used = None if offsets is None else sum(-(-int(n) // 128) for n in np.diff(offsets))
    for name in ("values", "scales", "values_t", "scales_t"):
        a, b = getattr(got, name), want[name]
        if (v.layouts == "row" and name.endswith("_t")) or (v.layouts == "col" and not name.endswith("_t")):
            assert a is None, name
            continue
        if used is not None and name == "values_t":
            assert a.shape == b.shape
            a, b = a[:, : 128 * used], b[:, : 128 * used]
        if used is not None and name == "scales_t" and v.scaling == "block_1x128":
            assert a.shape == b.shape
            a, b = a[:used], b[:used]
        check_bits(f"{v}, {name}", a, b)


def check_stack(got, x, v: Variant, amax=None) -> None:
    """As `check_equal`, of each matrix of a stack; amax: a number each."""
    for i in range(len(x)):
        one = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], got)
        check_equal(one, np_quantize(x[i], v, amax=None if amax is None else np.float32(amax[i])), v)
