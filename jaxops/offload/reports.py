"""What a compiled function keeps in the host's memory, and behind what its copies hide: read from the program, not from what was asked for."""

import dataclasses
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxops._lib.checks import check_flag

_HOST = "S(5)"  # the host's memory in XLA's layouts
_OPCODE = re.compile(r"[)}\]] ([a-z][a-z\-]*)\(([^)]*)\)")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_PRODUCT = re.compile(r" (?:custom-call|dot)\(|__triton\w*gemm")
_NO_WORK = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
_PASSED_ON = _NO_WORK | {"while", "call", "conditional", "custom-call"}


class OffloadError(RuntimeError):
    """A policy offloaded nothing."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy of the program between the memories.

    Attributes:
      to: where its data go.
      bytes: of one execution; in a loop it is executed once a round.
      in_loop: whether it stands in a loop's body.
      behind: instructions that work between its beginning and its end: what may hide it, if the program was compiled with `compiler_options`. 0 for one that
        everything waits for.
      products: how many of those are products, attention and kernels of their own, which take the time: what a large copy needs to hide behind.
    """

    to: Literal["host", "device"]
    bytes: int
    in_loop: bool
    behind: int
    products: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What `report` found.

    Attributes:
      platform: "gpu", "cpu" and so on.
      device_bytes: arguments, results and temporaries at the peak, in the device's memory.
      host_bytes: the same in the host's.
      copies: between the two.
    """

    platform: str
    device_bytes: int
    host_bytes: int
    copies: tuple[Copy, ...]

    def __str__(self) -> str:
        if self.platform == "cpu":
            return f"cpu: {_gb(self.device_bytes)}; its memory is the host's, so nothing is offloaded there, whatever a policy says."
        lines = [f"{self.platform}: {_gb(self.device_bytes)} on the device, {_gb(self.host_bytes)} on the host"]
        for to in ("host", "device"):
            own = [copy for copy in self.copies if copy.to == to]
            waited = sum(not copy.behind for copy in own)
            line = f"  {len(own)} copies to the {to}, {sum(copy.in_loop for copy in own)} of them in loops; {waited} are waited for where they begin"
            if own:
                largest = max(own, key=lambda copy: copy.bytes)
                line += f"; the largest has {_gb(largest.bytes)}, and {largest.products} products beside it"
            lines.append(line)
        return "\n".join(lines)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def report(compiled: Any, *, verify: bool = False) -> Report:
    """Reads a compiled function, as of `jax.jit(f).lower(*args).compile()`.

    Args:
      verify: whether to fail where nothing is offloaded. On a CPU there is nothing to offload to, and it does not.

    Raises:
      OffloadError: with verify: no byte of the program lies on the host, or none is copied to it.
    """
    verify = check_flag("verify", verify)
    device, host = needed_bytes(compiled)
    platform = _platform(compiled)
    copies = () if platform == "cpu" else tuple(copies_of(compiled.as_text()))
    found = Report(platform, device, host, copies)
    if verify and platform != "cpu":
        if not host:
            raise OffloadError(
                f"nothing is offloaded: no byte lies on the host, {_gb(device)} on the device. Is what the policy names a checkpoint_name inside what is "
                "checkpointed, and does the backward need it? jaxops.offload.residual_bytes lists the names."
            )
        if not any(copy.to == "host" for copy in copies):
            raise OffloadError(f"nothing is offloaded: {_gb(host)} lie on the host, and nothing is copied there.")
    return found


def needed_bytes(compiled: Any) -> tuple[int, int]:
    """`Report.device_bytes` and `Report.host_bytes`, without reading the program."""
    used = compiled.memory_analysis()
    of = lambda where: [
        getattr(used, f"{where}{what}_size_in_bytes") for what in ("argument", "output", "temp", "alias")
    ]
    (device, host) = (
        arguments + results + temporaries - shared for arguments, results, temporaries, shared in (of(""), of("host_"))
    )
    return device, host


def _platform(compiled: Any) -> str:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        return next(iter(sharding.device_set)).platform
    return jax.default_backend()


def copies_of(text: str) -> list[Copy]:
    """The copies between the memories in a scheduled HLO module's text."""
    found: list[Copy] = []
    bodies, fused = (set(re.findall(rf"{key}=%?([\w.\-]+)", text)) for key in ("body", "calls"))
    computation, lines = "", []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation, lines = header.group(1), []
        elif line.startswith("}") and computation not in fused:
            found += _copies_in(lines, computation in bodies)
        else:
            lines.append(line)
    return found


def _copies_in(lines: list[str], in_loop: bool) -> list[Copy]:
    """Of one computation, in the order of its schedule."""
    found, on_host, running = [], set(), {}
    work: list[bool] = []  # of each instruction that works, whether it is a product
    for line in lines:
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        parsed = _OPCODE.search(rest)
        if parsed is None:
            continue
        opcode, result = parsed.group(1), rest[: parsed.start() + 1]
        operands = re.findall(r"%[\w.\-]+", parsed.group(2))
        if opcode.endswith("-start"):
            if _HOST in result:
                running[name] = (*_moved(opcode, result), len(work))
        elif opcode.endswith("-done"):
            if operands and operands[0] in running:
                to, size, before = running.pop(operands[0])
                found.append(Copy(to, size, in_loop, len(work) - before, sum(work[before:])))
            if _HOST in result:
                on_host.add(name)
        else:
            here, there = _HOST in result, any(operand in on_host for operand in operands)
            if opcode not in _PASSED_ON and here != there:
                found.append(Copy("host" if here else "device", _bytes(result)[0], in_loop, 0, 0))
            elif opcode not in _NO_WORK:
                work.append(bool(_PRODUCT.search(rest)))
            if here:
                on_host.add(name)
    return found


def _moved(opcode: str, result: str) -> tuple[Literal["host", "device"], int]:
    """Where an asynchronous copy goes, and how much."""
    arrays = [
        (size, _HOST in array)
        for size, array in zip(_bytes(result), (match.group(0) for match in _ARRAY.finditer(result)), strict=True)
    ]
    if opcode == "copy-start":  # (result, operand, context)
        return ("host" if arrays[0][1] else "device"), arrays[0][0]
    done = arrays[-2]  # ((operands), result, context)
    if done[1]:
        return "host", max((size for size, host in arrays[:-2] if not host), default=0)
    return "device", done[0]


def _bytes(shapes: str) -> list[int]:
    sizes = []
    for kind, dims, _ in _ARRAY.findall(shapes):
        bits = 8 if kind == "pred" else int((re.findall(r"\d+", kind) or ["32"])[0])
        sizes.append(math.prod(map(int, filter(None, dims.split(",")))) * bits // 8)
    return sizes


def compiler_options(*, offloads: bool = True) -> dict[str, bool | int | str]:
    """For `jax.jit(step, compiler_options=jaxops.offload.compiler_options())`: with what XLA puts copies behind work. Empty where there is no GPU.

    - `xla_gpu_enable_command_buffer`, off: XLA records kernels and copies as CUDA graphs, and those of a loop's body all on one stream. By default every copy
      is waited for: H200, 2026-11-22, jaxlib 0.11.2: of 39 ms of copies each way beside 87 ms of work none was hidden, without graphs all were.
    - `xla_gpu_enable_latency_hiding_scheduler`: without it every copy is waited for where it begins. jaxlib 0.11.2 has it on by default, older ones may not.
    - `xla_gpu_memory_limit_slop_factor`: how many percent of 80 % of the card's memory, less the arguments, XLA may plan with before its scheduler stops to
      hide anything, and its rematerialization computes again what the policy keeps. Both count what lies on the host as if it lay on the device: a step of 130
      GB, and 47 on the host, as 181. The default is 95.
    - `xla_gpu_enable_dynamic_slice_fusion`, off: of a product that a loop keeps and also works with, XLA makes two, one of which writes into what is kept. A
      layer of a gated perceptron then has five products where it has three.
    - `xla_gpu_enable_dus_accumulator_zero_init_elimination`: off, as jaxlib 0.11.2 has it, a scan's stacks are filled with zeros first, though every layer
      writes its part (openxla/xla#42808). Offloaded steps of 1.6 and 1.2 s are 19 and 26 ms shorter with it (H200, 2026-11-22).

    `xla_gpu_enable_pipelined_host_offloading` is not among them: `jaxops.offload.scan` shifts the copies itself, and XLA's pass has read from wrong places
    (openxla/xla#39302).

    Args:
      offloads: False for a step that moves nothing: the last two alone, which concern every scan over layers.

    Raises:
      RuntimeError: this jaxlib does not know all options.
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
