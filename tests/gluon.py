"""Compiles Gluon kernels for an H200 without one, through the ops' launchers, and checks the compiler's output.

Needs jax-triton, and no CUDA plugin.
"""

import dataclasses
import os
import pathlib
import re
import subprocess

import jax
import pytest
import triton.backends.nvidia

from jaxops._lib.gluon import launch_triton
from jaxops._lib.gluon.ragged_gemm_triton import ragged_gemm_kernel
from jaxops._lib.gluon.schedule_triton import schedule_groups_kernel, schedule_parts_kernel, schedule_rows_kernel
from jaxops._lib.planning.device import Device
from jaxops.ops.fp8_matmul.gemm_triton import fp8_gemm_kernel
from jaxops.ops.fp8_matmul.unit_triton import fp8_unit_kernel
from jaxops.ops.packed_attention.fwd_triton import packed_attention_fwd_kernel
from tests.hopper import lower_for_h200, on_h200
from tests.jaxprs import equations

SHARED_BYTES = Device("NVIDIA H200", "gpu").shared_bytes
# Kernels are compiled once, for every test of a process; one that also launches some on a GPU must not find these.
KERNELS, COMPILED = (
    (
        fp8_gemm_kernel,
        fp8_unit_kernel,
        packed_attention_fwd_kernel,
        ragged_gemm_kernel,
        schedule_groups_kernel,
        schedule_parts_kernel,
        schedule_rows_kernel,
    ),
    {},
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What jax-triton would launch."""

    name: str
    num_warps: int
    num_ctas: int
    shared: int
    ptx: str


class _Recorder:
    """Stands for the part of jax-triton that is in the CUDA plugin, and launches nothing."""

    def __init__(self):
        self.launched: list[Kernel] = []

    def TritonKernel(self, name, num_warps, num_ctas, shared, ptx, *_):
        return Kernel(name, num_warps, num_ctas, shared, ptx)

    def TritonKernelCall(self, kernel, *_):
        self.launched.append(kernel)
        return self

    def to_proto(self, *_):
        return b""

    def create_tma_descriptor_parameter(self, **_):
        return None

    create_array_parameter = create_scalar_parameter = lambda self, *_: None


def compiled(fn, *shapes, work_lists: bool = False) -> list[Kernel]:
    """The Gluon kernels of fn, as they would be launched on an H200; or the Triton kernels that make work lists."""
    recorder = _Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_triton.triton_lib.triton_kernel_call_lib, "_library", recorder)
        for kernel in KERNELS:
            patch.setattr(kernel, "_jT_kernel_cache", COMPILED.setdefault(kernel, {}), raising=False)
        text = lower_for_h200(fn, *shapes)
    assert text.count("@triton_kernel_call_ffi") >= len(recorder.launched)  # equal calls may be lowered once
    return [kernel for kernel in recorder.launched if kernel.name.startswith("schedule_") == work_lists]


def kernel_calls(fn, *shapes) -> list:
    """The equations of fn's calls of Gluon kernels on an H200, in order. Compiles none of them: each would take
    seconds."""
    with on_h200():
        found = equations(jax.make_jaxpr(fn)(*shapes).jaxpr)
    calls = [call for call in found if call.primitive.name == "triton_kernel_call"]
    return [call for call in calls if not call.params["name"].startswith("schedule_")]


def launched(fn, *shapes) -> list[str]:
    """Their names."""
    return [call.params["name"] for call in kernel_calls(fn, *shapes)]


def assemblers() -> list[pathlib.Path]:
    """Triton's own, the newest last: PTX is written for the one that the target's driver stands for."""
    return sorted(
        (pathlib.Path(triton.backends.nvidia.__file__).parent / "bin").glob("ptxas*"), key=lambda file: len(file.name)
    )


def assembled(ptx: str, folder: pathlib.Path) -> str:
    """What ptxas says of it; skips where none of Triton's knows this version of PTX."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    for program in assemblers():
        run = subprocess.run(
            [program, "-v", "--gpu-name=sm_90a", file, "-o", os.devnull], capture_output=True, text=True
        )
        if run.returncode == 0:
            return run.stdout + run.stderr
        assert "Unsupported .version" in run.stderr, run.stderr
    pytest.skip(f"no ptxas here assembles PTX {re.search(r'[.]version (.*)', ptx)[1]}: spills were not looked for")


def wgmmas(kernel: Kernel) -> list[str]:
    return re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", kernel.ptx)


def check(
    kernel: Kernel,
    instructions: list[str],
    consumers: int,
    shared_bytes: int,
    folder: pathlib.Path,
    spilled: int = 0,
    programs: int = 1,
) -> None:
    """The expected wgmma instructions, all warps launched, shared memory as planned, no spills, no serialised wgmma."""
    threads = 128 * (consumers + 1)  # four warps each, and the producer's, which come as four, too
    assert wgmmas(kernel) == instructions
    assert re.findall(r"\.reqntid (\d+)", kernel.ptx) == [str(threads)]
    assert kernel.num_warps == threads // 32
    assert kernel.num_ctas == programs  # of a cluster
    assert kernel.shared <= shared_bytes <= SHARED_BYTES
    assert ".local" not in kernel.ptx
    report = assembled(kernel.ptx, folder)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    assert len(spills) == 2
    assert max(spills) <= spilled, f"{kernel.name} spills {spills} bytes"
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == 1
    assert registers[0] * threads <= 65536
    assert not re.findall(r".*\bC75\d\d\b.*", report), report  # "wgmma.mma_async instructions are serialized"
