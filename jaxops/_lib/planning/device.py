"""The device that a call runs on. No other file asks JAX for it, or parses a GPU's name."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import re
import sys
import warnings
from typing import Any

import jax
from jax.core import Tracer

Capability = tuple[int, int]

# Compute capabilities by name, for abstract devices, which have only a name. The first pattern that matches counts.
_CAPABILITIES: tuple[tuple[str, Capability], ...] = (
    (r"G?B200", (10, 0)),
    (r"G?B300", (10, 3)),
    (r"RTX 50\d\d|RTX PRO", (12, 0)),
    (r"G?H(20|100|200|800)", (9, 0)),
    (r"L4|L40S?|RTX 40\d\d|RTX \d000 Ada", (8, 9)),
    (r"A100|A800|A30", (8, 0)),
    (r"A10G?|A16|A2|A40|RTX A\d000|RTX 30\d\d", (8, 6)),
    (r"Orin", (8, 7)),
    (r"T4G?|RTX 20\d\d|GTX 16\d\d|Quadro RTX|TITAN RTX", (7, 5)),
    (r"Xavier", (7, 2)),
    (r"V100S?|TITAN V", (7, 0)),
    (r"P\d{1,3}|GTX \d+|TITAN|Quadro|M\d{2,4}|K\d{2,4}", (6, 0)),  # or older
)
# An NVIDIA GPU that is not in the table is newer than it, and can do at least what Ada can.
_UNKNOWN = (8, 9)
# L2 caches in MiB, by name: JAX does not say them.
_L2_MIB = ((r"G?B200", 126), (r"H(100|200|800)", 50), (r"A100|A800", 40))
# Memory bandwidth in GB/s, by name, from the vendor's data sheets. Only Hopper cards: only their plans depend on it.
_MEMORY_GBPS = ((r"G?H200", 4800), (r"H20", 4000), (r"H100 NVL", 3900), (r"H100 PCIe", 2000), (r"H(100|800)", 3350))
HOPPER_SHARED_BYTES = 232_448  # that one block may use
SECTOR_BYTES = 32  # the smallest unit of L2 and memory: a store to a part of one costs a read of the rest
LINE_BYTES = 128  # a cache line


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that a plan is made for.

    Attributes:
      kind: the vendor's name, as in `jax.Device.device_kind`, e.g. "NVIDIA H200".
      platform: "gpu", "cpu" or "tpu".
      capability: an NVIDIA GPU's compute capability, (9, 0) for Hopper; None elsewhere. By default, from the name.
      cores: multiprocessors: how many programs a persistent kernel starts. By default those of an H100 or H200, also
        for the interpreter on a CPU.
      shared: whether collectives may hold some of them, as inside a mesh of several devices. Then the programs of a
        persistent kernel start at different times.
    """

    kind: str
    platform: str
    capability: Capability | None = None
    cores: int = 0
    shared: bool = False

    def __post_init__(self):
        if self.platform == "cuda":
            object.__setattr__(self, "platform", "gpu")
        if self.platform == "gpu" and self.capability is None:
            object.__setattr__(self, "capability", _capability_of(self.kind))
        if not self.cores:
            cores = 114 if "PCIe" in self.kind else 78 if re.search(r"\bH20\b", self.kind) else 132
            object.__setattr__(self, "cores", cores)

    @property
    def slug(self) -> str:
        """The kind as a file name: "nvidia_h200"."""
        return self.kind.lower().replace(" ", "_")

    @property
    def interpret(self) -> bool:
        """Whether Pallas kernels run in Pallas' interpreter."""
        return self.platform == "cpu"

    def has(self, capability: Capability) -> bool:
        """Whether it is an NVIDIA GPU of at least this compute capability."""
        return self.capability is not None and self.capability >= capability

    @property
    def is_hopper(self) -> bool:
        """Whether it has wgmma: compute capability 9.0."""
        return self.capability == (9, 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may use, in bytes (CUDA programming guide, compute capabilities 8.0 to 12.x)."""
        if self.capability is not None and self.capability[0] in (9, 10):
            return HOPPER_SHARED_BYTES
        return 166_912 if self.capability in ((8, 0), (8, 7)) else 101_376

    @property
    def l2_bytes(self) -> int | None:
        """The L2 cache of the cards that the table knows; None for others."""
        mib = _by_name(_L2_MIB, self.kind) if self.platform == "gpu" else None
        return mib and mib << 20

    @property
    def memory_gbps(self) -> int | None:
        """The memory bandwidth of the cards that the table knows, in GB/s; None for others."""
        return _by_name(_MEMORY_GBPS, self.kind) if self.platform == "gpu" else None


def _by_name(table: tuple[tuple[str, Any], ...], kind: str) -> Any:
    """The value of the first pattern that matches the card's name; None if none does."""
    return next((value for names, value in table if re.search(rf"\b({names})\b", kind, re.IGNORECASE)), None)


def _capability_of(kind: str) -> Capability | None:
    if re.search(r"AMD|Radeon|Instinct|\bMI\d{2,3}|\bgfx", kind):
        return None
    return _by_name(_CAPABILITIES, kind) or _UNKNOWN


def device_of(*operands) -> Device:
    """The device that a call with these operands runs on.

    Inside `jax.shard_map` or `jax.set_mesh` it is the mesh's. Otherwise it is the device of concrete operands, also
    under `jax.grad` and `jax.vmap`. Tracers of `jax.jit` have no device: then it is JAX's default device.

    Args:
      operands: arrays, or pytrees of them. None and numpy arrays have no device.
    """
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    arrays = [_without_tracers(x) for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    if mesh is None and arrays and not any(isinstance(x, Tracer) for x in arrays):
        return _of_jax(next(iter(arrays[0].devices())))
    return current_device()


def current_device() -> Device:
    """The device of a call whose operands have none: the mesh's, or JAX's default device."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    if device is None:
        return _of_jax(default_device())
    several = math.prod(mesh.shape[axis] for axis in mesh.manual_axes) > 1
    return Device(device.device_kind, device.platform, cores=device.num_cores or 0, shared=several)


def over_several_devices() -> bool:
    """Whether a call may belong to a program of several devices that XLA splits: not inside of `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 if mesh.empty else mesh.size > 1 and not mesh.manual_axes


def default_device() -> Any:
    """JAX's default device, as JAX's own object."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def default_number() -> int:
    """The number of JAX's default device among this machine's that CUDA_VISIBLE_DEVICES shows."""
    return default_device().local_hardware_id or 0


def _without_tracers(x: jax.Array) -> jax.Array:
    """The array inside the tracers of `jax.grad` and `jax.vmap`; a tracer of `jax.jit` is returned itself."""
    while isinstance(x, Tracer):
        inner = getattr(x, "primal", getattr(x, "val", None))
        if not isinstance(inner, jax.Array):
            return x
        x = inner
    return x


def _of_jax(device: Any) -> Device:
    words = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(words[1]), int(words[2])) if words else None
    return Device(device.device_kind, device.platform, capability, getattr(device, "core_count", None) or 0)


@functools.cache
def gluon_missing() -> str:
    """Why Triton's Gluon kernels cannot be called in this process; "" where they can."""
    if sys.version_info < (3, 12):
        return "they need Python 3.12 or newer"
    if sys.platform != "linux":
        return "Triton has releases for Linux only"
    install = "pip install 'jax-triton>=0.4.1,<0.5' 'triton>=3.9'"
    found = {name: _version(name) for name in ("jax-triton", "triton")}
    lacking = [name for name, version in found.items() if version is None]
    if lacking:
        return f"{' and '.join(lacking)} cannot be imported: {install}"
    numbers = {name: tuple(map(int, re.findall(r"\d+", version or "")[:3])) for name, version in found.items()}
    if numbers["jax-triton"][:2] != (0, 4) or numbers["triton"] < (3, 9):
        have = ", ".join(f"{name} {version}" for name, version in found.items())
        return f"they need jax-triton 0.4 and Triton 3.9 or newer, this is {have}: {install}"
    return ""


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # it came in a wheel of another name, such as pytorch-triton
        return getattr(importlib.import_module(name.replace("-", "_")), "__version__", "unknown")


def runs_gluon(device: Device) -> bool:
    """Whether the Gluon kernels run on the device. Where only the installed versions prevent it, warns once."""
    if not device.is_hopper:
        return False
    if gluon_missing():
        warn_once(f"jaxops takes its Pallas kernels on this {device.kind}, not its Triton ones: {gluon_missing()}.")
    return not gluon_missing()


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def check_gluon(device: Device) -> None:
    """
    Raises:
      NotImplementedError: the Gluon kernels do not run on the device.
    """
    if not device.is_hopper:
        raise NotImplementedError(
            f"backend='triton' needs a Hopper GPU (compute capability 9.0); this is {device.kind}. Use backend='auto'."
        )
    if gluon_missing():
        raise NotImplementedError(f"backend='triton' cannot run here: {gluon_missing()}. Or use backend='auto'.")
