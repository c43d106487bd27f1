"""The peak of device memory that a compiled program needs, and the arrays that hold it, from XLA's own record."""

import dataclasses
import pathlib
import tempfile
import types
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from jaxops._lib.terminal import as_text
from jaxops.offload.reports import sizes
from jaxops.profiling import assignment, hlo, trace
from jaxops.profiling.scopes import Stage, own_metadata
from jaxops.profiling.tables import bytes_text, cut, table

_ROWS = 15


@dataclasses.dataclass(frozen=True)
class Holder:
    """One array in device memory at the peak.

    Attributes:
      kind: an argument (donated ones, too), a result in memory of its own, or a temporary.
      scope: where in the model its value is computed: named scopes and the primitive, outermost first. Of an argument
        its path, such as "params['w']". Empty if XLA knows none.
      shape: as in HLO, "bf16[8,128]".
      stage: of the computation; None for arguments.
    """

    bytes: int
    kind: assignment.Kind
    scope: str
    shape: str
    stage: Stage | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """The result of `memory`. Bytes are of one device.

    Attributes:
      peak_bytes: what XLA reserves: arguments, outputs and temporaries.
      argument_bytes, temporary_bytes: XLA's figures; temporaries with the gaps between them.
      output_bytes: of results that are not written into donated arguments.
      host_bytes: in host memory, of all three kinds.
      holders: what is live at the peak, largest first; empty if it is unknown.
      notes: how the holders were found, and what is unknown.
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    holders: tuple[Holder, ...]
    notes: tuple[str, ...]

    @property
    def unexplained_bytes(self) -> int:
        """`peak_bytes` less those of the holders: gaps, padding, tables of tuples."""
        return self.peak_bytes - sum(each.bytes for each in self.holders)

    def by_scope(self, depth: int | None = None) -> dict[str, int]:
        """Bytes of the holders by scope, largest first: by its first `depth` parts, or by all."""
        totals: dict[str, int] = {}
        for each in self.holders:
            scope = "/".join(each.scope.split("/")[:depth])
            totals[scope] = totals.get(scope, 0) + each.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"unexplained_bytes": self.unexplained_bytes}

    def __rich__(self) -> RenderableType:
        return memory_table(self.to_dict())

    def __str__(self) -> str:
        return as_text(self)


def memory_table(memory: dict[str, Any]) -> RenderableType:
    """The peak, from `Memory.to_dict()`, and its largest arrays; equal ones together."""
    parts = (f"{bytes_text(memory[f'{part}_bytes'])} {part}s" for part in ("argument", "output", "temporary"))
    head = f"{bytes_text(memory['peak_bytes'])} at the peak: {', '.join(parts)}".replace("temporarys", "temporaries")
    head += f"; {bytes_text(memory['host_bytes'])} in host memory" if memory["host_bytes"] else ""
    alike: dict[tuple[str, ...], list[int]] = {}
    for each in memory["holders"]:
        key = each["kind"], each["stage"] or "", each["shape"], each["scope"] or "(unknown)"
        alike.setdefault(key, []).append(each["bytes"])
    rows = sorted(alike.items(), key=lambda row: -sum(row[1]))
    arrays = table("array", "bytes", "share", "kind", "stage", "computed in", numbers=(1, 3))
    for (kind, stage, shape, scope), each in rows[:_ROWS]:
        share = f"{sum(each) / max(memory['peak_bytes'], 1):.1%}"
        count = f"{len(each)} x " if len(each) > 1 else ""
        arrays.add_row(f"{count}{shape}", bytes_text(sum(each)), share, kind, stage, cut(scope, 64))
    if rest := rows[_ROWS:]:
        arrays.add_row(f"{len(rest)} others", bytes_text(sum(sum(each) for _, each in rest)), "", "", "", "")
    if rows:
        arrays.add_row("gaps, padding", bytes_text(memory["unexplained_bytes"]), "", "", "", "")
    notes = [Text(f"note: {note}", style="dim") for note in memory["notes"]]
    return Group(Text(head), *([arrays] if rows else []), *notes)


def memory(step: Any, *args: Any, **kwargs: Any) -> Memory:
    """The peak of device memory that a step needs, and the arrays that hold it then.

    Nothing runs. XLA reserves temporaries as one block, so the peak is the sum of arguments, outputs and that block.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> step = jax.jit(lambda w, x: jnp.tanh(x @ w) @ w)
      >>> memory = jaxops.profiling.memory(step, jnp.ones((64, 64)), jnp.ones((16, 64)))
      >>> memory.argument_bytes, memory.holders[0].scope
      (20480, 'w')

    Args:
      step: a function from `jax.jit`, or `jax.jit(f).lower(*args).compile()`.
      args, kwargs: of the step, or `jax.ShapeDtypeStruct`s; none for a compiled program.

    Raises:
      TypeError: step is neither, or a compiled program comes with arguments.
    """
    if hasattr(step, "memory_analysis"):
        if args or kwargs:
            raise TypeError("memory takes a compiled program alone; pass arguments with the jitted function instead.")
        return memory_of(step.runtime_executable())
    if not hasattr(step, "lower"):
        raise TypeError(f"memory needs a function from jax.jit or a compiled program, not {type(step).__name__}.")
    with own_metadata():
        compiled = step.lower(*args, **kwargs).compile()
    return memory_of(compiled.runtime_executable())


def memory_of(executable: Any) -> Memory:
    """`memory` of a program as `compiled.runtime_executable()` or the backend's `live_executables()` give it."""
    stats = executable.get_compiled_memory_stats()
    reserved = types.SimpleNamespace(memory_analysis=lambda: stats)
    arguments, outputs, temporaries = sizes(reserved)
    module = hlo.parse(executable.hlo_modules()[0].to_string())
    notes: list[str] = []
    holders: list[Holder] = []
    try:
        if record := _record(executable, module):
            holders = [_holder(each, module) for each in assignment.held_at_peak(*record)]
        else:
            notes.append("the arrays at the peak are unknown: XLA hands out no record of its buffers here.")
    except ValueError as error:
        notes.append(f"the arrays at the peak are unknown: XLA's record of its buffers is unreadable ({error})")
    return Memory(
        peak_bytes=arguments + outputs + temporaries,
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=temporaries,
        host_bytes=sum(sizes(reserved, "host_")),
        holders=tuple(sorted(holders, key=lambda each: -each.bytes)),
        notes=tuple(notes),
    )


def _record(executable: Any, module: hlo.Module) -> tuple[bytes, bytes] | None:
    """XLA's module and its record of the buffers, serialized."""
    if record := getattr(executable.get_compiled_memory_stats(), "serialized_buffer_assignment_proto", b""):
        return executable.hlo_modules()[0].as_serialized_hlo_module_proto(), record
    try:
        with tempfile.TemporaryDirectory() as folder:
            with trace.recording(folder):
                pass
            entry = set(module.computations.get(module.entry, ()))
            return assignment.in_profile(pathlib.Path(folder), module.name, entry)
    except trace.ProfilerBusy:
        return None


def _holder(held: assignment.Held, module: hlo.Module) -> Holder:
    instruction = module.instructions.get(held.instruction, (None,))[0]
    if instruction is None:
        return Holder(held.bytes, held.kind, "", "")
    arrays = instruction.arrays
    shape = str(arrays[held.leaf]) if held.leaf < len(arrays) else ""
    if held.kind == "argument":
        return Holder(held.bytes, held.kind, instruction.op_name or instruction.name, shape)
    scope = hlo.scope_in(instruction, module)
    return Holder(held.bytes, held.kind, "/".join(filter(None, (*scope.path, scope.primitive))), shape, scope.stage)
