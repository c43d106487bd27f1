"""`inspect`: an op is called, differentiated, timed and compared."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxops._lib.planning.device import current_device
from jaxops._lib.planning.recorded import Decision, watch
from jaxops.inspecting import choices, gradients, references
from jaxops.inspecting.calls import Call, take_apart
from jaxops.inspecting.inspection import Inspection, SideBySide
from jaxops.inspecting.programs import Program, Setting, card_of, compiled, measured
from jaxops.inspecting.ragged import ragged_of
from jaxops.inspecting.values import Named, errors_of, named, values_of
from jaxops.ops.quantize import Quantized


def inspect(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs one call of an op and its gradient, and says what happened: the plan and why, time, errors, values, memory.

    For looking at a call, not for use in a program: it compiles, times and compares with a reference. Works on any
    device. On a CPU there are no kernels and no device time; times are the host's.

    >>> import jax.numpy as jnp, jaxops
    >>> tokens, experts = jnp.ones((6, 4)), jnp.ones((3, 4, 8))
    >>> operands = tokens, experts, jnp.array([0, 2, 2, 5], jnp.int32)
    >>> report = jaxops.inspect(jaxops.grouped_matmul, *operands)
    >>> report.plan.backend, [(r.groups, r.empty, r.outside) for r in report.ragged]
    ('xla', [(3, 1, 1)])
    >>> [(error.name, error.max < 1e-6) for error in report.errors]
    [('result', True), ('gradient of lhs', True), ('gradient of rhs', True)]
    >>> [(kept.name, kept.bytes) for kept in report.kept]
    [('argument rhs', 384), ('argument lhs', 96), ('argument group_offsets', 16)]
    >>> both = jaxops.inspect(jaxops.grouped_matmul, *operands, backend=("pallas", "xla"))
    >>> [difference.max < 1e-6 for difference in both.differences]
    [True, True, True]

    `print(report)` shows everything as text, `rich.print(report)` as tables.

    Args:
      op: a public op of jaxops that computes on arrays, e.g. `jaxops.moe_mlp`.
      args, kwargs: its arguments: arrays of one device (not tracers), and options. backend= or plan= may be a tuple of
        two, which are then shown side by side; a plan for each modality is a list.

    Returns:
      An `Inspection`: the arguments; `plan`, the Plan as it ran; each choice with its source (explicit, a tuned row and
      its key, the heuristic); time, kernels, FLOPs and bytes of the forward and of the backward, and their share of
      this card's ceilings; errors of results and gradients against float32, over the root mean square; NaN, infinities
      and ranges of all values; groups; what the backward keeps. With a tuple, a `SideBySide` of two.

    Raises:
      TypeError: op is no op of jaxops; tracers or abstract arrays.
      ValueError: arrays on several devices; a tuple that has not two parts, or two tuples.
      NotImplementedError: an op across the devices of a mesh axis.
      Others: as the op.
    """
    pairs = {name: kwargs[name] for name in ("backend", "plan") if isinstance(kwargs.get(name), tuple)}
    if not pairs:
        return _inspect(take_apart(op, args, kwargs))[0]
    (name, both), *more = pairs.items()
    if more or len(both) != 2:
        raise ValueError(
            f"{' and '.join(pairs)} side by side: pass one tuple of two, as backend=('triton', 'xla') or "
            "plan=(first, second). A plan for each modality is a list."
        )
    found = [_inspect(take_apart(op, args, kwargs | {name: each})) for each in both]
    (first, results), (second, others) = found
    differences = errors_of(results, [x for _, x in others])
    labels = tuple(f"{name}={each!r}" if isinstance(each, str) else f"{name}={choices.brief(each)}" for each in both)
    return SideBySide((labels[0], labels[1]), first, second, differences)


def _inspect(call: Call) -> tuple[Inspection, Named]:
    """Also the results and gradients, as they are compared."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(call.device))
        for setting in (jax.debug_nans, jax.debug_infs):  # NaN is counted, not raised
            stack.enter_context(setting(False))
        return _run(call)


def _run(call: Call) -> tuple[Inspection, Named]:
    with watch() as decisions:
        forward = compiled(call.run, call.arrays)
    setting, notes = _setting(call, decisions)
    results = forward[0](call.arrays)
    programs = [measured("forward", forward, (call.arrays,), setting)]
    with watch() as more:
        backward, note = gradients.of(call, setting)
    notes.append(note)
    if backward is not None:
        programs.append(backward.program)
    gradient = backward.named if backward else []
    values = values_of([*zip(call.names, call.arrays, strict=True), *named("result", results), *gradient])
    if counted := [f"{each.name} ({each.nans} NaN, {each.infs} Inf)" for each in values if not each.finite]:
        notes.append(f"not finite: {', '.join(counted)}")
    ragged, compared = ragged_of(call, results), named("result", references.comparable(results)) + gradient
    reference, errors = "", ()
    if any(split.problems for split in ragged):
        notes.append("nothing is compared: the offsets are not valid, so rows are unspecified")
    elif compared:
        finite = all(each.finite for each in values if each.name in call.names)
        try:
            reference, wanted = gradients.wanted(call, backward, finite)
            errors = errors_of(compared, wanted)
        except jax.errors.JaxRuntimeError as error:
            notes.append(f"nothing is compared {reference}: {str(error).splitlines()[0]}")
    plan, parameters = choices.plan_of(decisions), call.parameters(call.arrays)
    if reference == references.PORTABLE and getattr(plan, "backend", "xla") == "xla":
        notes.append("the reference is the backend that ran: the errors show its rounding, and no mistake of its own")
    asked = parameters.get("backend", "auto"), parameters.get("plan")
    inspection = Inspection(
        op=call.name, device=setting.device.kind, arguments=call.arguments, static=call.static, plan=plan,
        choices=choices.choices_of([*decisions, *more], setting.device, *asked), programs=tuple(programs),
        reference=reference, errors=errors, values=values, ragged=ragged, kept=backward.kept if backward else (),
        notes=tuple(note for note in [*notes, *_of_programs(programs, setting)] if note),
    )  # fmt: skip
    return inspection, compared


def _of_programs(programs: list[Program], setting: Setting) -> Iterator[str]:
    """What the numbers of programs leave out."""
    for program in programs:
        if program.on_device and program.bytes is not None and program.bytes < 2 * (setting.device.l2_bytes or 0):
            yield f"{program.name}: a call moves less than twice the L2 cache, which still has data of the last call"
        if program.silent:
            yield f"{program.name}: the work of {', '.join(program.silent)} is not known, and not counted"


def _setting(call: Call, decisions: list[Decision]) -> tuple[Setting, list[str]]:
    """What the programs run on, and what cannot be known there."""
    device, notes = current_device(), []
    if device.platform == "gpu":
        card, note = card_of(call.device)
        notes.append(note)
    else:
        card = None
        notes.append(
            f"{device.kind}: kernels, device time and the share of a card's ceilings cannot be known here; times are "
            "the host's clock"
        )
    plans = [decision.plan for decision in decisions]
    interpreted = any(plan.backend == "pallas" and plan.on.interpret for plan in plans)
    if interpreted:
        notes.append("the kernels run in Pallas' interpreter: no FLOPs and bytes, and times say nothing")
    dtypes = [getattr(decision.problem, "dtype", None) for decision in decisions[:1]]
    first = next((x.dtype.name for x in call.arrays if references.is_float(x)), "float32")
    fp8 = call.name.startswith("fp8") or any(isinstance(x, Quantized) for x in call.parameters(call.arrays).values())
    return Setting(device, card, "float8_e4m3fn" if fp8 else (dtypes or [None])[0] or first, interpreted), notes
