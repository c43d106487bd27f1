"""What an op says of itself in its describe.py: tools, contracts and docs read it from there."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import Planner

Given = dict[str, Any]
"""The parameters of a public function by name, with the defaults of those that were not passed."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A public function of an op.

    Attributes:
      function: itself.
      residuals: the checkpoint names of its results and of what its backward keeps, as "grouped_matmul.out". They are
        public: docs/residual_names.md and the docstring list them.
      wrt: the parameters that have gradients; a part of one with its path, as "routing.weights".
      reference: parameters, whose floating arrays are float32 -> results, in plain jnp and float32. None where the
        function is plain jnp itself.
      reference_bytes: parameters -> bytes that `reference` holds beside them. Where they are too many, the xla backend
        in float32 is the reference.
      comparable: results -> arrays, of these and of the reference's, that differ by errors of numbers alone.
      compares: what the reference is, where it is not the function in float32; for FP8, that it is not rounded.
      problem: what a plan is made for at a workload of a usual size; None for a function without plans.
    """

    function: Callable[..., Any]
    residuals: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    reference: Callable[[Given], Any] | None = None
    reference_bytes: Callable[[Given], int] = lambda given: 0
    comparable: Callable[[Any], Any] = lambda results: results
    compares: str = ""
    problem: Any = None

    @property
    def name(self) -> str:
        return self.function.__name__


class Tuning:
    """How an op is tuned, for an op that has tuned rows.

    Attributes:
      planner, problem: of the op's plans; the class of its problems.
      shape: fields of the problem that the command's --shape gives, in this order.
      unit: of its speed, "tflops" or "gbps".
      values: field -> (what the command takes for it, its default): the command tunes each of them.
      may_be_0: fields of `shape` with a meaning of 0; a problem with another size of 0 runs no kernel.
      run: (pass, problem, plan, *operands) -> results of the pass with the plan.
      work: (pass, problem, *operands) -> floating-point operations or bytes of a call, after `unit`.
      largest_error: of an element beside the xla backend's, over its own size and the RMS of all; None for the usual
        limit of the dtype.
    """

    planner: Planner
    problem: type
    shape: tuple[str, ...]
    unit: str
    values: Mapping[str, tuple[Sequence, Sequence]] = {}
    may_be_0: tuple[str, ...] = ()
    run: Callable[..., Any]
    work: Callable[..., float]
    largest_error: float | None = None

    def tensors(self, problem: Any) -> Any:
        """Random arrays of the problem's shapes."""
        raise NotImplementedError

    def operands(self, name: str, problem: Any, tensors: Any, offsets: jax.Array | None) -> tuple:
        """The operands of one call of a pass: the tensors, and behind them offsets, [G + 1] of a split of the rows,
        where `splits` gives one."""
        operands = (tensors,) if isinstance(tensors, jax.Array) else tuple(tensors)
        return operands if offsets is None else (*operands, offsets)

    def splits(self, problem: Any) -> Sequence[np.ndarray | None]:
        """The default group sizes, one array each; None where there are no groups."""
        return [None]

    def is_empty(self, problem: Any) -> bool:
        return any(getattr(problem, name) == 0 for name in self.shape if name not in self.may_be_0)

    def passes(self, problem: Any) -> tuple[str, ...]:
        """Passes to measure, in this order: each is measured beside the fastest tiles of those before it."""
        return self.planner.passes

    def kernels(self, problem: Any, device: Device) -> tuple[str, ...]:
        """Kernels to measure."""
        return ("pallas",)


@dataclasses.dataclass(frozen=True)
class Description:
    """An op.

    Attributes:
      functions: its public functions.
      tuning: None for an op without tuned rows.
    """

    functions: tuple[Function, ...]
    tuning: Tuning | None = None


def names(prefix: str, of_values: str) -> tuple[str, ...]:
    """("adaln.out", "adaln.stats") of "adaln" and "out stats"."""
    return tuple(f"{prefix}.{name}" for name in of_values.split())


def random(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def split(rows: int, shares: np.ndarray) -> np.ndarray:
    """Group sizes in proportion to shares; they add up to rows."""
    ends = np.concatenate([[0], np.cumsum(shares / shares.sum())])
    return np.diff(np.floor(ends * rows + 0.5).astype(int))


def product_bytes(rows: str, weights: str) -> Callable[[Given], int]:
    """`Function.reference_bytes` of a product that holds [G, M, K] and [G, M, N]: the names of both parameters."""

    def holds(given: Given) -> int:
        (M, K), several = given[rows].shape, given[weights]
        several = several if isinstance(several, (tuple, list)) else (several,)
        G = given["group_offsets"].shape[0] - 1 if "group_offsets" in given else given["group_sizes"].shape[0]
        return 4 * G * M * (K + max(max(w.shape[-2:]) for w in several))

    return holds


def in_float32(function: Callable[..., Any], given: Given) -> Any:
    """The function's xla backend (of one without backends, itself), with float32 products and results."""
    parameters = inspect.signature(function).parameters
    plain = {"backend": "xla", "precision": "highest"}
    plain |= dict.fromkeys(("plan", "compute_dtype", "out_dtype", "preferred_element_type"))
    return function(**(given | {name: value for name, value in plain.items() if name in parameters}))


def is_float(x: Any) -> bool:
    """Whether it is an array of floating-point numbers that can be differentiated: FP8 cannot."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
