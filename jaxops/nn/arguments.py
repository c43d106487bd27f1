"""What a layer is made with: checks at construction, and parts that the layer makes itself."""

import functools
import inspect
from typing import Any

from flax import nnx
from jax import lax


def check_sizes(**sizes: Any) -> None:
    """
    Raises:
      TypeError: a size that is no integer.
      ValueError: a size below 1.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{name} is a {type(size).__name__}; it must be an integer.")
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1.")


def check_backend(backend: Any, *kernels: str) -> None:
    """Whether the layer's ops know the backend; whether the device runs it is found out where the layer is called."""
    known = ("auto", *kernels, "xla")
    if not isinstance(backend, str) or backend not in known:
        raise ValueError(f"backend={backend!r}: write {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")


def devices_on(argument: str, axis: str, instead: str = "") -> int:
    """The number of devices on a mesh axis.

    Args:
      argument: what the layer calls the axis.
      instead: what else the user may do.

    Raises:
      ValueError: no axis of that name here.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"{argument}={axis!r} is not an axis here: call this layer inside jax.shard_map over a mesh that has it{instead}."
        ) from None


def make_part(part: Any, *args: Any, rngs: nnx.Rngs) -> Any:
    """`part(*args, rngs=rngs)` where part is a class or a `functools.partial` of one; otherwise part as it is."""
    made_of = part.func if isinstance(part, functools.partial) else part
    return part(*args, rngs=rngs) if inspect.isclass(made_of) else part
