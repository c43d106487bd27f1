"""The precisions of `--precision`: the dtype of the computation, and the class of linear layers."""

import functools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
from flax import nnx

from jaxops.nn import Fp8Linear

Dtype = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    Recipe = str
else:
    Recipe = Literal[Fp8Linear.recipes]  # by which a configuration is checked
Backend = Literal["auto", "pallas", "xla"]
BACKENDS = typing.get_args(Backend)
Attends = Literal["auto", "triton", "cudnn", "pallas", "xla"]  # backends of `jaxops.packed_attention`
DTYPES = typing.get_args(Dtype)


class Precision(NamedTuple):
    """A choice of `--precision`.

    Attributes:
      dtype: of everything but parameters, routers, residual stream and losses.
      recipe: of `jaxops.fp8_matmul`, for the linear layers, or None.
    """

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


def gpu_attends(dtype: Any) -> bool:
    """Whether a GPU's kernels for attention are available for this dtype: cuDNN's or jaxops', not for float32."""
    return jax.default_backend() == "gpu" and dtype != "float32"


def linear_layer(recipe: str | None, backend: str) -> Callable[..., Any]:
    """`nnx.Linear`, or a constructor of its FP8 equivalent."""
    return nnx.Linear if recipe is None else functools.partial(Fp8Linear, recipe=recipe, backend=backend)
