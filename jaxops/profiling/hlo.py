"""The instructions of a compiled program: what launches a kernel, where in the model it stands, what it multiplies."""

import collections
import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

from jaxops.profiling.scopes import Scope, scope_of

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*?)\)(?=, [a-z]|$)(.*)$", re.MULTILINE)
_OPERAND = re.compile(r"(?:^|, )(.*?) %([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%\S+)")
_KINDS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


class Array(NamedTuple):
    """An array type: "bf16" and its sizes."""

    kind: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def dtype(self) -> str:
        """JAX's word, such as "bfloat16"."""
        if self.kind in ("pred", "bf16"):
            return {"pred": "bool", "bf16": "bfloat16"}[self.kind]
        return re.sub(r"^float8(?=e)", "float8_", _KINDS[self.kind[0]] + self.kind[1:])

    @property
    def bytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.dims))}]"


class Instruction(NamedTuple):
    """One line of HLO: `name = type opcode(operands), attributes`. An operand is its type and name."""

    name: str
    type: str
    opcode: str
    operands: list[tuple[str, str]]
    attributes: str
    line: str

    @property
    def calls(self) -> list[str]:
        """Names of the computations that it runs: a fusion's, a loop's body and condition."""
        return [name for names in _CALLED.findall(self.attributes) for name in re.findall(r"%([\w.\-]+)", names)]

    def text(self, attribute: str) -> str:
        """The value of an attribute between quotation marks; empty without it."""
        value = re.search(rf'\b{attribute}="((?:[^"\\]|\\.)*)"', self.attributes)
        return value[1].replace("\\'", "'") if value else ""


def arrays(type_text: str) -> list[Array]:
    """Those of an instruction's type; several for a tuple."""
    return [
        Array(kind, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(type_text)
    ]


class Module:
    """A compiled program.

    Attributes:
      name: such as "jit_step".
      instructions: of all computations, by name.
      texts: of the computations, by name; called ones before their callers.
      named_kernels: instructions by the kernels that XLA names after them.
    """

    def __init__(self, text: str):
        header = re.search(r"^HloModule ([\w.\-<>]+)", text, re.MULTILINE)
        self.name = header[1] if header else ""
        self.texts = {each[1]: each[0] for each in _COMPUTATION.finditer(text)}
        self._inside = {
            name: [_instruction(line) for line in _LINE.finditer(text)] for name, text in self.texts.items()
        }
        self.instructions = {each.name: each for inside in self._inside.values() for each in inside}
        self.named_kernels = {name.replace(".", "_"): name for name in self.instructions}
        self._classes = _classes(text.partition("{\n")[0])

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """All instructions of the computations that it runs, those that they run included."""
        lines = [each for name in instruction.calls for each in self._inside.get(name, ())]
        return lines + [each for line in lines for each in self.inner(line)]

    def scope(self, instruction: Instruction) -> Scope:
        """Where in the model it comes from; of a fusion that has no scope, the commonest scope inside.

        Without named scopes the path has the classes whose `__call__` was running, as far as XLA knows the stack.
        """
        own = self._own_scope(instruction)
        if own.path:
            return own
        inner = collections.Counter(scope for each in self.inner(instruction) if (scope := self._own_scope(each)).path)
        return inner.most_common(1)[0][0] if inner else own

    def _own_scope(self, instruction: Instruction) -> Scope:
        scope = scope_of(instruction.text("op_name"))
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        return scope if scope.path or not frame else scope._replace(path=self._classes.get(int(frame[1]), ()))


def _instruction(line: re.Match[str]) -> Instruction:
    name, result, opcode, operands, attributes = line.groups()
    return Instruction(name, result, opcode, _OPERAND.findall(operands), attributes, line[0].strip())


def module_of(executable: Any) -> Module:
    """Of a program as `compiled.runtime_executable()` or the backend's `live_executables()` give it."""
    options = _hlo.HloPrintOptions()
    options.print_operand_shape = True
    return Module(executable.hlo_modules()[0].to_string(options))


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
