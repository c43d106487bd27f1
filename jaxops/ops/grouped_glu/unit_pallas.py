"""The gated unit act(gate) * up and its gradients, each in one pass over the pre-activations, as Pallas kernels lowered
through Triton."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.numerics.activations import unit, unit_gradients
from jaxops._lib.pallas.launch_pallas import launch
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.grouped_glu.plan import Halves, Spec, Tiles


@dataclasses.dataclass(frozen=True)
class _Window:
    """A program's rows [rows, 1] and columns [1, columns] of [M, F]; which of them exist, and which of these are in a
    group."""

    rows: jax.Array
    columns: jax.Array
    exists: jax.Array
    inside: jax.Array

    @classmethod
    def of(cls, offsets_ref, M: int, F: int, tiles: Tiles) -> "_Window":
        across, shape = pl.cdiv(F, tiles.columns), (tiles.rows, tiles.columns)
        program = pl.program_id(0)
        rows = (program // across * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32))[:, None]
        columns = (program % across * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32))[None, :]
        exists = jnp.broadcast_to(rows < M, shape)
        if F % tiles.columns:
            exists = exists & jnp.broadcast_to(columns < F, shape)
        first, end = (plgpu.load(offsets_ref.at[jnp.full((1, 1), i, jnp.int32)]) for i in (0, offsets_ref.shape[0] - 1))
        return cls(rows, columns, exists, exists & jnp.broadcast_to((first <= rows) & (rows < end), shape))

    def load(self, ref, first: int = 0) -> jax.Array:
        """Columns of ref from `first` on. Rows outside the groups are not read but zero, as are the unit and gradients
        of zeros."""
        return plgpu.load(ref.at[self.rows, first + self.columns], mask=self.inside, other=0.0)

    def store(self, ref, value: jax.Array, first: int = 0) -> None:
        plgpu.store(ref.at[self.rows, first + self.columns], value.astype(ref.dtype), mask=self.exists)


def _halves(refs, F: int) -> list[tuple]:
    """(ref, first column) of gate and up: an array each, or the halves of one."""
    return [(refs[0], 0), (refs[-1], F if len(refs) == 1 else 0)]


def _fwd_kernel(offsets_ref, *refs, activation: str, tiles: Tiles):
    *pre, h_ref = refs
    M, F = h_ref.shape
    window = _Window.of(offsets_ref, M, F, tiles)
    gate, up = (window.load(*half) for half in _halves(pre, F))
    window.store(h_ref, unit(activation, gate, up))


def _bwd_kernel(offsets_ref, dh_ref, *refs, activation: str, tiles: Tiles):
    pre, dpre = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    M, F = dh_ref.shape
    window = _Window.of(offsets_ref, M, F, tiles)
    gate, up = (window.load(*half) for half in _halves(pre, F))
    gradients = unit_gradients(activation, gate, up, window.load(dh_ref))
    for (ref, first), gradient in zip(_halves(dpre, F), gradients, strict=True):
        window.store(ref, gradient, first)


def _launch(kernel, name: str, shape: tuple[int, ...], tiles: Tiles, *operands, each: int, out, interpret: bool):
    """shape: M, F. each: operations an element of the unit."""
    return launch(
        kernel,
        *operands,
        out=out,
        grid=(pl.cdiv(shape[0], tiles.rows) * pl.cdiv(shape[1], tiles.columns),),
        warps=tiles.warps,
        interpret=interpret,
        name=name,
        flops=each * shape[0] * shape[1],
    )


@traced_once("spec", "tiles", "interpret")
def unit_fwd_pallas(spec: Spec, tiles: Tiles, pre: Halves, offsets: jax.Array, *, interpret: bool) -> jax.Array:
    """h [M, F] in spec.out_dtype; rows outside the groups are zero. No size is 0."""
    shape = (pre[0].shape[0], pre[0].shape[1] * len(pre) // 2)
    out = out_struct(shape, spec.out_dtype, like=pre[0])
    kernel = functools.partial(_fwd_kernel, activation=spec.activation, tiles=tiles)
    # The activation, times up.
    return _launch(kernel, "grouped_glu_fwd", shape, tiles, offsets, *pre, each=2, out=out, interpret=interpret)


@traced_once("spec", "tiles", "interpret")
def unit_bwd_pallas(
    spec: Spec, tiles: Tiles, pre: Halves, dh: jax.Array, offsets: jax.Array, *, interpret: bool
) -> Halves:
    """The gradients of pre, in its shapes and dtype; rows outside the groups are zero. No size is 0."""
    out = [out_struct(half.shape, half.dtype, like=half) for half in pre]
    kernel = functools.partial(_bwd_kernel, activation=spec.activation, tiles=tiles)
    # The activation and its slope, dh times each, and gate's gradient times up.
    how: dict[str, Any] = {"each": 5, "out": out, "interpret": interpret}
    return tuple(_launch(kernel, "grouped_glu_bwd", dh.shape, tiles, offsets, dh, *pre, **how))
