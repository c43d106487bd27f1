"""The one tolerance table, and the comparison that every op's tests use."""

import jax
import jax.numpy as jnp
import numpy as np

# dtype or float32 precision -> (largest error, RMS error), both over the RMS of the reference. The largest error of a
# bfloat16 or float16 result is half an ulp of its largest element (about 5 RMS); the RMS limit catches a few wrong rows
# that one similarity score would hide. An element that is larger still (a product of normal numbers reaches 25 RMS) may
# be wrong by half an ulp of its own.
LIMITS = {
    "float32": (2e-5, 2e-6),
    "tf32": (1e-2, 1e-3),
    # Hopper's tensor core adds FP8 products in about 14 bits: 128 products (measured on an H200: 7e-3, 1.4e-4), or all
    # of K (5e-2, 7e-4).
    "fp8_sum": (2e-2, 3e-4),
    "fp8_fast": (1.5e-1, 2e-3),
    "float16": (8e-3, 8e-4),
    "bfloat16": (6e-2, 6e-3),
}


# For two programs that must give (nearly) the same bits: without optimisation, as on a CPU (conftest.py), XLA of
# JAX 0.12 rounds equal expressions differently in different programs.
OPTIMISED = {"xla_backend_optimization_level": 1} if jax.__version_info__ >= (0, 12) else {}


def assert_close(got, want, kind: str, name: str = "result", scale: float = 1.0, roundings: int = 1) -> None:
    """got equals the float32 reference `want` within both limits of `kind` (times `scale`), and has its shape.

    Where the reference is zero everywhere, got must be zero too. roundings: of an element to bfloat16 or float16, each
    half an ulp of that element, which no sum averages out.
    """
    assert got.shape == want.shape, f"{name}: shape {got.shape}, wanted {want.shape}"
    if want.size == 0:
        return
    got, want = (
        np.asarray(x).astype(np.float32).astype(np.float64) for x in (got, want)
    )  # in numpy: JAX would compile each step for each shape
    rms = np.sqrt(np.mean(want**2))
    error = np.abs(got - want)
    largest, mean = (limit * scale * rms for limit in LIMITS[kind])
    rms_error = np.sqrt(np.mean(error**2))
    half_ulp = roundings * float(jnp.finfo(kind).eps) / 2 if kind in ("bfloat16", "float16") else 0.0
    wrong = ~(error <= np.maximum(largest, half_ulp * np.abs(want)))  # NaN is wrong
    if not wrong.any() and rms_error <= mean:
        return
    where = np.argwhere(wrong)[:8]
    lines = [f"  {tuple(map(int, at))}: got {got[tuple(at)]:.6g}, wanted {want[tuple(at)]:.6g}" for at in where]
    raise AssertionError(
        f"{name} ({kind}): max error {error.max():.3e} (limit {largest:.3e}), "
        f"RMS error {rms_error:.3e} (limit {mean:.3e}), RMS {rms:.3e}; "
        f"{int(wrong.sum())} of {wrong.size} elements past the limit\n" + "\n".join(lines)
    )
