"""The machine's ceilings for the FP8 benchmarks, and the processes that call torch's FP8."""

import pathlib

import jax.numpy as jnp

from benchmarks import harness
from benchmarks.harness import checks
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.peers.torch_process import TorchProcess

TORCH_PEERS = ("torch_compile", "torch_grouped_mm")
DTYPE = jnp.bfloat16


def measure_machine(file: pathlib.Path, smoke: bool) -> tuple[harness.Ceilings, float | None]:
    """(copy bandwidth and dense bfloat16 rate, dense FP8 TFLOP/s), written as rows.

    The FP8 rate is None where XLA makes no cuBLASLt FP8 call.
    """
    n, copied = (64, 1 << 20) if smoke else (8192, 2 << 30)
    ceilings, times = harness.measure_ceilings(n, DTYPE, copied)
    harness.append_row(file, harness.copy_row(copied, times["copy"]))
    case = {
        "op": "matmul",
        "pass": "fwd",
        "name": "dense_square",
        "dist": "",
        "backend": "xla",
        "shape": {"M": n, "K": n, "N": n},
    }
    bf16 = harness.make_row(
        case | {"dtype": jnp.dtype(DTYPE).name}, times["dense_square"], 1.0, {}, None, tflops=ceilings.dense_tflops
    )
    harness.append_row(file, bf16)
    print(f"ceilings: copy {ceilings.copy_gbps:.0f} GB/s, bf16 {ceilings.dense_tflops:.1f} TFLOP/s", flush=True)
    try:
        values = [harness.normal(seed, (n, n), DTYPE).astype(jnp.float8_e4m3fn) for seed in (1, 2)]
        compiled, _ = harness.compile_fits(peers_fp8.cublaslt_gemm, *values, cublas=True)
        if peers_fp8.fp8_calls(compiled) != 1:
            raise NotImplementedError("XLA gave it to no cuBLASLt FP8 call")
        t = harness.interleave([harness.ready("dense fp8", compiled, tuple(values), 2 * n * n, None).variant], 3)[
            "dense fp8"
        ]
    except Exception as error:
        harness.print_left_out("the dense FP8 rate", error)
        return ceilings, None
    rate = 2 * n**3 / t.us_p50 / 1e6
    harness.append_row(file, harness.make_row(case | {"dtype": "float8_e4m3fn"}, t, 1.0, {}, None, tflops=rate))
    print(f"ceilings: fp8 {rate:.1f} TFLOP/s", flush=True)
    return ceilings, rate


def start_torch(peers: list[str], **smoke) -> dict[str, TorchProcess]:
    """A process for each peer whose library works on a small case."""
    request = {"do": "prepare", "limits": checks.LIMITS["fp8"]} | smoke
    found = {}
    for name in filter(TORCH_PEERS.__contains__, peers):
        process = harness.start_torch(name, lambda torch: torch.ask(**request))
        if process is not None:
            found[name] = process
    return found
