"""The lines of a compiled program's text, by name. What they cost is XLA's to say (`jaxops.profiling.costs`)."""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

from jaxops.profiling.scopes import Scope, scope_of

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_RUNS_LINES = ("while", "conditional", "call", "async-start")  # of what they call, each line may launch a kernel


class Array(NamedTuple):
    """An array type: "bf16" and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = {"pred": 8, "c64": 64, "c128": 128}.get(self.dtype) or int((re.findall(r"\d+", self.dtype) or ["0"])[0])
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    line: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Of the result; several for a tuple."""
        return tuple(
            Array(kind, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
            for kind, sizes in _ARRAY.findall(self.type)
        )

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs: a fusion's, a loop's body and condition."""
        return tuple(name for names in _CALLED.findall(self.attributes) for name in re.findall(r"%([\w.\-]+)", names))

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's path of the primitive, through transformations and named scopes; empty if XLA dropped it."""
        path = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return path[1].replace("\\'", "'") if path else ""

    @functools.cached_property
    def target(self) -> str:
        """Of a custom call."""
        target = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return target[1] if target else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, called ones before their callers, their text, and the classes of its calls
    by stack frame."""

    name: str
    computations: dict[str, dict[str, Instruction]]
    texts: dict[str, str]
    entry: str
    classes: dict[int, tuple[str, ...]]

    @functools.cached_property
    def instructions(self) -> dict[str, tuple[Instruction, dict[str, Instruction]]]:
        """By name: an instruction, and those of its computation."""
        return {name: (each, inside) for inside in self.computations.values() for name, each in inside.items()}

    @functools.cached_property
    def launched(self) -> dict[str, tuple[Instruction, dict[str, Instruction]]]:
        """As `instructions`, without those inside fusions and reductions: those that can launch a kernel."""
        fused = {
            called for each, _ in self.instructions.values() if each.opcode not in _RUNS_LINES for called in each.calls
        }
        outside = [inside for name, inside in self.computations.items() if name not in fused]
        return {name: (each, inside) for inside in outside for name, each in inside.items()}

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """All instructions of the computations that it runs, those that they run included."""
        lines = [each for name in instruction.calls for each in self.computations.get(name, {}).values()]
        return lines + [each for line in lines if line.calls for each in self.inner(line)]


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    header = re.search(r"^HloModule ([\w.\-<>]+)", text, re.MULTILINE)
    computations: dict[str, dict[str, Instruction]] = {}
    texts: dict[str, str] = {}
    entry = ""
    for computation in _COMPUTATION.finditer(text):
        name = computation[2]
        entry = name if computation[1] else entry
        texts[name] = computation[0]
        lines = (_LINE.match(line) for line in computation[3].splitlines())
        computations[name] = {line[2]: _instruction(line) for line in lines if line}
    head = text.partition("{\n")[0]
    return Module(header[1] if header else "", computations, texts, entry, _classes(head))


def _instruction(line: re.Match) -> Instruction:
    depth, end = 1, 0
    for bracket in re.finditer(r"[()]", line[5]):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            end = bracket.start()
            break
    operands, attributes = line[5][:end], line[5][end + 1 :]
    names = tuple(re.findall(r"%([\w.\-]+)", operands))
    attributes = f"{operands} {attributes}" if line[4] == "parameter" else attributes
    return Instruction(line[2], line[3], line[4], names, attributes, line[0].strip())


def scope_in(instruction: Instruction, module: Module) -> Scope:
    """Where in the model it comes from; of a fusion that has no scope, the commonest scope inside.

    Without named scopes the path has the classes whose `__call__` was running, as far as XLA knows the stack.
    """
    own = _own_scope(instruction, module)
    if own.path:
        return own
    inner = collections.Counter(scope for each in module.inner(instruction) if (scope := _own_scope(each, module)).path)
    return inner.most_common(1)[0][0] if inner else own


def _own_scope(instruction: Instruction, module: Module) -> Scope:
    scope = scope_of(instruction.op_name)
    frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
    return scope if scope.path or not frame else scope._replace(path=module.classes.get(int(frame[1]), ()))


def _classes(head: str) -> dict[int, tuple[str, ...]]:
    """By stack frame: classes whose `__call__` is on the stack, outermost first, from the tables before a program."""

    def rows(title: str) -> dict[int, str]:
        part = head.partition(f"\n{title}\n")[2].partition("\n\n")[0]
        return {int(number): row for number, row in re.findall(r"^(\d+) (.*)$", part, re.MULTILINE)}

    def number(row: str, key: str) -> int:
        value = re.search(rf"\b{key}=(\d+)", row)
        return int(value[1]) if value else 0

    functions, locations = rows("FunctionNames"), rows("FileLocations")
    classes: dict[int, tuple[str, ...]] = {}
    for frame, row in sorted(rows("StackFrames").items()):
        function = functions.get(number(locations.get(number(row, "file_location_id"), ""), "function_name_id"), "")
        outer = classes.get(number(row, "parent_frame_id") - 1, ())  # a root is its own parent
        name, is_call, _ = function.strip('"').partition(".__call__")
        classes[frame] = (*outer, name.split(".")[-1]) if is_call else outer
    return classes
