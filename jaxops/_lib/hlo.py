"""The instructions of a compiled program, read from its HLO text."""

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*?)\)(?=, [a-z]|$)(.*)$", re.MULTILINE)
_OPERAND = re.compile(r"(?:^|, )(?:([^%]*) )?%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_HOST = "S(5)"  # host memory in a layout
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%\S+)")
_KINDS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


class Array(NamedTuple):
    """An array type: "bf16", its sizes, and whether it is in host memory."""

    kind: str
    dims: tuple[int, ...]
    on_host: bool = False

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
    """One line of HLO: `name = type opcode(operands), attributes`. An operand is its type (empty in `as_text()`) and
    name."""

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
        Array(kind, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size), _HOST in layout)
        for kind, sizes, layout in _ARRAY.findall(type_text)
    ]


class Module:
    """A compiled program.

    Attributes:
      name: such as "jit_step".
      head: what stands before the first computation.
      texts: of the computations, by name; called ones before their callers.
      computations: their instructions, by name, in order.
      instructions: of all computations, by name.
    """

    def __init__(self, text: str):
        header = re.search(r"^HloModule ([\w.\-<>]+)", text, re.MULTILINE)
        self.name, self.head = header[1] if header else "", text.partition("{\n")[0]
        self.texts = {each[1]: each[0] for each in _COMPUTATION.finditer(text)}
        self.computations = {
            name: [_instruction(line) for line in _LINE.finditer(text)] for name, text in self.texts.items()
        }
        self.instructions = {each.name: each for inside in self.computations.values() for each in inside}

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """All instructions of the computations that it runs, those that they run included."""
        lines = [each for name in instruction.calls for each in self.computations.get(name, ())]
        return lines + [each for line in lines for each in self.inner(line)]


def _instruction(line: re.Match[str]) -> Instruction:
    name, result, opcode, operands, attributes = line.groups()
    return Instruction(name, result, opcode, _OPERAND.findall(operands), attributes, line[0].strip())


def module_of(executable: Any) -> Module:
    """Of a program as `compiled.runtime_executable()` or the backend's `live_executables()` give it."""
    options = _hlo.HloPrintOptions()
    options.print_operand_shape = True
    return Module(executable.hlo_modules()[0].to_string(options))
