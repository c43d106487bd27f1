"""What is known of the device that a call is traced for."""

import dataclasses
import importlib.util
import re
import sys

import jax

# NVIDIA's cards before Ada (compute capability 8.9), whose names are all that an abstract device tells; newer ones are not listed one by one.
_BEFORE_ADA = re.compile(r"\b([ATVPKM]\d{1,4}[XGM]?|RTX A\d{3,4}|RTX [23]0\d\d(?! Ada)|GTX \d+|TITAN|Quadro|Orin|Xavier)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Device:
    """The device a plan is made for.

    Attributes:
      kind: the vendor's name, as in `jax.Device.device_kind`, e.g. "NVIDIA H200".
      platform: "gpu", "cpu" or "tpu".
    """

    kind: str
    platform: str

    @property
    def slug(self) -> str:
        """The kind as a file name: "nvidia_h200"."""
        return self.kind.lower().replace(" ", "_")

    @property
    def is_hopper(self) -> bool:
        """Whether wgmma and TMA are there: compute capability 9.0."""
        return self.platform in ("gpu", "cuda") and re.search(r"\bG?H(20|100|200|800)\b", self.kind) is not None

    @property
    def cores(self) -> int:
        """Multiprocessors of a Hopper card: how many programs a persistent kernel starts."""
        return 114 if "PCIe" in self.kind else 78 if "H20" in self.kind and "H200" not in self.kind else 132

    @property
    def has_fp8(self) -> bool:
        """Whether an NVIDIA GPU converts and multiplies FP8: Ada, Hopper and later."""
        return not _BEFORE_ADA.search(self.kind)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may use, in bytes (CUDA programming guide, compute capabilities 8.0 to 12.x)."""
        if self.is_hopper or any(name in self.kind for name in ("B200", "B300", "GB200", "GB300")):
            return 232_448
        return 166_912 if "A100" in self.kind else 101_376


def current_device() -> Device:
    """The device that the enclosing trace is for: the abstract mesh's, where one is set, or JAX's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.device_kind, abstract.platform)
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return Device(default.device_kind, default.platform)


def interpret() -> bool:
    """Whether a Pallas kernel runs in Pallas' interpreter: on a CPU."""
    return current_device().platform == "cpu"


def has_jax_triton() -> bool:
    """Whether Gluon kernels can be called: jax-triton needs Python >= 3.12."""
    return sys.version_info >= (3, 12) and importlib.util.find_spec("jax_triton") is not None


def runs_gluon(device: Device) -> bool:
    """Whether Hopper's own kernels can be called on the device."""
    return device.is_hopper and has_jax_triton()


def check_gluon(device: Device) -> None:
    """
    Raises:
      NotImplementedError: Hopper's own kernels cannot be called there.
    """
    if not runs_gluon(device):
        raise NotImplementedError(f"the triton backend needs a Hopper GPU and jax-triton (Python >= 3.12); this is {device.kind}. Use backend='pallas'.")


def choose_backend(device: Device, backend: str, plan, backends: tuple[str, ...] = ("pallas", "xla")) -> str:
    """One of `backends`: what the call or its plan (anything with a `backend`, or None) says, else "pallas" on a GPU and "xla" elsewhere.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan.
      NotImplementedError: pallas on a TPU.
    """
    if backend not in ("auto", *backends):
        raise ValueError(f"backend={backend!r}: write {', '.join(map(repr, ('auto', *backends[:-1])))} or {backends[-1]!r}.")
    if plan is not None:
        if backend not in ("auto", plan.backend):
            raise ValueError(f"backend={backend!r} contradicts plan.backend={plan.backend!r}: pass one of them.")
        backend = plan.backend
    elif backend == "auto":
        backend = "pallas" if device.platform in ("gpu", "cuda") else "xla"
    if backend == "pallas" and device.platform == "tpu":
        raise NotImplementedError("the pallas backend is lowered through Triton and needs an NVIDIA GPU (or a CPU, interpreted); use backend='xla' on a TPU.")
    return backend
