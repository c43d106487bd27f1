"""One call of an op, examined: its plan and who chose it, arrays in and out, time, and errors beside the reference."""

import contextlib
import dataclasses
import functools
import inspect as signatures
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.choices import Choice, choices_of, distinct
from jaxops._lib.planning.description import Function, Given, in_float32, is_float
from jaxops._lib.planning.device import current_device, default_device
from jaxops._lib.planning.recorded import watch
from jaxops.described import descriptions
from jaxops.profiling import device_times_us

_MOST_REFERENCE_BYTES = 1 << 28  # of what a reference.py holds beside its arguments
_MOST_RESULT_BYTES = 4e9  # of a measurement, which keeps the results of all its calls


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument, result or gradient.

    Attributes:
      name: from the op's signature, of a part of a tree with its path, as "routing.weights"; "result", "gradient of x".
      not_finite: how many elements are NaN or infinite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    not_finite: int


@dataclasses.dataclass(frozen=True)
class Error:
    """Of a result or gradient beside the reference, over the elements that are finite in the reference.

    Attributes:
      max: the largest absolute error over the root mean square of the reference. NaN where a number is not finite that
        is finite in the reference; inf where the reference is zero everywhere and the result is not.
      rms: the root mean square of the error, over that of the reference.
    """

    name: str
    max: float
    rms: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One call of an op, examined. Print it.

    Attributes:
      op, device: their names.
      plan: the op's Plan as it ran, to be passed as plan=; of several modalities a tuple; None without plans.
      choices: each choice of the plans, with its source. An op made of others has theirs, too.
      arguments, results, gradients: the arrays that were passed and computed.
      times_us: median microseconds of "forward" (without gradients) and, where there are gradients, of "backward" (from
        cotangents and residuals): on a GPU of their kernels, elsewhere of the host's clock.
      reference: what the errors are beside.
      errors: of the results and gradients; the cotangents are random normal numbers.
      notes: what is left out or cannot be known here.
    """

    op: str
    device: str
    plan: Any
    choices: tuple[Choice, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    gradients: tuple[Array, ...]
    times_us: dict[str, float]
    reference: str
    errors: tuple[Error, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}"]
        lines += [f"{c.op} {c.name} = {c.value}: {c.source} ({c.why})" for c in self.choices]
        for x in (*self.arguments, *self.results, *self.gradients):
            bad = f", {x.not_finite} not finite" if x.not_finite else ""
            lines.append(f"{x.name}: {x.dtype}{[*x.shape]}, {x.bytes:,} bytes{bad}")
        lines += [f"{name}: {us:,.1f} us" for name, us in self.times_us.items()]
        lines += [f"error of {e.name}: largest {e.max:.1e}, RMS {e.rms:.1e}, {self.reference}" for e in self.errors]
        return "\n  ".join([*lines, *(f"note: {note}" for note in self.notes)])


def inspect(op: Callable, *args: Any, **kwargs: Any) -> Inspection:
    """Runs one call of an op and its gradient, and says what happened: the plan and who chose it, time, errors.

    For looking at a call, not for use in a program: it compiles, times and compares. On a CPU times are the host's.

    >>> import jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.ones((3, 4, 8))
    >>> report = jaxops.inspect(jaxops.grouped_matmul, tokens, experts, jnp.array([0, 2, 2, 5], jnp.int32))
    >>> report.plan.backend, [(choice.name, choice.source) for choice in report.choices]
    ('xla', [('backend', 'auto')])
    >>> [(error.name, error.max < 1e-6) for error in report.errors]
    [('result', True), ('gradient of lhs', True), ('gradient of rhs', True)]

    Args:
      op: a public op of jaxops that computes on arrays, e.g. `jaxops.moe_mlp`.
      args, kwargs: its arguments: arrays of one device (not tracers), and options.

    Returns:
      What there is to see; print it.

    Raises:
      TypeError: op is no op of jaxops; tracers or abstract arrays.
      NotImplementedError: an op across the devices of a mesh axis.
    """
    call = _call_of(op, args, kwargs)
    with jax.default_device(call.device), jax.debug_nans(False), jax.debug_infs(False):  # NaN is counted, not raised
        return _inspect(call)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an op: the leaves of its parameters, those that are arrays also by number."""

    function: Function
    parameters: tuple[str, ...]
    names: list[str]
    leaves: list[Any]
    tree: Any
    device: Any

    def given(self, arrays: dict[int, Any]) -> Given:
        """The parameters, with these arrays."""
        leaves = [arrays.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return dict(zip(self.parameters, jax.tree.unflatten(self.tree, leaves), strict=True))

    def run(self, arrays: dict[int, Any]) -> Any:
        return self.function.function(**self.given(arrays))

    @functools.cached_property
    def arrays(self) -> dict[int, jax.Array]:
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, jax.Array)}

    @functools.cached_property
    def held(self) -> dict[int, jax.Array]:
        """The arrays that have gradients."""
        quantized = {name for name, value in self.given({}).items() if isinstance(value, Quantized)}
        roots = {i: self.names[i].replace("[", ".").partition(".")[0] for i in self.arrays}
        return {
            i: x
            for i, x in self.arrays.items()
            if is_float(x) and roots[i] not in quantized and {roots[i], self.names[i]} & {*self.function.wrt}
        }


def _call_of(op: Callable, args: tuple, kwargs: dict[str, Any]) -> _Call:
    known = {each.function: (folder, each) for folder, about in descriptions().items() for each in about.functions}
    try:
        folder, function = known[op]
    except (KeyError, TypeError):  # TypeError: not hashable
        one_device = ", ".join(sorted(each.name for folder, each in known.values() if folder != "parallel"))
        raise TypeError(f"op is {op!r}; pass a public op of jaxops itself: {one_device}.") from None
    if folder == "parallel":
        raise NotImplementedError(
            f"jaxops.{function.name} runs inside jax.shard_map; inspect examines a call on one device. Time the jitted "
            "shard_map with jaxops.profiling.device_times_us, and compare it with the product of the whole arrays."
        )
    try:
        bound = signatures.signature(op).bind(*args, **kwargs)
    except TypeError:
        op(*args, **kwargs)  # its own error
        raise
    bound.apply_defaults()
    parameters = tuple(bound.arguments)
    paths, tree = jax.tree_util.tree_flatten_with_path(tuple(bound.arguments.values()))
    names = [parameters[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in paths]
    for name, (_, leaf) in zip(names, paths, strict=True):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}; inspect runs the op: pass arrays, outside of jax.jit and other "
                "transformations."
            )
    devices = [device for _, leaf in paths if isinstance(leaf, jax.Array) for device in leaf.devices()]
    device = devices[0] if devices else default_device()
    leaves = [jax.device_put(leaf, device) if isinstance(leaf, np.ndarray) else leaf for _, leaf in paths]
    return _Call(function, parameters, names, leaves, tree, device)


def _inspect(call: _Call) -> Inspection:
    function, device, notes, gradients, cotangents = call.function, current_device(), [], [], []
    with watch() as decisions:
        forward = jax.jit(call.run).lower(call.arrays).compile()
        results = forward(call.arrays)
        times_us = _median_us("forward", forward, call.arrays)
        if call.held:
            try:
                floats = lambda arrays, held: [x for x in jax.tree.leaves(call.run(arrays | held)) if is_float(x)]
                forward_of = lambda arrays, held: jax.vjp(functools.partial(floats, arrays), held)
                out, vjp = jax.jit(forward_of)(call.arrays, call.held)
                cotangents = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(out)]
                backward = jax.jit(lambda vjp, cotangents: vjp(cotangents)[0]).lower(vjp, cotangents).compile()
                gradients = [(f"gradient of {call.names[i]}", x) for i, x in backward(vjp, cotangents).items()]
                times_us |= _median_us("backward", backward, vjp, cotangents)
            except (NotImplementedError, ValueError) as error:  # the call itself is right: the forward has run
                cotangents = []
                notes.append(f"no gradient: {error}")
    arguments = _arrays([(call.names[i], x) for i, x in call.arrays.items()])
    reference, errors = "", ()
    if invalid := _invalid_offsets(call.given({})):
        notes.append(f"nothing is compared, because {invalid}: rows are unspecified")
    else:
        try:
            reference, wanted = _wanted(call, cotangents, finite=not any(x.not_finite for x in arguments))
            got = _named("result", function.comparable(results)) + gradients
            errors = tuple(Error(name, *map(float, _error(x, y))) for (name, x), y in zip(got, wanted, strict=True))
        except jax.errors.JaxRuntimeError as error:  # the reference needs too much memory, say
            notes.append(f"nothing is compared: {str(error).splitlines()[0]}")
    if device.platform != "gpu":
        notes.append(f"{device.kind}: times are the host's clock, and say nothing of interpreted kernels")
    kept, asked = distinct(decisions), call.given({})
    plans = tuple(each.plan for each in kept if each.op == kept[0].op)
    return Inspection(
        function.name, device.kind, plans[0] if len(plans) == 1 else plans or None,
        tuple(choices_of(kept, device, asked.get("backend", "auto"), asked.get("plan"))),
        arguments, _arrays(_named("result", results)), _arrays(gradients), times_us, reference, errors, tuple(notes),
    )  # fmt: skip


def _median_us(name: str, program: Callable, *args: Any) -> dict[str, float]:
    """{name: median microseconds}; empty where no kernel ran."""
    jax.block_until_ready(program(*args))
    start = time.perf_counter()
    result = jax.block_until_ready(program(*args))
    call_s, result_bytes = time.perf_counter() - start, sum(x.nbytes for x in jax.tree.leaves(result))
    if current_device().platform != "gpu":
        return {name: 1e6 * call_s}
    calls = int(max(1, min(20, 0.2 / call_s, _MOST_RESULT_BYTES / max(result_bytes, 1))))
    with contextlib.suppress(RuntimeError):  # no kernel ran: an empty result, say
        return {name: statistics.median(device_times_us(program, *args, iterations=calls))}
    return {}


def _invalid_offsets(given: Given) -> str:
    """Which offsets break the contract of ragged ops, and how; empty where none do."""
    rows = next((x.shape[0] for x in given.values() if isinstance(x, jax.Array)), 0)
    for name in {"group_offsets", "sequence_offsets"} & {name for name, x in given.items() if x is not None}:
        offsets = np.asarray(given[name], np.int64)
        if np.any(np.diff(offsets) < 0) or offsets[0] < 0 or offsets[-1] > rows:
            return f"{name} do not rise from 0 or more to at most {rows} rows"
    return ""


def _wanted(call: _Call, cotangents: list, finite: bool) -> tuple[str, list[jax.Array]]:
    """(what the reference is, its results and gradients). reference.py is independent of all backends, but holds whole
    stacks in memory, and carries a NaN from one group's weights into the others."""
    function, given = call.function, call.given({})
    integers = function.name == "ragged_dot" and not is_float(given["lhs"])  # which its backends multiply, too
    reference, says = functools.partial(in_float32, function.function), "beside the xla backend in float32"
    if function.reference and finite and not integers and function.reference_bytes(given) <= _MOST_REFERENCE_BYTES:
        reference, says = function.reference, function.compares or "beside reference.py, in float32"

    def everything(held: dict, arrays: dict, cotangents: list) -> list[jax.Array]:
        def results(held: dict) -> tuple[list, list]:
            leaves = jax.tree.leaves(function.comparable(reference(call.given(arrays | held))))
            return [x for x in leaves if is_float(x)], leaves

        if not cotangents:
            return results(held)[1]
        _, vjp, leaves = jax.vjp(results, held, has_aux=True)
        return leaves + list(vjp(cotangents)[0].values())

    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if is_float(x) else x, (call.held, call.arrays, cotangents))
    with jax.default_matmul_precision("highest"):
        return says, jax.block_until_ready(jax.jit(everything)(*wide))


def _named(root: str, tree: Any) -> list[tuple[str, jax.Array]]:
    return [(root + jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _arrays(arrays: list[tuple[str, jax.Array]]) -> tuple[Array, ...]:
    not_finite = jax.jit(lambda x: jnp.sum(~jnp.isfinite(x.astype(jnp.float32)), dtype=jnp.uint32))
    return tuple(Array(name, tuple(x.shape), str(x.dtype), x.nbytes, int(not_finite(x))) for name, x in arrays)


@jax.jit
def _error(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """The largest error of x beside y, and the RMS of all, over the RMS of y."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    known = jnp.isfinite(y)
    error = jnp.where(known, jnp.abs(jnp.where(jnp.isfinite(x), x, jnp.nan) - y), 0)
    scale, rms = (jnp.sqrt(jnp.sum(each**2) / max(y.size, 1)) for each in (jnp.where(known, y, 0), error))
    return tuple(jnp.where(each == 0, 0, each / scale) for each in (jnp.max(error, initial=0), rms))
