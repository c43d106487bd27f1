"""The precisions of `--precision`: the dtype of the computation, and the class of linear layers."""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
from flax import nnx

from jaxops.nn import Fp8Linear
from jaxops.offload import Policy

Dtype = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    Recipe = str
else:
    Recipe = Literal[Fp8Linear.recipes]  # by which a configuration is checked
Backend = Literal["auto", "pallas", "xla"]
BACKENDS = typing.get_args(Backend)
Attends = Literal["auto", "triton", "cudnn", "pallas", "xla"]  # backends of `jaxops.packed_attention`
DTYPES = typing.get_args(Dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """How a model is computed, whatever its sizes.

    Attributes:
      dtype: of the computation; parameters, losses and what the model names are float32.
      recipe: FP8 recipe of the products that the model names (`jaxops.fp8_matmul`); None for dtype.
      backend: of jaxops' ops, but for attention where that has its own.
      policy: what a block's backward reads from the device or the host, and what it recomputes (`jaxops.offload`): of
        "carry" (the block's input), the names of jaxops' ops, and the model's own. None keeps everything.
      unroll: whether layers are unrolled instead of scanned: faster steps, longer compilation; not with an offloading
        policy.
      sums: dtype in which gradients are summed over the devices of a mesh, at least dtype.
    """

    dtype: Dtype = "float32"
    recipe: Recipe | None = None
    backend: Backend = "auto"
    policy: Policy | None = None
    unroll: bool = False
    sums: Dtype = "float32"


class Precision(NamedTuple):
    """A choice of `--precision`, as of `Computation`."""

    dtype: Dtype
    recipe: Recipe | None = None


PRECISIONS = {
    "float32": Precision("float32"),
    "bfloat16": Precision("bfloat16"),
    **{f"fp8-{name.replace('_', '-')}": Precision("bfloat16", name) for name in Fp8Linear.recipes},
}


def for_this_machine() -> str:
    """The default precision."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def linear_layer(recipe: str | None, backend: str) -> Callable[..., Any]:
    """`nnx.Linear`, or a constructor of its FP8 equivalent."""
    return nnx.Linear if recipe is None else functools.partial(Fp8Linear, recipe=recipe, backend=backend)
