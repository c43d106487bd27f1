"""Gluon's layouts. The simulator asks them only how the programs of a cluster divide a block."""

import dataclasses
from typing import Any

from tests.gluon_simulator.tensors import unwrap


@dataclasses.dataclass(frozen=True)
class BlockedLayout:
    size_per_thread: Any
    threads_per_warp: Any
    warps_per_cta: Any
    order: Any
    cga_layout: Any = None


@dataclasses.dataclass(frozen=True)
class SliceLayout:
    dim: int
    parent: Any

    @property
    def cga_layout(self):
        return [basis[: self.dim] + basis[self.dim + 1 :] for basis in unwrap(self.parent).cga_layout or []]


@dataclasses.dataclass(frozen=True)
class NVMMADistributedLayout:
    version: Any
    warps_per_cta: Any
    instr_shape: Any
    cga_layout: Any = None


@dataclasses.dataclass(frozen=True)
class DotOperandLayout:
    operand_index: Any
    parent: Any
    k_width: Any

    @property
    def cga_layout(self):
        return unwrap(self.parent).cga_layout


@dataclasses.dataclass(frozen=True)
class SwizzledSharedLayout:
    vec: int
    per_phase: int
    max_phase: int
    order: Any
    cga_layout: Any = None


@dataclasses.dataclass(frozen=True)
class MBarrierLayout:
    cga_layout: Any = None


@dataclasses.dataclass(frozen=True)
class NVMMASharedLayout:
    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2
    cga_layout: Any = None

    def __hash__(self):  # lists in it: the descriptors of a launch are static arguments of jax.jit
        return hash((self.swizzle_byte_width, self.element_bitwidth, self.rank, str(self.cga_layout)))

    @classmethod
    def get_default_for(cls, block_shape, dtype, cga_layout=None) -> "NVMMASharedLayout":
        """As many bytes of a row are swizzled as there are, up to 128."""
        dtype, bases = unwrap(dtype), unwrap(cga_layout) or []
        width = block_shape[-1] * dtype.itemsize // (2 if any(basis[-1] for basis in bases) else 1)
        swizzle = next((n for n in (128, 64, 32) if width % n == 0), 0)
        return cls(swizzle, 8 * dtype.itemsize, len(block_shape), bases)
