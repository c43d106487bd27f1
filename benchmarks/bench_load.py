"""Loading a checkpoint: time and host memory, beside a sequential read of the same files in the same run.

python -m benchmarks.bench_load                                  # 30 GB, made in a temporary folder and removed
python -m benchmarks.bench_load --folder /disk --rounds 1        # made there, on another disk
python -m benchmarks.bench_load --smoke --out /tmp/x             # under 1 MB, CPU too

The checkpoint is made up: layers of Qwen3-30B-A3B's sizes in bfloat16, in files of about 5 GB. It is loaded as for
inference, into bfloat16. Before each read and each load its files are dropped from the page cache as far as the system
permits; rows say how much of them was still there.
"""

import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import typer
from flax import nnx

from benchmarks import harness
from benchmarks.bench_decode import QWEN3_30B, SMOKE, nbytes
from models import hf
from models.decoder import Decoder, DecoderConfig
from models.hf.files import files_of
from models.training.whole_files import NAME as CHECKSUMS

ARCHITECTURE, DTYPE = "Qwen3MoeForCausalLM", "bfloat16"
READ_BYTES = 16 << 20  # of one read of the disk's measurement
PAGE, PAGES_SAMPLED = 4096, 256
STATUS, RESET_PEAK = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def shapes_of(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def with_bytes(config: DecoderConfig, wanted: float) -> DecoderConfig:
    """The same sizes in as many layers as `wanted` bytes of 16-bit tensors have, rounded up."""
    one, two = (nbytes(shapes_of(dataclasses.replace(config, layers=layers))[1]) / 2 for layers in (1, 2))
    return dataclasses.replace(config, layers=max(1, 1 + int(np.ceil((wanted - one) / (two - one)))))


def make_checkpoint(folder: pathlib.Path, config: DecoderConfig, max_bytes: int) -> None:
    """Writes random numbers as a checkpoint. The host holds one tensor: parameters are views of one short buffer.

    Each number is that of the sum of its indices, so that rows and tensors differ, and none is constant.
    """
    graphdef, shapes = shapes_of(config)
    longest = max(sum(x.shape) for x in jax.tree.leaves(shapes))
    numbers = np.random.default_rng(0).normal(0, 0.02, longest).astype(ml_dtypes.bfloat16)
    view = lambda x: np.lib.stride_tricks.as_strided(numbers, x.shape, (2,) * x.ndim, writeable=False)
    hf.save(folder, ARCHITECTURE, nnx.merge(graphdef, jax.tree.map(view, shapes)), dtype=DTYPE, max_bytes=max_bytes)
    (folder / CHECKSUMS).unlink()  # downloads have none; to verify them would read the files twice


def drop(files: list[pathlib.Path]) -> None:
    """Drops files from the page cache, as far as the system permits."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(files: list[pathlib.Path]) -> float | None:
    """The share of files that is in the page cache, of sampled pages; None where the system does not say it."""
    found, buffer = 0, bytearray(PAGE)
    for file in files:
        with file.open("rb") as opened:
            for at in np.linspace(0, file.stat().st_size - 1, PAGES_SAMPLED).astype(int):
                try:
                    found += os.preadv(opened.fileno(), [buffer], int(at) // PAGE * PAGE, os.RWF_NOWAIT) > 0
                except BlockingIOError:
                    continue  # it would have to be read from the disk
                except OSError:
                    return None
    return found / (PAGES_SAMPLED * len(files))


def read_all(files: list[pathlib.Path]) -> None:
    """Reads files from their beginning to their end, in large pieces into the same buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def memory_of_process(what: str) -> int:
    """Bytes of the host's memory: VmRSS for now, VmHWM for the peak."""
    line = next(line for line in STATUS.read_text("utf-8").splitlines() if line.startswith(f"{what}:"))
    return 1024 * int(line.split()[1])


def peak_of(run: Callable[[], None]) -> tuple[int, int]:
    """(bytes of the host's memory before `run`, the peak in it).

    The peak is that of the whole process so far where the kernel does not reset it.
    """
    before = memory_of_process("VmRSS")
    try:
        RESET_PEAK.write_text("5", "utf-8")
    except OSError:
        print("  the peak of host memory cannot be reset here: it is that of the whole process", flush=True)
    run()
    return before, memory_of_process("VmHWM")


def measure(folder: pathlib.Path, rounds: int) -> dict[str, list]:
    """By name what each round measured: microseconds of a read and of a load, cached shares, host memory."""
    files, found = files_of(folder), {name: [] for name in ("read_us", "load_us", "cached", "before", "peak")}

    def timed(run: Callable[[], object], name: str) -> None:
        drop(files)
        found["cached"].append(cached(files))
        begin = time.perf_counter()
        run()
        found[name].append(1e6 * (time.perf_counter() - begin))

    def load() -> None:
        _, model = hf.load(folder, dtype=DTYPE, param_dtype=DTYPE)
        jax.block_until_ready(nnx.state(model))

    for _ in range(rounds):
        timed(lambda: read_all(files), "read_us")
        before, peak = peak_of(lambda: timed(load, "load_us"))
        found["before"].append(before)
        found["peak"].append(peak)
    return found


def write(file: pathlib.Path, config: DecoderConfig, folder: pathlib.Path, found: dict[str, list]) -> None:
    files = files_of(folder)
    stored = sum(one.stat().st_size for one in files)
    times, read = harness.Times.of(found["load_us"]), harness.Times.of(found["read_us"])
    gbps, disk_gbps = stored / times.us_p50 / 1e3, stored / read.us_p50 / 1e3
    shape = {
        "bytes": stored,
        "files": len(files),
        "layers": config.layers,
        "D": config.width,
        "experts": config.experts,
    }
    case = {"op": "load", "pass": "load", "name": f"qwen3_moe_{stored / 1e9:.0f}gb", "shape": shape, "dtype": DTYPE}
    case |= {"dist": "", "backend": "jaxops"}
    shares = [share for share in found["cached"] if share is not None]
    facts = {"gbps": gbps, "disk_gbps": disk_gbps, "cached": max(shares) if shares else None}
    facts |= {"host_bytes_before": min(found["before"]), "host_bytes_peak": max(found["peak"])}
    facts |= {"peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}
    harness.append_row(file, harness.make_row(case, times, gbps / disk_gbps, {}, None, **facts))
    print(
        f"{stored / 1e9:.2f} GB in {times.us_p50 / 1e6:.2f} s, {gbps:.2f} GB/s; the disk {disk_gbps:.2f} GB/s, still "
        f"cached {facts['cached']}; host {facts['host_bytes_before'] / 1e9:.2f} GB before, peak "
        f"{facts['host_bytes_peak'] / 1e9:.2f} GB",
        flush=True,
    )


def main(
    gigabytes: float = typer.Option(30.0, min=0.0, help="Of the checkpoint, at least."),
    folder: str = typer.Option("", help="An existing folder to make it in; the system's temporary one by default."),
    rounds: int = typer.Option(3, min=1),
    out: str = harness.OUT,
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/load.jsonl."""
    file = harness.begin("load", out, smoke)
    config = SMOKE if smoke else with_bytes(QWEN3_30B, gigabytes * 1e9)
    jnp.zeros(1).block_until_ready()  # JAX's own memory is not the checkpoint's
    with tempfile.TemporaryDirectory(dir=folder or None) as made:
        begin = time.perf_counter()
        make_checkpoint(pathlib.Path(made), config, 100_000 if smoke else 5 * 10**9)
        print(f"made in {time.perf_counter() - begin:.0f} s, {config.layers} layers", flush=True)
        write(file, config, pathlib.Path(made), measure(pathlib.Path(made), rounds))


if __name__ == "__main__":
    typer.run(main)
