"""act(gate) * up in one pass over the pre-activations, as a Pallas kernel lowered through Triton."""

import functools

import jax

from jaxops._lib.activations import unit
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.grouped_glu.halves_pallas import Place, halves_of, program_count
from jaxops.ops.grouped_glu.plan import Halves, Spec, Tiles


def _fwd_kernel(offsets_ref, *refs, activation: str, block: Tiles):
    *pre, h_ref = refs
    M, F = h_ref.shape
    place = Place.of(offsets_ref, M, F, block)
    gate, up = (place.load(*half) for half in halves_of(pre, F))
    place.store(h_ref, unit(activation, gate, up))


@traced_once("spec", "block", "interpret")
def fwd_pallas(spec: Spec, block: Tiles, pre: Halves, offsets: jax.Array, *, interpret: bool) -> jax.Array:
    """h [M, F] in spec.out_dtype; rows outside the groups are zero. No size is 0."""
    M, F = pre[0].shape[0], pre[0].shape[1] * len(pre) // 2
    return launch(
        functools.partial(_fwd_kernel, activation=spec.activation, block=block),
        offsets,
        *pre,
        out=out_struct((M, F), spec.out_dtype, like=pre[0]),
        grid=(program_count(M, F, block),),
        warps=block.warps,
        interpret=interpret,
        name="grouped_glu_fwd",
    )
