"""Which HLO instruction computes a value that `jax.ad_checkpoint.checkpoint_name` names.

A name leaves no trace in the compiled program. But the equation that produces the named value has a primitive, a place
in the source (file, line and column, with its callers) and an element type and count, and XLA keeps the first two in
the metadata of the instructions that it makes of the equation.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend import core

from jaxops.profiling.hlo import Array, Instruction, Module
from jaxops.profiling.liveness import index_of, number_of
from jaxops.profiling.scopes import scope_of

Frame: TypeAlias = tuple[str, int, int]  # file, line, column
# Primitives whose result has the operand's elements: a name covers what is before them, too.
_PASSES_ON = (
    "reduce_precision",
    "convert_element_type",
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "name",
)
_HLO_PASSES_ON = ("bitcast", "copy", "reshape", "transpose", "reduce-precision", "convert", "copy-done", "copy-start")
_WORDS = {"bfloat16": "bf16", "bool": "pred", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


@dataclasses.dataclass(frozen=True)
class _Around:
    """The equations around a jaxpr: their scopes, and where they stand in the source."""

    stack: str = ""
    frames: tuple[Frame, ...] = ()


@dataclasses.dataclass(eq=False)
class _Value:
    """A result of an equation, and the names that it gets.

    `frames` are the equation's own, `around` those of the calls around it. `before`: what it has its elements from.
    """

    primitive: str
    frames: tuple[Frame, ...]
    around: tuple[Frame, ...]
    stage: str
    index: int
    results: int
    dtypes: set[str]
    size: int
    names: set[str] = dataclasses.field(default_factory=set)
    before: "tuple[_Value, ...]" = ()


@dataclasses.dataclass(frozen=True)
class Match:
    """Names of a value: none, one that is certain, or several of which one may be right (None: it has no name)."""

    names: frozenset[str | None]

    @property
    def certain(self) -> bool:
        return len(self.names) == 1 and None not in self.names


class NamedValues:
    """All values of a jaxpr, to be looked up by HLO instructions.

    Args:
      jaxpr: of the jitted function.
      text, module: the compiled program.
      devices: over which its arrays may be sharded.
    """

    def __init__(self, jaxpr: core.ClosedJaxpr, text: str, module: Module, devices: int = 1):
        self._module, self._devices = module, devices
        self._frames = stack_frames(text)
        self._files = {file for frames in self._frames.values() for file, _, _ in frames}
        self._by_primitive: dict[str, list[_Value]] = {}
        self._walk(jaxpr.jaxpr, [None] * len(jaxpr.jaxpr.invars), _Around())
        # Without line numbers in the program, as after a load from some caches, nothing can be matched.
        self.readable = bool(self._files)
        self.names = {name for values in self._by_primitive.values() for value in values for name in value.names}

    def match(self, place: tuple[str, int]) -> Match:
        """The names of the value that an instruction computes, or whose elements it passes on or stacks."""
        possible: set[str | None] = set()
        for instruction, leaf in contents(self._module, place):
            names = self._names(instruction, leaf)
            if names - {None}:
                return Match(frozenset(names))
            possible |= names
        return Match(frozenset(possible - {None}))

    def _names(self, instruction: Instruction, leaf: int) -> set[str | None]:
        if not instruction.op_name or leaf >= len(instruction.arrays):
            return set()
        scope = scope_of(instruction.op_name)
        if scope.stage == "recomputed":
            return set()
        found = re.search(r"\bstack_frame_id=(\d+)", instruction.text)
        frames = self._frames.get(int(found[1]), ()) if found else ()
        values = [
            value
            for value in self._by_primitive.get(scope.primitive, ())
            if value.stage == scope.stage
            # XLA keeps the order of a kernel's results, but not of a loop's.
            and (instruction.opcode != "custom-call" or value.results == 1 or value.index == leaf)
            and self._same(value, instruction.arrays[leaf])
            and frames
            and _agree(value.frames, frames)
        ]
        # A function that is traced once, such as jnp.sort, has its first call's frames; XLA appends those of each call.
        values = [value for value in values if _agree(value.frames + value.around, frames)] or values
        return {name for value in values for name in (value.names or {None})}

    def _same(self, value: _Value, array: Array) -> bool:
        parts = [1] if self._devices == 1 else [n for n in range(1, self._devices + 1) if self._devices % n == 0]
        return array.dtype in value.dtypes and value.size in {array.size * n for n in parts}

    def _walk(self, jaxpr: Any, given: Sequence["_Value | None"], around: _Around) -> "list[_Value | None]":
        """Visits all equations; results are those of the jaxpr's outputs."""
        values: dict[Any, _Value | None] = dict(zip(jaxpr.invars, given, strict=True))

        def of(var: Any) -> _Value | None:
            return values.get(var) if isinstance(var, core.Var) else None

        for eqn in jaxpr.eqns:
            frames = _frames_of(eqn.source_info.traceback, self._files)
            stack = "/".join(filter(None, (around.stack, str(eqn.source_info.name_stack))))
            inside = _Around(stack, frames + around.frames)
            if eqn.primitive.name == "name":
                _give_name(of(eqn.invars[0]), eqn.params["name"], _dtype(eqn.outvars[0].aval))
                values[eqn.outvars[0]] = of(eqn.invars[0])
            elif eqn.primitive.name == "scan":
                values |= zip(eqn.outvars, self._scan(eqn, [of(var) for var in eqn.invars], inside), strict=True)
            elif inner := self._call(eqn, [of(var) for var in eqn.invars], inside):
                values |= zip(eqn.outvars, inner, strict=True)
            else:
                for each in core.jaxprs_in_params(eqn.params):
                    self._walk(each, [None] * len(each.invars), inside)
                before = of(eqn.invars[0]) if eqn.primitive.name in _PASSES_ON else None
                for value in (made := self._made(eqn, frames, _Around(stack, around.frames), before)):
                    self._by_primitive.setdefault(value.primitive, []).append(value)
                values |= zip(eqn.outvars, made, strict=True)
        return [of(var) for var in jaxpr.outvars]

    def _call(self, eqn: Any, given: "Sequence[_Value | None]", around: _Around) -> "list[_Value | None] | None":
        """The results of an equation that only calls a jaxpr; None for others."""
        inner = list(core.jaxprs_in_params(eqn.params))
        if eqn.primitive.name in ("while", "cond", "shard_map", "pallas_call") or len(inner) != 1:
            return None
        if (len(inner[0].invars), len(inner[0].outvars)) != (len(eqn.invars), len(eqn.outvars)):
            return None
        return self._walk(inner[0], given, around)

    def _scan(self, eqn: Any, given: "Sequence[_Value | None]", around: _Around) -> "list[_Value | None]":
        body: Any = next(iter(core.jaxprs_in_params(eqn.params)))
        # Each JAX states their numbers in its own way. Slices and stacks have one axis less inside.
        sliced = sum(a.aval.ndim != b.aval.ndim for a, b in zip(eqn.invars, body.invars, strict=True))
        carries = sum(a.aval.ndim == b.aval.ndim for a, b in zip(eqn.outvars, body.outvars, strict=True))
        consts = len(eqn.invars) - sliced - carries
        # Names that the body gives its carry are names of what the iteration before computes.
        carry = [_Value("", (), (), "", 0, 1, set(), 0) for _ in range(carries)]
        slices = [None] * (len(given) - consts - carries)
        results = self._walk(body, [*given[:consts], *carry, *slices], around)
        for start, of, after in zip(carry, given[consts:], results, strict=False):
            for name in start.names:
                for value in (of, after):
                    if value is not None and value is not start:
                        for dtype in start.dtypes:
                            _give_name(value, name, dtype)
        return [None if value is not None and not value.primitive else value for value in results]

    def _made(self, eqn: Any, frames: tuple[Frame, ...], around: _Around, before: "_Value | None") -> list[_Value]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        stage = scope_of(f"{around.stack}/{name}").stage
        return [
            _Value(
                name, frames, around.frames, stage, i, count, {_dtype(var.aval)}, getattr(var.aval, "size", 0),
                before=(before,) if before is not None else (),
            )
            for i, var in enumerate(eqn.outvars)
        ]  # fmt: skip


def _agree(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """Whether both call stacks are equal as far as both reach."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _give_name(value: _Value | None, name: str, dtype: str) -> None:
    while value is not None:
        # Before a convert, only what XLA fuses with it has the named value's elements.
        value.dtypes = value.dtypes | {dtype} if value.names else {dtype}
        value.names.add(name)
        value = value.before[0] if value.before and value.before[0].size == value.size else None


def _dtype(aval: Any) -> str:
    """In XLA's words."""
    name = str(getattr(aval, "dtype", ""))
    found = re.fullmatch(r"(float|int|uint|complex)(\d+)", name)
    letters = {"float": "f", "int": "s", "uint": "u", "complex": "c"}
    return letters[found[1]] + found[2] if found else _WORDS.get(name, name)


def _frames_of(traceback: Any, files: set[str]) -> tuple[Frame, ...]:
    """Innermost first, only of these files."""
    if traceback is None:
        return ()
    found = []
    for code, instruction in zip(*traceback.raw_frames(), strict=True):
        if code.co_filename in files:
            line, column, _, _ = type(traceback).code_addr2location(code, instruction)
            found.append((code.co_filename, line, column))
    return tuple(found)


def stack_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """The tables before the first computation of `compiled.as_text()`: call stacks by number, innermost first."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.*)$", line):
            table[int(found[1])] = found[2]

    def of(line: str, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", line)
        return int(found[1]) if found else 0

    files = {i: name.strip('"') for i, name in tables.get("FileNames", {}).items()}
    places = {
        i: (files.get(of(line, "file_name_id"), ""), of(line, "line"), of(line, "column"))
        for i, line in tables.get("FileLocations", {}).items()
    }
    stacks: dict[int, tuple[Frame, ...]] = {}
    for i, line in sorted(tables.get("StackFrames", {}).items()):
        # A parent has a smaller number; the text has it plus one, so that a root is its own parent or 1.
        place = places.get(of(line, "file_location_id"))
        stacks[i] = () if place is None else (place, *stacks.get(of(line, "parent_frame_id") - 1, ()))
    return stacks


def contents(module: Module, place: tuple[str, int]) -> list[tuple[Instruction, int]]:
    """The instruction at a place, and those that computed the elements it only passes on or writes into a stack.

    Looks into fusions, and from a loop's carry to the end of the iteration before.
    """
    name, leaf = place
    if name not in module.instructions:
        return []
    each, inside = module.instructions[name]
    outside: list[tuple[Instruction, dict[str, Instruction]]] = []  # the fusions around `inside`
    found = [(each, leaf)]
    before = False  # in the iteration before
    for _ in range(100):
        following = ""
        if each.opcode == "fusion" and each.calls and each.calls[0] in module.computations:
            outside.append((each, inside))
            inside = module.computations[each.calls[0]]
            following, leaf = _part(_root(inside), leaf)
        elif each.opcode == "parameter" and outside:
            around, inside = outside.pop()
            following, leaf = _operand(around, number_of(each)), 0
        elif each.opcode == "get-tuple-element":
            leaf = index_of(each)
            of = inside.get(_operand(each, 0))
            if of is None or of.opcode != "parameter":
                following = _operand(each, 0)
            elif not before and inside is not module.computations.get(module.entry):
                before, (following, leaf) = True, _part(_root(inside), leaf)
        elif each.opcode == "dynamic-update-slice":
            following, leaf = _operand(each, 1), 0
        elif each.opcode in _HLO_PASSES_ON:
            following, leaf = _operand(each, 0), 0
        if following not in inside:
            break
        each = inside[following]
        found.append((each, leaf))
    return found


def _root(inside: dict[str, Instruction]) -> Instruction | None:
    return next((each for each in inside.values() if each.root), None)


def _part(root: Instruction | None, leaf: int) -> tuple[str, int]:
    """The instruction whose result a computation has as its leaf-th, and which of its arrays."""
    if root is None:
        return "", 0
    return (_operand(root, leaf), 0) if root.opcode == "tuple" else (root.name, leaf)


def _operand(each: Instruction, index: int) -> str:
    return each.operands[index] if index < len(each.operands) else ""
