"""Values and errors of arrays: on a GPU in one program for all, on a CPU in numpy, which compiles nothing."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Values:
    """Of an argument, a result or a gradient.

    Attributes:
      name: "lhs", "result", "gradient of lhs".
      shape, dtype: as the op gave them.
      nans, infs: how many elements are NaN, or infinite.
      min, max, mean: of the finite elements; NaN where there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nans: int
    infs: int
    min: float
    max: float
    mean: float

    @property
    def finite(self) -> bool:
        return not self.nans and not self.infs


@dataclasses.dataclass(frozen=True)
class Error:
    """Of a result or gradient against the reference, over the elements that are finite in the reference.

    Attributes:
      max: the largest absolute error, over the root mean square of the reference. NaN where a number is not finite that
        is finite in the reference; inf where the reference is zero everywhere and the result is not.
      rms: the root mean square of the error, over that of the reference.
      one_sided: how many elements are finite in one of the two only.
      differ: how many elements are not equal.
    """

    name: str
    max: float
    rms: float
    one_sided: int
    differ: int


Named = list[tuple[str, Any]]  # arrays


def named(root: str, tree: Any) -> Named:
    """A tree's arrays, by path."""
    return [(root + jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def is_number(x: Any) -> bool:
    """Whether it has floating-point numbers, FP8 or wider."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def values_of(arrays: Named) -> tuple[Values, ...]:
    """Of the arrays of floating-point numbers among these."""
    arrays = [(name, x) for name, x in arrays if is_number(x)]
    found = _of_each(_statistics, [(x,) for _, x in arrays])
    return tuple(
        Values(name, tuple(x.shape), str(x.dtype), int(nans), int(infs), *map(float, rest))
        for (name, x), (nans, infs, *rest) in zip(arrays, found, strict=True)
    )


def errors_of(got: Named, wanted: Sequence[Any]) -> tuple[Error, ...]:
    """Of each array against the reference. Integers have a number of differences only."""
    pairs = [(x, y) for (_, x), y in zip(got, wanted, strict=True)]
    for (name, _), (x, y) in zip(got, pairs, strict=True):
        assert x.shape == y.shape, f"{name}: {x.shape}, and the reference {y.shape}"
    return tuple(
        Error(name, _over(float(largest), float(scale)), _over(float(rms), float(scale)), int(one_sided), int(differ))
        for (name, _), (largest, rms, scale, one_sided, differ) in zip(got, _of_each(_differences, pairs), strict=True)
    )


def _over(error: float, scale: float) -> float:
    if not error:
        return 0.0
    return error / scale if scale else math.nan if math.isnan(error) else math.inf


def _of_each(function: Callable, operands: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """`function` of numpy or jax.numpy and of each of the operands, as numbers on the host."""
    on_host = all(device.platform == "cpu" for each in operands for x in each for device in x.devices())
    if on_host:
        return [function(np, *map(np.asarray, each)) for each in operands]
    return jax.device_get(jax.jit(lambda operands: [function(jnp, *each) for each in operands])(operands))


def _statistics(xp: Any, x: Any) -> tuple[Any, ...]:
    """As the fields of `Values`."""
    x = x.astype(np.float32)
    finite = xp.isfinite(x)
    count = xp.sum(finite, dtype=np.uint32)
    least, most = xp.min(x, where=finite, initial=np.inf), xp.max(x, where=finite, initial=-np.inf)
    mean = xp.sum(x, where=finite) / xp.maximum(count, 1)
    rest = (xp.where(count == 0, np.nan, value) for value in (least, most, mean))
    return xp.sum(xp.isnan(x), dtype=np.uint32), xp.sum(xp.isinf(x), dtype=np.uint32), *rest


def _differences(xp: Any, x: Any, y: Any) -> tuple[Any, ...]:
    """Largest error, RMS error, RMS of the reference, how many are finite in one of the two only, how many differ."""
    if not x.size or not is_number(x):
        return *((np.float32(0),) * 3), np.uint32(0), xp.sum(x != y, dtype=np.uint32)
    x, y = x.astype(np.float32), y.astype(np.float32)
    known, there = xp.isfinite(x), xp.isfinite(y)
    # In numpy an infinity less an infinity is a warning.
    error = xp.where(there, xp.abs(xp.where(known, x, np.nan) - xp.where(there, y, 0)), 0)
    count = xp.maximum(xp.sum(there, dtype=np.uint32), 1)
    rms, scale = (xp.sqrt(xp.sum(xp.square(each)) / count) for each in (error, xp.where(there, y, 0)))
    differ = xp.sum((x != y) & ~(xp.isnan(x) & xp.isnan(y)), dtype=np.uint32)
    return xp.max(error), rms, scale, xp.sum(there != known, dtype=np.uint32), differ
