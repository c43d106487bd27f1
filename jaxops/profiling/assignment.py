"""What XLA's own record of a program's memory, `BufferAssignmentProto`, says of its peak.

`compiled.memory_analysis()` has a CPU's record. Through PJRT's C interface, as on GPUs, it has none, but XLA writes it
into every profile. No library that jaxops needs has XLA's classes, so the few fields are read here by their numbers in
xla/service/hlo.proto.
"""

import collections
import pathlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["argument", "output", "temporary"]
_SHARE, _FREE = 2, 1  # kinds of a heap trace's events
_HOST = 5  # memory space
_Fields = dict[int, list[int | bytes]]


class Held(NamedTuple):
    """Device memory at the peak, and the instruction and array of its result that it holds."""

    bytes: int
    kind: Kind
    instruction: str
    leaf: int


def held_at_peak(module: bytes, assignment: bytes) -> list[Held]:
    """Arguments, results in memory of their own, and the temporaries at the first moment at which they have most bytes.

    The record of a CPU does not say when a temporary lives: the largest ones beside each other in their block stand for
    those at the peak.

    Args:
      module: the serialized HloModuleProto.
      assignment: the serialized BufferAssignmentProto.

    Raises:
      ValueError: the bytes are no such messages.
    """
    record = _fields(assignment)
    names = {_number(line, 35): _text(line, 1) for line in _lines(_fields(module))}
    values = {_number(value, 1): value for value in map(_fields, _texts(record, 1))}

    def held(value: int, kind: Kind) -> Held:
        place = _fields((_texts(values[value], 3) or [b""])[0])
        name = names.get(_number(place, 4), "") or _text(place, 2)
        return Held(_number(values[value], 2), kind, name, _last(place, 3))

    found: list[Held] = []
    temporaries: list[tuple[int, int, int]] = []  # value, offset, bytes
    for block in map(_fields, _texts(record, 3)):
        assigned = [_fields(each) for each in _texts(block, 9)]
        places = [(_number(each, 1), _number(each, 2), _number(each, 3)) for each in assigned]
        is_table = _number(block, 7) and _number(block, 11)  # the addresses of a tuple's arrays
        is_thread_local, is_constant = _number(block, 3), _number(block, 12)
        if not places or is_table or is_thread_local or is_constant or _number(block, 8) == _HOST:
            continue
        largest = max(places, key=lambda place: place[2])[0]
        if _number(block, 5) or _number(block, 7):
            kind: Kind = "argument" if _number(block, 5) else "output"
            found.append(held(largest, kind)._replace(bytes=_number(block, 2)))
        else:
            temporaries += _beside_each_other(places)
    traces = [trace for trace in map(_fields, _texts(record, 4)) if 1 in trace]
    live = [value for trace in traces for value in _live_at_peak(trace, values)]
    return found + [held(value, "temporary") for value in (live if traces else [place[0] for place in temporaries])]


def _beside_each_other(places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The largest values of a block that do not overlap."""
    chosen: list[tuple[int, int, int]] = []
    for value, offset, size in sorted(places, key=lambda place: -place[2]):
        if all(offset + size <= start or start + length <= offset for _, start, length in chosen):
            chosen.append((value, offset, size))
    return chosen


def _live_at_peak(trace: _Fields, values: dict[int, _Fields]) -> list[int]:
    """Replays the heap's trace. A value may share the memory of another one."""
    memory: dict[int, int] = {}  # the value whose memory a value has
    users, newest = collections.Counter[int](), dict[int, int]()
    total, most, live = 0, 0, list[int]()
    for event in map(_fields, _texts(trace, 1)):
        kind, value = _number(event, 1), _number(event, 2)
        if value not in values:
            raise ValueError(f"the heap's trace names the buffer {value}, which is not among the buffers.")
        if kind != _FREE:
            shared = _number(event, 5)
            memory[value] = memory.get(shared, shared) if kind == _SHARE else value
        of = memory.get(value)
        if of not in values:
            raise ValueError(f"the heap's trace frees or shares the buffer {value} before it is there.")
        size = 0 if _number(values[of], 4) == _HOST else _number(values[of], 2)
        was_used = users[of] > 0
        users[of] += -1 if kind == _FREE else 1
        if kind != _FREE:
            newest[of] = value
        total += size * ((users[of] > 0) - was_used)
        if total > most:
            most = total
            live = [newest[each] for each, count in users.items() if count > 0 and _number(values[each], 4) != _HOST]
    return [value for value in live if _number(values[value], 2)]


def in_profile(folder: pathlib.Path, program: str, entry: set[str]) -> tuple[bytes, bytes] | None:
    """The module and the record of a program in a profile's files; None if it is not there.

    Args:
      program: its name, such as "jit_step".
      entry: names of the instructions of its entry computation, which tell programs of one name apart.
    """
    for file in folder.rglob("*.xplane.pb"):
        for plane in map(_fields, _texts(_fields(file.read_bytes()), 1)):
            if _text(plane, 2) != "/host:metadata":
                continue
            for metadata in (_fields(_texts(_fields(each), 2)[-1]) for each in _texts(plane, 4)):
                if _text(metadata, 2).partition("(")[0] != program:
                    continue
                for hlo in (_fields(each) for stat in _texts(metadata, 5) for each in _texts(_fields(stat), 6)):
                    if 1 in hlo and 3 in hlo:
                        module = _texts(hlo, 1)[0]
                        if entry <= {_text(line, 1) for line in _lines(_fields(module))}:
                            return module, _texts(hlo, 3)[0]
    return None


def _lines(module: _Fields) -> Iterator[_Fields]:
    for computation in map(_fields, _texts(module, 3)):
        yield from map(_fields, _texts(computation, 2))


def _fields(message: bytes) -> _Fields:
    """Values by field number: ints of varints, bytes of all others (strings, messages, packed and fixed numbers)."""
    values: _Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = _varint(message, at)
        elif wire_type in (1, 2, 5):
            size, at = _varint(message, at) if wire_type == 2 else (8 if wire_type == 1 else 4, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"no protocol buffer message has the wire type {wire_type}.")
        if at > len(message):
            raise ValueError("a protocol buffer message is cut off.")
        values.setdefault(key >> 3, []).append(value)
    return values


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a protocol buffer message is cut off.")


def _number(message: _Fields, field: int) -> int:
    value = message.get(field, [0])[-1]
    return value if isinstance(value, int) else 0


def _last(message: _Fields, field: int) -> int:
    """The last of a field's numbers, packed or not; 0 if there are none."""
    value = message.get(field, [0])[-1]
    if isinstance(value, int):
        return value
    at = number = 0
    while at < len(value):
        number, at = _varint(value, at)
    return number


def _texts(message: _Fields, field: int) -> list[bytes]:
    return [value for value in message.get(field, []) if isinstance(value, bytes)]


def _text(message: _Fields, field: int) -> str:
    values = _texts(message, field)
    return values[-1].decode(errors="replace") if values else ""
