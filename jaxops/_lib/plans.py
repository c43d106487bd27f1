"""What the plans of all ops share: the device that a plan was made for, and the choice of the backend."""

import dataclasses
from typing import Any

from jaxops._lib.device import Capability, Device

AMPERE, ADA = (
    (8, 0),
    (8, 9),
)  # compute capabilities: the least that the Pallas kernels need, and those that multiply or cast FP8


@dataclasses.dataclass(frozen=True)
class BasePlan:
    """Base class of each op's Plan.

    Attributes:
      device: what the plan is made for; None is filled by `make_plan` with the device of the call's operands.
    """

    device: Device | None = dataclasses.field(default=None, kw_only=True, repr=False)

    @property
    def on(self) -> Device:
        """The device of a plan that `make_plan` has made."""
        assert self.device is not None
        return self.device


def plan_device(kind: type[BasePlan], plan: Any, device: Device) -> Device:
    """The device that a plan is made for: an explicit plan's own, or that of the call.

    Raises:
      TypeError: a plan that is not of this op.
    """
    if plan is not None and not isinstance(plan, kind):
        hint = "; a backend by itself is passed as backend=" if isinstance(plan, str) else ""
        raise TypeError(f"plan is {_name(type(plan))}; this op takes {_name(kind)}{hint}.")
    return device if plan is None or plan.device is None else plan.device


def _name(kind: type) -> str:
    return (
        f"a {kind.__qualname__}"
        if kind.__module__ == "builtins"
        else f"a {kind.__module__.removesuffix('.plan')}.{kind.__qualname__}"
    )


def choose_backend(
    device: Device, backend: str, plan, backends: tuple[str, ...] = ("pallas", "xla"), needs: Capability = AMPERE
) -> str:
    """One of `backends`: what the call or its plan (anything with a `backend`, or None) says; else "pallas" where the kernels run, and "xla" elsewhere.

    Args:
      needs: the least compute capability that the op's Pallas kernels run on.

    Raises:
      ValueError: an unknown backend, or one that contradicts the plan.
      NotImplementedError: pallas on a TPU, on a GPU that is not NVIDIA's or on one too old.
    """
    if not isinstance(backend, str) or backend not in ("auto", *backends):
        raise ValueError(
            f"backend={backend!r}: write {', '.join(map(repr, ('auto', *backends[:-1])))} or {backends[-1]!r}."
        )
    if plan is not None:
        if backend not in ("auto", plan.backend):
            raise ValueError(f"backend={backend!r} contradicts plan.backend={plan.backend!r}: pass one of them.")
        backend = plan.backend
    elif backend == "auto":
        backend = "pallas" if device.has(needs) else "xla"
    if backend == "pallas" and not (device.interpret or device.has(needs)):
        least = ".".join(map(str, needs))
        raise NotImplementedError(
            f"backend='pallas' needs an NVIDIA GPU of compute capability {least} or newer (or a CPU, where the kernels are interpreted); "
            f"this is {device.kind}. Use backend='xla'."
        )
    return backend
