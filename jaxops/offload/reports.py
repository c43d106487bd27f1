"""What a compiled program holds in host memory, and what hides its copies, read from the program itself."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.checks import check_flag
from jaxops._lib.hlo import Instruction, Module, arrays

_NO_WORK = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier"}
_NO_WORK |= {"partition-id", "replica-id"}
_PASSED_ON = _NO_WORK | {"while", "call", "conditional", "custom-call"}


class OffloadError(RuntimeError):
    """A policy offloaded nothing."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy between host and device memory."""

    to: Literal["host", "device"]
    bytes: int  # of one execution; in a loop one an iteration
    in_loop: bool
    behind: int  # instructions with work from its start to its end, which can hide it; 0 for a synchronous copy
    products: int  # how many of them are GEMMs, attention or custom kernels, which hide large copies


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `report`. Bytes are arguments, results and temporaries at the peak, in each memory."""

    platform: str  # "gpu", "cpu" and so on
    device_bytes: int
    host_bytes: int
    copies: tuple[Copy, ...]

    def __str__(self) -> str:
        if self.platform == "cpu":
            return f"cpu: {_gb(self.device_bytes)}; device memory is host memory, so nothing is offloaded there."
        lines = [f"{self.platform}: {_gb(self.device_bytes)} on the device, {_gb(self.host_bytes)} on the host"]
        for to in ("host", "device"):
            copies = [copy for copy in self.copies if copy.to == to]
            in_loops, waited = sum(copy.in_loop for copy in copies), sum(not copy.behind for copy in copies)
            line = f"  {len(copies)} copies to the {to}, {in_loops} of them in loops; {waited} are waited for"
            if copies:
                largest = max(copies, key=lambda copy: copy.bytes)
                line += f"; the largest has {_gb(largest.bytes)}, and {largest.products} products beside it"
            lines.append(line)
        return "\n".join(lines)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def report(compiled: Any, *, verify: bool = False) -> Report:
    """Reads a compiled function, as from `jax.jit(f).lower(*args).compile()`.

    Raises:
      OffloadError: verify is True and, except on a CPU, the program holds no byte on the host or copies nothing to it.
    """
    verify = check_flag("verify", verify)
    device, host = needed_bytes(compiled)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platform = next(iter(shardings[0].device_set)).platform if shardings else jax.default_backend()
    copies = () if platform == "cpu" else tuple(copies_of(Module(compiled.as_text())))
    if verify and platform != "cpu":
        if not host:
            raise OffloadError(
                f"nothing is offloaded: no byte is on the host, {_gb(device)} on the device. Name values by "
                "checkpoint_name inside the function that is checkpointed, and values that the backward reads: "
                "jaxops.offload.residual_bytes lists the names."
            )
        if not any(copy.to == "host" for copy in copies):
            raise OffloadError(f"nothing is offloaded: {_gb(host)} are on the host, but nothing is copied there.")
    return Report(platform, device, host, copies)


def needed_bytes(compiled: Any) -> tuple[int, int]:
    """`Report.device_bytes` and `Report.host_bytes`, without reading the program."""
    return sum(sizes(compiled)), sum(sizes(compiled, "host_"))


def sizes(compiled: Any, memory: Literal["", "host_"] = "") -> tuple[int, int, int]:
    """Bytes of arguments, of results without those in donated arguments, and of temporaries at their peak.

    On the device, or with "host_" in host memory.
    """
    used = compiled.memory_analysis()
    arguments, results, temporaries, shared = (
        getattr(used, f"{memory}{what}_size_in_bytes") for what in ("argument", "output", "temp", "alias")
    )
    return arguments, results - shared, temporaries


def copies_of(module: Module) -> list[Copy]:
    """The copies between the memories in a scheduled program."""
    attributes = [each.attributes for each in module.instructions.values()]
    bodies, fused = (
        {name for text in attributes for name in re.findall(rf"\b{key}=%?([\w.\-]+)", text)}
        for key in ("body", "calls")
    )
    return [
        copy
        for name, instructions in module.computations.items()
        if name not in fused
        for copy in _copies_in(instructions, name in bodies)
    ]


def _copies_in(instructions: Sequence[Instruction], in_loop: bool) -> list[Copy]:
    """The copies of one computation, in the order of its schedule."""
    copies: list[Copy] = []
    on_host: set[str] = set()
    running: dict[str, tuple[Literal["host", "device"], int, int]] = {}  # destination, bytes, work before
    work: list[bool] = []  # for each instruction that works, whether it is a product
    for each in instructions:
        results, operands = arrays(each.type), [name for _, name in each.operands]
        here = any(array.on_host for array in results)
        if each.opcode.endswith("-start"):
            if here:
                # copy-start has (result, operand, context); the others ((operands), result, context).
                result = results[0] if each.opcode == "copy-start" else results[-2]
                moved = result.bytes
                if result.on_host and each.opcode != "copy-start":
                    moved = max((array.bytes for array in results[:-2] if not array.on_host), default=0)
                running[each.name] = ("host" if result.on_host else "device", moved, len(work))
            continue
        if each.opcode.endswith("-done"):
            if operands and operands[0] in running:
                to, moved, before = running.pop(operands[0])
                copies.append(Copy(to, moved, in_loop, len(work) - before, sum(work[before:])))
        elif each.opcode not in _PASSED_ON and here != any(operand in on_host for operand in operands):
            copies.append(Copy("host" if here else "device", results[0].bytes, in_loop, 0, 0))
        elif each.opcode not in _NO_WORK:
            work.append(
                each.opcode in ("custom-call", "dot") or re.search(r"__triton\w*gemm", each.attributes) is not None
            )
        if here:
            on_host.add(each.name)
    return copies


def compiler_options(*, offloads: bool = True) -> dict[str, bool | int | str]:
    """For `jax.jit(step, compiler_options=...)`: XLA's options that hide copies behind work. Empty without a GPU.

    - `xla_gpu_enable_command_buffer` off: CUDA graphs run a loop's kernels and copies on one stream. With graphs none
      of 39 ms of copies each way beside 87 ms of work was hidden, without all (H200, 2026-11-22, jaxlib 0.11.2).
    - `xla_gpu_enable_latency_hiding_scheduler`: without it copies are synchronous. Jaxlib 0.11.2 has it on by default.
    - `xla_gpu_memory_limit_slop_factor`: the memory limit of that scheduler and of XLA's rematerialization, in percent
      of 80 % of the card less the arguments; 95 by default. Both count host arrays as device memory: a step with 130 GB
      on the device and 47 on the host counts as 181. Over the limit nothing is hidden, and kept values are recomputed.
    - `xla_gpu_enable_dynamic_slice_fusion` off: it computes a product twice that a loop both stores and uses, five
      instead of three in a gated MLP.
    - `xla_gpu_enable_dus_accumulator_zero_init_elimination`: off, as in jaxlib 0.11.2, XLA zero-fills a scan's stacks
      that every layer overwrites (openxla/xla#42808): 19 and 26 ms of 1.6 and 1.2 s steps (H200, 2026-11-22).

    Without `xla_gpu_enable_pipelined_host_offloading`: `jaxops.offload.scan` pipelines its copies itself, and that pass
    has read wrong addresses (openxla/xla#39302).

    With offloads=False only the last two, which help any scan over layers. RuntimeError if jaxlib lacks an option.
    """
    offloads = check_flag("offloads", offloads)
    if jax.default_backend() != "gpu":
        return {}
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    }
    if offloads:
        options |= {
            "xla_gpu_enable_command_buffer": "",
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_memory_limit_slop_factor": 400,
        }
    try:
        jax.jit(lambda x: x, compiler_options=options)(jnp.zeros(()))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(f"jax {jax.__version__} does not know all of {', '.join(options)}: {error}") from error
    return options
