"""What a kernel launch costs: stated where it is launched, and readable in compiled programs."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def bytes_of(*arrays: Any) -> int:
    """Bytes of arrays, or of their types; None has none."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays if x is not None)


@dataclasses.dataclass(frozen=True)
class Cost:
    """An estimate of what one kernel launch does, from shapes alone.

    In a compiled program the kernel's custom call carries it as the frontend attributes `jaxops_flops` and
    `jaxops_bytes`. Under vmap a Pallas launch runs all examples, but its attributes are those of one: JAX copies
    attributes into batched calls unchanged.

    Attributes:
      flops: of a product 2 * M * K * N over all rows, without the epilogue. The values of offsets are on the device: as
        if every row lies in a group, an upper bound. Of other kernels operations on elements, where an activation, an
        exponential or a comparison is one; of copies and work lists 0.
      bytes: read and written: as if each operand and each result passes once through memory.
    """

    flops: int
    bytes: int

    @classmethod
    def of(cls, flops: int, operands: Iterable[Any], results: Iterable[Any], bytes_accessed: int | None) -> "Cost":
        """bytes_accessed: None for each operand and each result once."""
        return cls(flops, bytes_of(*operands, *results) if bytes_accessed is None else bytes_accessed)

    def attached(self) -> contextlib.AbstractContextManager:
        """Attaches the estimate to what is bound inside: a kernel's call, and nothing else."""
        return set_xla_metadata(
            jaxops_flops=str(self.flops), jaxops_bytes=str(self.bytes), latency_metadata=str(self.nanoseconds)
        )

    @property
    def nanoseconds(self) -> int:
        """About as long as a Hopper GPU takes, by its tensor cores in bfloat16 and its memory.

        XLA's scheduler reads it from the attribute `latency_metadata` (openxla/xla, latency_hiding_scheduler.cc) when
        it chooses what runs beside collectives and copies. Without it all custom calls count the same.
        """
        return 2_000 + max(self.flops // 600_000, self.bytes // 3_500)

    @staticmethod
    def detached() -> contextlib.AbstractContextManager:
        """For what is traced inside `attached`, a kernel's body. JAX keys its caches with attributes: each launch would
        trace the jnp functions in its kernel again, a third more time for lowering (159 kernels, 2026-11-24)."""
        return set_xla_metadata(jaxops_flops=None, jaxops_bytes=None, latency_metadata=None)


def allocated(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jax.lax.empty`, which XLA's scheduler would count like a kernel."""
    with takes(0):
        return jax.lax.empty(shape, dtype)


def takes(nanoseconds: int) -> contextlib.AbstractContextManager:
    """Tells XLA's scheduler how long the operation that is bound inside takes."""
    return set_xla_metadata(latency_metadata=str(nanoseconds))
