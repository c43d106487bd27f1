"""What the machine reaches in this run: the copy bandwidth, and the rate of dense products. Written as rows."""

import dataclasses
import functools
import math
import pathlib
import time

import jax.numpy as jnp

from benchmarks import harness
from benchmarks.harness.rows import Named, Times, append_row, case_of, make_row
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.peers.torch_process import TorchProcess
from jaxops._lib.planning.device import current_device

SQUARE, WIDE = "dense_square", "dense_wide"
BF16 = jnp.bfloat16
Sizes = tuple[int, int, int]  # M, K, N


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The machine's rates in this run.

    Attributes:
      copy_gbps: bytes read and written of a copy.
      dense_tflops: the best dense cuBLAS rate; NaN where it was not asked for.
      fp8_tflops: the dense FP8 rate; None where XLA makes no cuBLASLt FP8 call of it, or it was not asked for.
    """

    copy_gbps: float
    dense_tflops: float = math.nan
    fp8_tflops: float | None = None

    def least_us(self, flops: float, moved_bytes: float) -> float:
        """The time at the ceiling that binds."""
        return max(flops / (self.dense_tflops * 1e6), moved_bytes / (self.copy_gbps * 1e3))


def measure_ceilings(
    file: pathlib.Path, smoke: bool, *, dtype=None, wide: Sizes | None = None, fp8: bool = False,
    torch: TorchProcess | None = None,
) -> Ceilings:  # fmt: skip
    """Measured together, interleaved.

    Args:
      dtype: of a dense product of 8192^3; None for the copy alone.
      wide: M, K, N of a second dense product; the better rate counts.
      fp8: also the rate in FP8.
      torch: its rate counts where its cuBLAS is faster than XLA's choice.
    """
    start, n = time.perf_counter(), 64 if smoke else 8192
    copied = 1 << 20 if smoke else 2 << 30
    sizes = ({} if dtype is None else {SQUARE: (n, n, n)}) | ({} if wide is None else {WIDE: wide})
    times = harness.interleave([_copy(copied), *(_dense(name, size, dtype) for name, size in sizes.items())], 3)
    copy_gbps = 2 * copied / times["copy"].us_p50 / 1e3
    copy = case_of("copy", "fwd", Named("copy", {"bytes": copied}), "float32") | {"backend": "xla"}
    append_row(file, make_row(copy, times["copy"], 1.0, {}, None, gbps=copy_gbps))
    measured = [(name, "xla", times[name], {}) for name in sizes if name in times]
    for name, size in sizes.items():
        if torch is None:
            break
        try:
            request = {"pass": "dense"} | dict(zip("MKN", size, strict=True))
            answer = torch.ask(do="prepare", op="grouped_matmul", **request)
            t = Times.of(torch.times_us(harness.iterations_for(answer["us"], 0)))
            measured.append((name, "torch_matmul", t, {"recipe": answer["recipe"]}))
        except RuntimeError as error:
            harness.print_left_out(f"torch {name}", error)
    rates = [2 * math.prod(sizes[name]) / t.us_p50 / 1e6 for name, _, t, _ in measured]
    for (name, backend, t, recipe), rate in zip(measured, rates, strict=True):
        case = case_of("matmul", "fwd", Named(name, dict(zip("MKN", sizes[name], strict=True))), dtype)
        append_row(file, make_row(case | {"backend": backend}, t, rate / max(rates), {}, None, tflops=rate, **recipe))
    ceilings = Ceilings(copy_gbps, max(rates, default=math.nan), _fp8_tflops(file, n) if fp8 else None)
    print(f"{ceilings} after {time.perf_counter() - start:.0f} s", flush=True)
    return ceilings


def _copy(copied_bytes: int) -> harness.Variant:
    source = harness.normal(0, (copied_bytes // 4,), jnp.float32)
    negate, _ = harness.compile_fits(jnp.negative, source)  # a plain copy may become a memcpy, which has no kernel time
    iterations = min(8, harness.iterations_for(1e3, copied_bytes))
    return harness.Variant("copy", functools.partial(harness.times_of, negate, (source,)), iterations)


def _dense(name: str, size: Sizes, dtype) -> harness.Variant:
    M, K, N = size
    x, w = harness.normal(1, (M, K), dtype), harness.normal(2, (K, N), dtype)
    matmul, _ = harness.compile_fits(jnp.matmul, x, w, cublas=True)
    iterations = harness.iterations_for(2 * M * K * N / 6e8, 2 * M * N)
    return harness.Variant(name, functools.partial(harness.times_of, matmul, (x, w)), iterations)


def _fp8_tflops(file: pathlib.Path, n: int) -> float | None:
    try:
        values = tuple(harness.normal(seed, (n, n), BF16).astype(jnp.float8_e4m3fn) for seed in (1, 2))
        compiled, _ = harness.compile_fits(peers_fp8.cublaslt_gemm, *values, cublas=True)
        if peers_fp8.fp8_calls(compiled) != 1:
            raise NotImplementedError("XLA gave it to no cuBLASLt FP8 call")
        t = harness.interleave([harness.ready("fp8", compiled, values, 2 * n * n, None).variant], 3)["fp8"]
    except Exception as error:
        harness.print_left_out("the dense FP8 rate", error)
        return None
    rate = 2 * n**3 / t.us_p50 / 1e6
    case = case_of("matmul", "fwd", Named(SQUARE, {"M": n, "K": n, "N": n}), jnp.float8_e4m3fn) | {"backend": "xla"}
    append_row(file, make_row(case, t, 1.0, {}, None, tflops=rate))
    return rate


def cold(moved_bytes: float) -> bool:
    """Whether a call moves so much that nothing of the previous call is left in L2. Where that is unknown, it counts as
    the largest of any card (B200), so that no warm call counts as cold."""
    return moved_bytes >= 2 * (current_device().l2_bytes or 126 << 20)
