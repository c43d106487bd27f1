"""The text of a compiled program, as instructions."""

import dataclasses
import functools
import math
import re

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_OPCODE = re.compile(r"([a-z][a-z\-0-9]*)\(")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_CALLED_MANY = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """An array type: "bf16" and its sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype) or int((re.findall(r"\d+", self.dtype) or ["0"])[0])
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      arrays: of its result; several for a tuple.
      operands: names.
      calls: names of the computations that it runs: a fusion's, a loop's body and condition.
      text: all behind the operands: attributes, metadata, and, cut off at 20,000 characters, the backend's settings.
      root: it is its computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    text: str
    root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's path of the primitive, through transformations and named scopes; empty if XLA dropped it."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1].replace("\\'", "'") if found else ""

    @functools.cached_property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    def numbers(self, key: str) -> tuple[int, ...]:
        """Of an attribute like `dimensions={0,1}`, or of `"key":["0","1"]` in the backend's settings."""
        found = re.search(rf'\b{key}"?[=:][{{\[]([\d,"]*)[}}\]]', self.text)
        return tuple(int(number) for number in re.findall(r"\d+", found[1])) if found else ()

    @functools.cached_property
    def estimate(self) -> tuple[int, int] | None:
        """FLOPs and bytes that a kernel of jaxops states (`jaxops._lib.planning.costs`)."""
        flops, moved = (re.search(rf'\bjaxops_{what}="(\d+)"', self.text) for what in ("flops", "bytes"))
        return (int(flops[1]), int(moved[1])) if flops and moved else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, each one's instructions in the order of the text, which is that of the
    schedule."""

    name: str
    computations: dict[str, dict[str, Instruction]]
    entry: str

    @functools.cached_property
    def instructions(self) -> dict[str, tuple[Instruction, dict[str, Instruction]]]:
        """By name: an instruction, and those of its computation."""
        return {name: (found, inside) for inside in self.computations.values() for name, found in inside.items()}

    @functools.cached_property
    def launched(self) -> dict[str, tuple[Instruction, dict[str, Instruction]]]:
        """As `instructions`, without those inside fusions and reductions: those that can launch a kernel."""
        inner = {
            called
            for each, _ in self.instructions.values()
            if each.opcode not in ("while", "conditional", "call", "async-start")
            for called in each.calls
        }
        return {
            name: (found, inside)
            for computation, inside in self.computations.items()
            if computation not in inner
            for name, found in inside.items()
        }


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    header = re.search(r"^HloModule ([\w.\-<>]+)", text, re.MULTILINE)
    computations: dict[str, dict[str, Instruction]] = {}
    inside, entry = None, ""
    for line in text.splitlines():
        if inside is None:
            if line.endswith("{") and (found := _HEADER.match(line)):
                inside = computations.setdefault(found[1], {})
                entry = found[1] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            inside = None
        elif (found := _LINE.match(line)) and (parsed := _instruction(found[1], found[2], "ROOT " in line[:12])):
            inside[found[1]] = parsed
    return Module(header[1] if header else "", computations, entry)


def _instruction(name: str, rest: str, root: bool) -> Instruction | None:
    shapes, behind = _split_type(rest)
    opcode = _OPCODE.match(behind)
    if opcode is None:
        return None
    end = _closing(behind, opcode.end() - 1)
    operands, text = behind[opcode.end() : end], behind[end + 1 :][:20_000]
    # A constant's "operand" is its value, a parameter's its number.
    named = () if opcode[1] in ("constant", "parameter", "iota") else _operands(operands)
    calls = [*_CALLED.findall(text)]
    for many in _CALLED_MANY.findall(text):
        calls += re.findall(r"[\w.\-]+", many)
    text = f"{operands} {text}" if opcode[1] == "parameter" else text
    return Instruction(name, opcode[1], arrays(shapes), named, tuple(calls), text, root)


def _operands(text: str) -> tuple[str, ...]:
    """Names: `%a, /*index=5*/%b`, or with types before them, `f32[2]{0} %a`."""
    text = re.sub(r"/\*.*?\*/", "", text)
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(word.split()[-1] for word in text.split(",") if word.strip())


def _split_type(rest: str) -> tuple[str, str]:
    """A result's type, and what follows."""
    if not rest.startswith("("):
        shapes, _, behind = rest.partition(" ")
        return shapes, behind
    end = _closing(rest, 0)
    return rest[: end + 1], rest[end + 2 :]


def _closing(text: str, opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(text)


def arrays(shapes: str) -> tuple[Array, ...]:
    """The array types in a result's type: one, or a tuple's."""
    return tuple(
        Array(kind, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(shapes)
    )
