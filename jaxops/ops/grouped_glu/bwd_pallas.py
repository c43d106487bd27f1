"""The gradients of gate and up in one pass over the pre-activations and dh, as a Pallas kernel lowered through Triton."""

import functools

import jax

from jaxops._lib.activations import unit_gradients
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.grouped_glu.halves_pallas import Place, halves_of, program_count
from jaxops.ops.grouped_glu.plan import Halves, Spec, Tiles


def _bwd_kernel(offsets_ref, dh_ref, *refs, activation: str, block: Tiles):
    pre, dpre = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    M, F = dh_ref.shape
    place = Place.of(offsets_ref, M, F, block)
    gate, up = (place.load(*half) for half in halves_of(pre, F))
    gradients = unit_gradients(activation, gate, up, place.load(dh_ref))
    for (ref, first), gradient in zip(halves_of(dpre, F), gradients, strict=True):
        place.store(ref, gradient, first)


@traced_once("spec", "block", "interpret")
def bwd_pallas(spec: Spec, block: Tiles, pre: Halves, dh: jax.Array, offsets: jax.Array, *, interpret: bool) -> Halves:
    """The gradients of pre, in its shapes and dtype; rows outside the groups are zero. No size is 0."""
    M, F = dh.shape
    found = launch(
        functools.partial(_bwd_kernel, activation=spec.activation, block=block),
        offsets,
        dh,
        *pre,
        out=[out_struct(half.shape, half.dtype, like=half) for half in pre],
        grid=(program_count(M, F, block),),
        warps=block.warps,
        interpret=interpret,
        name="grouped_glu_bwd",
    )
    return tuple(found)
