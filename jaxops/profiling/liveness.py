"""Which buffers of a compiled program live when, read from its scheduled text.

XLA's own record of this (`jaxops.profiling.assignment`) is exact, but not every backend hands it out. Here its rules
are applied to the text: one timeline in the order of the schedule, loops and calls inlined once, and values that must
share memory (a loop's carry, in-place updates, aliased operands and results) or that XLA lets share it (an elementwise
fusion and an operand that dies there) joined into one buffer.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from jaxops.profiling.hlo import Array, Instruction, Module

Kind: TypeAlias = Literal["argument", "output", "temporary", "constant"]
Place: TypeAlias = tuple[str, int]  # an instruction and which array of its result
_ALIASES = frozenset(("bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain", "after-all"))
_NAMES = (
    "add subtract multiply divide maximum minimum negate exponential exponential-minus-one tanh select compare convert "
    "power sqrt rsqrt cbrt abs and or not xor log log-plus-one logistic sine cosine clamp sign floor is-finite"
)
_ELEMENTWISE = frozenset(_NAMES.split())
_HOST_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[[\d,<=]*\](?:\{([^}]*)\})?")
_ALIASED_RESULT = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One piece of memory.

    Attributes:
      places: the values that it holds, one after the other.
      times: (first, last) steps of the schedule at which it holds one; arguments and outputs are there all the time.
    """

    bytes: int
    kind: Kind
    places: tuple[Place, ...]
    times: tuple[tuple[int, int], ...]
    on_host: bool


def buffers(module: Module, text: str) -> list[Buffer]:
    """All buffers of the program: module is `parse(text)`."""
    timeline = _Timeline(module, text)
    timeline.run_entry()
    return timeline.buffers()


def live_at_peak(found: Sequence[Buffer]) -> list[Buffer]:
    """The device's temporaries at the first step at which they have most bytes; without those in outputs' memory."""
    outside = _in_outputs(found)
    temporaries = [each for each in found if _is_temporary(each) and each not in outside]
    changes: dict[int, int] = {}
    for each in temporaries:
        for first, last in each.times:
            changes[first] = changes.get(first, 0) + each.bytes
            changes[last + 1] = changes.get(last + 1, 0) - each.bytes
    total = most = peak = 0
    for step in sorted(changes):
        total += changes[step]
        if total > most:
            most, peak = total, step
    return [each for each in temporaries if any(first <= peak <= last for first, last in each.times)]


def _is_temporary(each: Buffer) -> bool:
    return each.kind == "temporary" and each.bytes > 0 and not each.on_host


def _in_outputs(found: Sequence[Buffer]) -> set[Buffer]:
    """Temporaries that XLA keeps in the memory of an output that is written later: the largest first, if they fit."""
    outputs = [(each, [*each.times]) for each in found if each.kind == "output" and not each.on_host]
    placed = set()
    for each in sorted(filter(_is_temporary, found), key=lambda each: -each.bytes):
        for output, times in outputs:
            if each.bytes <= output.bytes and not any(a <= d and c <= b for a, b in times for c, d in each.times):
                times += each.times
                placed.add(each)
                break
    return placed


class _Timeline:
    """Values are numbers; `_parent` joins those that share memory."""

    def __init__(self, module: Module, text: str):
        self._module, self._text = module, text
        self._host = _on_host(text)
        self._parent: list[int] = []
        self._bytes: list[int] = []
        self._kind: list[Kind] = []
        self._on_host: list[bool] = []
        self._place: list[Place] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._may_share: list[tuple[int, int, int]] = []  # (step, result, operand)
        self._whole = {
            name
            for name, (each, _) in module.instructions.items()
            if len(each.arrays) == 1 and each.opcode != "get-tuple-element"
        }
        self._now = 0

    def run_entry(self) -> None:
        entry = self._module.computations.get(self._module.entry, {})
        arguments = {
            number_of(each): self._new(each, "argument") for each in entry.values() if each.opcode == "parameter"
        }
        results = self._run(self._module.entry, [arguments[i] for i in sorted(arguments)])
        header = self._text.partition("\n")[0]
        pairs = _braces(header, "input_output_alias=")
        for result, parameter, index in _ALIASED_RESULT.findall(pairs):
            number, leaf = (int((found or "0").split(",")[0]) for found in (result, index))
            values = arguments.get(int(parameter), [])
            if number < len(results) and leaf < len(values):
                self._join(values[leaf], results[number])
        for value in results:
            self._last[value] = self._now
            if self._kind[self._root(value)] == "temporary":
                self._kind[self._root(value)] = "output"
        self._join_what_may_share()

    def _join_what_may_share(self) -> None:
        first, last = [*self._first], [*self._last]  # of all values that share a root's memory
        for value in range(len(self._parent)):
            root = self._root(value)
            first[root], last[root] = min(first[root], first[value]), max(last[root], last[value])
        for step, result, operand in self._may_share:
            a, b = self._root(result), self._root(operand)
            free = a != b and self._kind[a] == self._kind[b] == "temporary" and self._bytes[a] == self._bytes[b]
            if free and last[b] == step and first[a] == step and self._on_host[a] == self._on_host[b]:
                self._join(b, a)
                first[b], last[b] = min(first[a], first[b]), max(last[a], last[b])

    def buffers(self) -> list[Buffer]:
        held: dict[int, list[int]] = {}
        for value in range(len(self._parent)):
            held.setdefault(self._root(value), []).append(value)
        return [
            Buffer(
                self._bytes[root],
                self._kind[root],
                tuple(dict.fromkeys(self._place[value] for value in values)),
                _merged((self._first[value], self._last[value]) for value in values),
                self._on_host[root],
            )
            for root, values in held.items()
        ]

    def _new(
        self, instruction: Instruction, kind: Kind = "temporary", arrays: Sequence[Array] | None = None
    ) -> list[int]:
        values = []
        host = self._host.get(instruction.name, ())
        arrays = instruction.arrays if arrays is None else arrays
        offset = len(instruction.arrays) - len(arrays)
        for i, array in enumerate(arrays):
            value = len(self._parent)
            self._parent.append(value)
            self._bytes.append(array.bytes)
            self._kind.append(kind)
            self._on_host.append(len(host) > i + offset and host[i + offset])
            self._place.append((instruction.name, i + offset))
            self._first.append(self._now)
            self._last.append(self._now)
            values.append(value)
        return values

    def _root(self, value: int) -> int:
        while self._parent[value] != value:
            self._parent[value] = self._parent[self._parent[value]]
            value = self._parent[value]
        return value

    def _join(self, kept: int, other: int) -> None:
        a, b = self._root(kept), self._root(other)
        if a == b:
            return
        if self._kind[b] in ("argument", "constant"):
            a, b = b, a
        self._parent[b] = a
        self._bytes[a] = max(self._bytes[a], self._bytes[b])

    def _touch(self, values: Iterable[int]) -> None:
        for value in values:
            self._last[value] = max(self._last[value], self._now)

    def _run(self, computation: str, parameters: Sequence[list[int]]) -> list[int]:
        """The values of the computation's result."""
        values: dict[str, list[int]] = {}
        started: dict[str, list[int]] = {}
        result: list[int] = []
        for each in self._module.computations.get(computation, {}).values():
            self._now += 1
            operands = [values.get(name, []) for name in each.operands]
            if each.opcode == "parameter":
                number = number_of(each)
                values[each.name] = parameters[number] if number < len(parameters) else self._new(each, "constant")
            elif each.opcode.endswith("-done"):
                values[each.name] = self._done(each, operands[0] if operands else [])
                self._touch([*started.get(each.operands[0] if each.operands else "", []), *values[each.name]])
            else:
                values[each.name] = self._value(each, operands)
                if each.opcode.endswith(("-start", "-update")):
                    started[each.name] = [value for some in operands for value in some]
            if each.opcode not in ("get-tuple-element", "tuple", "bitcast", "parameter", "while"):
                self._touch(value for some in operands for value in some)
            if each.root:
                result = values[each.name]
        self._now += 1
        self._touch(result)
        return result

    def _value(self, each: Instruction, operands: Sequence[list[int]]) -> list[int]:
        if each.opcode == "constant":
            return self._new(each, "constant")
        if each.opcode == "tuple":
            return [value for some in operands for value in some]
        if each.opcode == "get-tuple-element":
            index, of = index_of(each), operands[0] if operands else []
            # A tuple inside a tuple: all its arrays live as long as one of them.
            return [of[index]] if len(each.arrays) == 1 and index < len(of) else of
        if each.opcode in _ALIASES:
            return operands[0] if operands else []
        if each.opcode == "while":
            return self._loop(each, operands[0] if operands else [])
        if each.opcode == "conditional":
            results = [self._run(branch, [part]) for branch, part in zip(each.calls, operands[1:], strict=False)]
            for other in results[1:]:
                for a, b in zip(results[0], other, strict=False):
                    self._join(a, b)
            return results[0] if results else self._new(each)
        if each.opcode in ("call", "async-start") and each.calls:
            return self._run(each.calls[0], operands)
        if each.opcode.endswith("-start"):
            return self._start(each, operands)
        values = self._new(each)
        self._share(each, operands, values)
        return values

    def _loop(self, each: Instruction, carry: list[int]) -> list[int]:
        """The carry is one piece of memory, but holds nothing from an iteration's last read to its result."""
        body, condition = (re.search(rf"\b{key}=%?([\w.\-]+)", each.text) for key in ("body", "condition"))
        self._touch(carry)
        inside = self._new(each)
        if condition:
            self._run(condition[1], [inside])
        after = self._run(body[1], [inside]) if body else inside
        self._now += 1
        results = self._new(each)
        for same in zip(carry, inside, after, results, strict=False):
            for other in same[1:]:
                self._join(same[0], other)
        return results

    def _start(self, each: Instruction, operands: Sequence[list[int]]) -> list[int]:
        """Results of an asynchronous operation: without its operands, which its type lists, too."""
        given = [value for some in operands for value in some]
        if each.opcode == "copy-start":
            return self._new(each)[:1]
        if each.opcode == "all-reduce-start":
            return self._new(each)
        return self._new(each, arrays=each.arrays[len(given) :] or each.arrays)

    def _done(self, each: Instruction, started: list[int]) -> list[int]:
        return started[: len(each.arrays)] or self._new(each)

    def _share(self, each: Instruction, operands: Sequence[list[int]], values: list[int]) -> None:
        """Joins results with operands in whose memory they are written."""
        aliased = _braces(each.text, "output_to_operand_aliasing=")
        for result, operand, index in _ALIASED_RESULT.findall(aliased):
            i, leaf = (int((found or "0").split(",")[0]) for found in (result, index))
            if i < len(values) and int(operand) < len(operands) and leaf < len(operands[int(operand)]):
                self._join(operands[int(operand)][leaf], values[i])
        if each.opcode in ("dynamic-update-slice", "scatter") and operands and operands[0]:
            self._join(operands[0][0], values[0])
        shared = set(range(len(operands))) if each.opcode in _ELEMENTWISE else set()
        if each.opcode == "fusion" and each.calls:
            inside = self._module.computations.get(each.calls[0], {})
            for i, parameter in updated_in_place(inside).items():
                if i < len(values) and parameter < len(operands) and operands[parameter]:
                    self._join(operands[parameter][0], values[i])
            # XLA shares no array of a tuple so.
            whole = [name in self._whole for name in each.operands]
            shared = {i for i in range(len(operands)) if whole[i] and _read_elementwise(inside, i)}
        for i in shared:
            if len(operands[i]) == 1:
                self._may_share += [(self._now, value, operands[i][0]) for value in values]


def _read_elementwise(inside: dict[str, Instruction], number: int) -> bool:
    """Whether a fusion reads element i of this operand only for element i of its result."""
    tainted: set[str] = set()
    for each in inside.values():
        if each.opcode == "parameter":
            tainted |= {each.name} if number_of(each) == number else set()
        elif not tainted.isdisjoint(each.operands):
            if each.opcode not in _ELEMENTWISE and each.opcode not in ("bitcast", "tuple"):
                return False
            tainted.add(each.name)
    return bool(tainted)


def _merged(times: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for first, last in sorted(times):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def updated_in_place(inside: dict[str, Instruction]) -> dict[int, int]:
    """For a fusion: which of its results is an operand with some elements replaced, and which operand."""
    roots = [each for each in inside.values() if each.root]
    if not roots:
        return {}
    parts = [inside.get(name) for name in roots[0].operands] if roots[0].opcode == "tuple" else roots
    found = {}
    for i, part in enumerate(parts):
        part = _through(part, inside, ("bitcast",))
        if part is None or part.opcode not in ("dynamic-update-slice", "scatter") or not part.operands:
            continue
        updated = _through(inside.get(part.operands[0]), inside, ("bitcast", "reshape"))
        if updated is not None and updated.opcode == "parameter":
            found[i] = number_of(updated)
    return found


def _through(each: Instruction | None, inside: dict[str, Instruction], opcodes: Sequence[str]) -> Instruction | None:
    while each is not None and each.opcode in opcodes and each.operands:
        each = inside.get(each.operands[0])
    return each


def index_of(each: Instruction) -> int:
    """Of a get-tuple-element."""
    found = re.search(r"\bindex=(\d+)", each.text)
    return int(found[1]) if found else 0


def number_of(parameter: Instruction) -> int:
    found = re.match(r"\s*(\d+)", parameter.text)
    return int(found[1]) if found else 0


def _braces(text: str, key: str) -> str:
    """What stands between the braces behind the key."""
    start = text.find(key)
    if start < 0:
        return ""
    depth = 0
    for i in range(start + len(key), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if not depth:
            return text[start + len(key) + 1 : i]
    return ""


def _on_host(text: str) -> dict[str, tuple[bool, ...]]:
    """For instructions with results in host memory: which ones."""
    found = {}
    for line in text.splitlines():
        if "S(5)" not in line or " = " not in line:
            continue
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        shapes = re.split(r" [a-z][a-z\-0-9]*\(", rest, maxsplit=1)[0]
        found[name.removeprefix("%")] = tuple("S(5)" in layout for _, layout in _HOST_ARRAY.findall(shapes))
    return found
