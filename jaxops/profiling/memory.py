"""The peak of device memory that a compiled program needs, and its largest arrays, from XLA's buffer assignment.

XLA writes `BufferAssignmentProto` of each loaded program into every profile. No library that jaxops needs has XLA's
classes, so fields are read by their numbers in xla/service/hlo.proto and tsl/profiler/protobuf/xplane.proto.
"""

import collections
import dataclasses
import pathlib
import tempfile
import types
from collections.abc import Iterator
from typing import Any, Literal

from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError

from jaxops._lib.hlo import Module, arrays, module_of
from jaxops.offload.reports import sizes
from jaxops.profiling import trace
from jaxops.profiling.scopes import Stage, own_metadata, scopes_of
from jaxops.profiling.tables import bytes_text, cut, share_text, table

_ROWS = 15
_HOST = 5  # memory space
Kind = Literal["argument", "output", "temporary"]


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
    kind: Kind
    scope: str = ""
    shape: str = ""
    stage: Stage | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """The result of `memory`. Bytes are of one device.

    Attributes:
      peak_bytes: what XLA reserves: arguments, outputs and temporaries.
      argument_bytes, temporary_bytes: XLA's figures; temporaries with the gaps between them.
      output_bytes: of results that are not written into donated arguments.
      host_bytes: in host memory, of all three kinds.
      holders: largest first; empty if they are unknown. Temporaries are the largest ones that share no memory: XLA
        puts one where another one's life is over.
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    holders: tuple[Holder, ...]

    @property
    def unexplained_bytes(self) -> int:
        """`peak_bytes` less those of the holders: gaps, padding, tables of tuples."""
        return self.peak_bytes - sum(each.bytes for each in self.holders)

    def by_scope(self, depth: int | None = None) -> dict[str, int]:
        """Bytes of the holders by scope, largest first: by its first `depth` parts, or by all."""
        totals: collections.Counter[str] = collections.Counter()
        for each in self.holders:
            totals["/".join(each.scope.split("/")[:depth])] += each.bytes
        return dict(totals.most_common())

    def __str__(self) -> str:
        head = (
            f"{bytes_text(self.peak_bytes)} at the peak: {bytes_text(self.argument_bytes)} arguments, "
            f"{bytes_text(self.output_bytes)} outputs, {bytes_text(self.temporary_bytes)} temporaries"
        )
        head += f"; {bytes_text(self.host_bytes)} in host memory" if self.host_bytes else ""
        if not self.holders:
            return f"{head}; XLA hands out no record of the arrays"
        alike: dict[Holder, int] = collections.Counter(self.holders)
        found = sorted(((each.bytes * count, count, each) for each, count in alike.items()), key=lambda row: -row[0])
        rows = []
        for total, count, each in found[:_ROWS]:
            name, share = f"{count} x {each.shape}" if count > 1 else each.shape, share_text(total, self.peak_bytes)
            rows.append(
                [name, bytes_text(total), share, each.kind, each.stage or "", cut(each.scope or "(unknown)", 64)]
            )
        if rest := found[_ROWS:]:
            rows.append([f"{len(rest)} others", bytes_text(sum(total for total, _, _ in rest)), *4 * [""]])
        rows.append(["gaps, padding", bytes_text(self.unexplained_bytes), *4 * [""]])
        return f"{head}\n" + table("array|>bytes|>share|kind|stage|computed in", rows)


def memory(step: Any, *args: Any, **kwargs: Any) -> Memory:
    """The peak of device memory that a step needs, and the arrays that hold it.

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
    stats, module = executable.get_compiled_memory_stats(), module_of(executable)
    reserved = types.SimpleNamespace(memory_analysis=lambda: stats)
    arguments, outputs, temporaries = sizes(reserved)
    try:
        with tempfile.TemporaryDirectory() as folder:
            with trace.recording(folder):
                pass
            record = _record(pathlib.Path(folder), executable, module)
        holders = [*_holders(record, module)] if record else []
    except (trace.ProfilerBusy, DecodeError):
        holders = []
    return Memory(
        peak_bytes=arguments + outputs + temporaries,
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=temporaries,
        host_bytes=sum(sizes(reserved, "host_")),
        holders=tuple(sorted(holders, key=lambda each: -each.bytes)),
    )


_Fields = dict[int, list[Any]]  # by number: ints, and bytes of strings and messages


def _record(folder: pathlib.Path, executable: Any, module: Module) -> tuple[_Fields, _Fields] | None:
    """The HloModuleProto and the BufferAssignmentProto of a program in a profile's files; None if it is not there.

    Of programs with the same name and instructions, that whose results lie in the same arguments.
    """
    records: list[tuple[_Fields, _Fields]] = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in _messages(_fields(file.read_bytes()), 1):
            for program in _messages(plane, 4) if plane.get(2) == [b"/host:metadata"] else ():
                metadata = next(_messages(program, 2))
                if metadata[2][0].decode().partition("(")[0] != module.name:
                    continue
                for hlo in (_fields(value) for stat in _messages(metadata, 5) for value in stat.get(6, ())):
                    if 1 in hlo and 3 in hlo:
                        records.append((next(_messages(hlo, 1)), next(_messages(hlo, 3))))
    names = module.instructions.keys()
    same = [each for each in records if names <= {line[1][0].decode() for line in _lines(each[0])}]
    aliases = _fields(executable.hlo_modules()[0].as_serialized_hlo_module_proto()).get(8)
    return max(same, key=lambda each: each[0].get(8) == aliases, default=None)


def _holders(record: tuple[_Fields, _Fields], module: Module) -> Iterator[Holder]:
    """Arguments, results in memory of their own, and the largest temporaries that share no memory."""
    program, assignment = record
    names = {_number(line, 35): line[1][0].decode() for line in _lines(program)}
    values = {_number(value, 1): value for value in _messages(assignment, 1)}
    scope_of = scopes_of(module)
    for block in _messages(assignment, 3):
        is_argument, is_output = _number(block, 5), _number(block, 7)
        is_table = is_output and _number(block, 11)  # the addresses of a tuple's arrays
        is_thread_local, is_constant = _number(block, 3), _number(block, 12)
        if is_table or is_thread_local or is_constant or _number(block, 8) == _HOST:
            continue
        kind: Kind = "argument" if is_argument else "output" if is_output else "temporary"
        places = [[_number(place, field) for field in (1, 2, 3)] for place in _messages(block, 9)]
        chosen: list[tuple[int, int]] = []
        for value, offset, size in sorted(places, key=lambda place: -place[2]):
            if any(offset < end and start < offset + size for start, end in chosen):
                continue
            chosen.append((offset, offset + size))
            moved = size if kind == "temporary" else _number(block, 2)
            at = next(_messages(values[value], 3))
            instruction = module.instructions.get(names.get(_number(at, 4), ""))
            if instruction is None:
                yield Holder(moved, kind)
            else:
                result = _numbers(at[3][0])[-1] if 3 in at else 0  # of the instruction's tuple
                shape = str(dict(enumerate(arrays(instruction.type))).get(result, ""))
                scope = scope_of(instruction)
                path, stage = "/".join(filter(None, (*scope.path, scope.primitive))), scope.stage
                if kind == "argument":
                    path, stage = instruction.text("op_name") or instruction.name, None
                yield Holder(moved, kind, path, shape, stage)
            if kind != "temporary":
                break


def _lines(module: _Fields) -> Iterator[_Fields]:
    for computation in _messages(module, 3):
        yield from _messages(computation, 2)


def _messages(message: _Fields, field: int) -> Iterator[_Fields]:
    return map(_fields, message.get(field, ()))


def _fields(message: bytes) -> _Fields:
    values: _Fields = {}
    for field in unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message)):
        values.setdefault(field.field_number, []).append(field.data)
    return values


def _number(message: _Fields, field: int) -> int:
    """Zeros are not written."""
    return message.get(field, [0])[-1]


def _numbers(packed: bytes) -> list[int]:
    """Those of a packed field."""
    numbers, value, bits = [], 0, 0
    for byte in packed:
        value, bits = value | (byte & 127) << bits, bits + 7
        if byte < 128:
            numbers.append(value)
            value = bits = 0
    return numbers
