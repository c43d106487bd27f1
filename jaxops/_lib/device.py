"""What is known of the device that a call is for. Nothing else asks JAX for it, or reads a card's name."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from typing import Any

import jax
from jax.core import Tracer

Capability = tuple[int, int]

# Compute capabilities by name, for abstract devices, which have nothing else. The first pattern that fits counts.
_BY_NAME: tuple[tuple[str, Capability], ...] = (
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
# An NVIDIA card that the table does not have is newer than the table: it has at least what Ada has.
_UNKNOWN = (8, 9)
HOPPER_SHARED_BYTES = 232_448  # that one block may use


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that a plan is made for.

    Attributes:
      kind: the vendor's name, as in `jax.Device.device_kind`, e.g. "NVIDIA H200".
      platform: "gpu", "cpu" or "tpu".
      capability: an NVIDIA GPU's compute capability, (9, 0) for Hopper; None elsewhere. Found from the name where it is not given.
      cores: multiprocessors of a GPU: how many programs a persistent kernel starts. An H100's or H200's where it is not given.
    """

    kind: str
    platform: str
    capability: Capability | None = None
    cores: int = 0

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


def _capability_of(kind: str) -> Capability | None:
    if re.search(r"AMD|Radeon|Instinct|\bMI\d{2,3}|\bgfx", kind):
        return None
    return next(
        (capability for names, capability in _BY_NAME if re.search(rf"\b({names})\b", kind, re.IGNORECASE)), _UNKNOWN
    )


def device_of(*operands) -> Device:
    """The device that a call with these operands runs on.

    Inside `jax.shard_map` or `jax.set_mesh` the mesh tells. Otherwise it is the operands' own device where they are concrete arrays, under `jax.grad` and
    `jax.vmap` too. Under `jax.jit` their values are not known, nor where they will be: then it is JAX's default device.

    Args:
      operands: arrays, or pytrees of them. None and numpy arrays say nothing.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.device_kind, abstract.platform, cores=abstract.num_cores or 0)
    arrays = [_without_tracers(x) for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    if arrays and not any(isinstance(x, Tracer) for x in arrays):
        return _of_jax(next(iter(arrays[0].devices())))
    return current_device()


def current_device() -> Device:
    """The device of a call whose operands do not tell: the mesh's, or JAX's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.device_kind, abstract.platform, cores=abstract.num_cores or 0)
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return _of_jax(jax.devices(default)[0] if default is None or isinstance(default, str) else default)


def _without_tracers(x: jax.Array) -> jax.Array:
    """The array inside the tracers of `jax.grad` and `jax.vmap`; a tracer of `jax.jit` stays one."""
    while isinstance(x, Tracer):
        inner = getattr(x, "primal", getattr(x, "val", None))
        if not isinstance(inner, jax.Array):
            return x
        x = inner
    return x


def _of_jax(device: Any) -> Device:
    words = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return Device(
        device.device_kind,
        device.platform,
        (int(words[1]), int(words[2])) if words else None,
        getattr(device, "core_count", None) or 0,
    )


@functools.cache
def gluon_missing() -> str:
    """Why Triton's Gluon kernels cannot be called in this process; "" where they can."""
    if sys.version_info < (3, 12):
        return "they need Python 3.12 or newer"
    if sys.platform != "linux":
        return "Triton has releases for Linux only"
    found = {name: _version(name) for name in ("jax-triton", "triton")}
    lacking = [name for name, version in found.items() if version is None]
    if lacking:
        return f"{' and '.join(lacking)} cannot be imported: pip install 'jax-triton>=0.4.1,<0.5' 'triton>=3.9'"
    if found["jax-triton"][:2] != (0, 4) or found["triton"] < (3, 9):
        have = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
        return f"they need jax-triton 0.4 and Triton 3.9 or newer, this is {have}: pip install 'jax-triton>=0.4.1,<0.5' 'triton>=3.9'"
    return ""


def _version(name: str) -> tuple[int, ...] | None:
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return None
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(name))[:3]))


def runs_gluon(device: Device) -> bool:
    """Whether Hopper's own kernels can be called on the device. Where only the installed versions prevent it, a warning says so, once."""
    if not device.is_hopper:
        return False
    if gluon_missing():
        warn_once(
            f"jaxops takes its Pallas kernels on this {device.kind}, not the faster Triton ones: {gluon_missing()}."
        )
    return not gluon_missing()


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def check_gluon(device: Device) -> None:
    """
    Raises:
      NotImplementedError: Hopper's own kernels cannot be called there.
    """
    if not device.is_hopper:
        raise NotImplementedError(
            f"backend='triton' needs a Hopper GPU (compute capability 9.0); this is {device.kind}. Use backend='pallas'."
        )
    if gluon_missing():
        raise NotImplementedError(f"backend='triton' cannot run here: {gluon_missing()}. Or use backend='pallas'.")
