"""The peak of device memory that a compiled program needs, and what holds it."""

import collections
import dataclasses
import io
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxops.offload.reports import sizes
from jaxops.profiling import assignment, liveness
from jaxops.profiling.hlo import Instruction, Module, parse
from jaxops.profiling.named_values import Match, NamedValues, contents
from jaxops.profiling.protobuf_wire import WireError
from jaxops.profiling.scopes import Stage, module_scopes, scope_of

_ROWS = 15
_FAR = 0.01
_UNSEEN = ("parameter", "while", "tuple", "broadcast", "constant", "copy", "bitcast", "get-tuple-element", "iota")


@dataclasses.dataclass(frozen=True)
class Holder:
    """One piece of device memory at the peak.

    Attributes:
      kind: an argument (donated ones, too), a result in memory of its own, or a temporary.
      scope: where in the model its value is computed: modules, named scopes and the primitive, outermost first. Of an
        argument its path, such as "params['w']". Empty if XLA knows none.
      shape: as in HLO, "bf16[8,128]".
      stage: of the computation; None for arguments.
      name: given by `jax.ad_checkpoint.checkpoint_name`; None without a name, or if it is unknown or uncertain.
      maybe: of uncertain ones: the names between which the program's metadata do not decide. It may have none of them.
    """

    bytes: int
    kind: Literal["argument", "output", "temporary"]
    scope: str
    shape: str
    stage: Stage | None = None
    name: str | None = None
    maybe: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """The result of `memory`. Bytes are of one device.

    `peak_bytes` and `host_bytes` are `jaxops.offload.report`'s `device_bytes` and `host_bytes`.

    Attributes:
      peak_bytes: what XLA reserves: arguments, outputs and temporaries.
      argument_bytes, temporary_bytes: XLA's figures; temporaries with the gaps between them.
      output_bytes: of results that are not written into donated arguments.
      host_bytes: in host memory, of all three kinds.
      holders: what is live at the peak, largest first; empty if it is unknown.
      notes: how the holders and their names were found, and what is unknown.
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
        """`peak_bytes` less those of the holders: gaps, padding, tables of tuples. Negative where XLA places
        temporaries in memory that counts as an output's, or shares memory in a way that is not modelled."""
        return self.peak_bytes - sum(each.bytes for each in self.holders)

    def by_scope(self, depth: int | None = None) -> dict[str, int]:
        """Bytes of the holders by scope, largest first: by its first `depth` parts, or by all."""
        return _sums(
            (each.scope if depth is None else "/".join(each.scope.split("/")[:depth]), each) for each in self.holders
        )

    def by_name(self) -> dict[str | None, int]:
        """Bytes of the holders by residual name, largest first. Uncertain ones count as "gate or up?"; None is all that
        has no name."""
        return _sums((_name_of(each) or None, each) for each in self.holders)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"unexplained_bytes": self.unexplained_bytes}

    def __str__(self) -> str:
        from jaxops._lib.terminal import console

        text = io.StringIO()
        console(file=text, width=130, color_system=None).print(self.__rich__())
        return text.getvalue().rstrip()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts = (
            (self.argument_bytes, "arguments"),
            (self.output_bytes, "outputs"),
            (self.temporary_bytes, "temporaries"),
        )
        head = f"{_size(self.peak_bytes)} at the peak: " + ", ".join(f"{_size(size)} {what}" for size, what in parts)
        head += f"; {_size(self.host_bytes)} in host memory" if self.host_bytes else ""
        table = Table()
        for title, width in (("bytes", 9), ("share", 5)):
            table.add_column(title, justify="right", no_wrap=True, min_width=width)
        for title, width in (("kind", 9), ("stage", 10), ("residual", 10), ("shape", 18)):
            table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=width)
        table.add_column("computed in", overflow="ellipsis")

        def add(size: int, *cells: str) -> None:
            share = f"{size / self.peak_bytes:.1%}" if self.peak_bytes else ""
            table.add_row(_size(size), share, *map(Text, cells))

        alike = collections.Counter[Holder]()
        for each in self.holders:
            alike[dataclasses.replace(each, bytes=0)] += each.bytes
        count = collections.Counter(dataclasses.replace(each, bytes=0) for each in self.holders)
        rows = alike.most_common()
        for each, size in rows[:_ROWS]:
            shape = f"{count[each]} x {each.shape}" if count[each] > 1 else each.shape
            stage = "" if each.stage in (None, "other") else each.stage
            add(size, each.kind, stage, _name_of(each), shape, each.scope or "(unknown)")
        if rest := rows[_ROWS:]:
            pieces = sum(count[each] for each, _ in rest)
            add(sum(size for _, size in rest), "", "", "", "", f"{pieces} others")
        if self.holders:
            add(self.unexplained_bytes, "", "", "", "", _rest(self.unexplained_bytes))
        return Group(Text(head), *([table] if self.holders else []), *(Text(f"note: {note}") for note in self.notes))


def memory(step: Any, *args: Any, **kwargs: Any) -> Memory:
    """The peak of device memory that a step needs, and what holds it then.

    Nothing runs. `memory(step, *args)` compiles the step, and finds names of residuals: arguments may be
    `jax.ShapeDtypeStruct`s. `memory(compiled)` takes a compiled program, whose names are unknown.

    XLA reserves temporaries as one block, so the peak is the sum of arguments, outputs and that block: all figures are
    XLA's. Which temporaries are live at the peak follows from the schedule, or from XLA's heap trace where that is
    available; `notes` says which. `Memory.unexplained_bytes` compares the sum with XLA's figures.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> step = jax.jit(lambda w, x: jnp.tanh(x @ w) @ w)
      >>> found = jaxops.profiling.memory(step, jnp.ones((64, 64)), jnp.ones((64, 64)))
      >>> found.argument_bytes
      32768

    Args:
      step: a function from `jax.jit`, or `jax.jit(f).lower(*args).compile()`.
      args, kwargs: of the step; none for a compiled program.

    Raises:
      TypeError: step is neither, or a compiled program comes with arguments.
    """
    jaxpr, compiled = None, step
    if hasattr(step, "memory_analysis"):
        if args or kwargs:
            raise TypeError("memory takes a compiled program alone; pass arguments with the jitted function instead.")
    elif hasattr(step, "trace"):
        with module_scopes():
            traced = step.trace(*args, **kwargs)
            jaxpr, compiled = traced.jaxpr, traced.lower().compile()
    else:
        raise TypeError(f"memory needs a function from jax.jit or a compiled program, not {type(step).__name__}.")
    return memory_of(compiled, jaxpr)


def memory_of(compiled: Any, jaxpr: Any) -> Memory:
    """`memory` of a program and its jaxpr, or None: then names are unknown."""
    arguments, outputs, temporaries = sizes(compiled)
    text = compiled.as_text() or ""
    module = parse(text)
    notes: list[str] = []
    holders: list[Holder] = []
    if module.computations.get(module.entry):
        found, note = _pieces(compiled, module, text)
        notes.append(note)
        values = None if jaxpr is None else NamedValues(jaxpr, text, module, _devices(compiled))
        notes += _about_names(values)
        holders = [_holder(each, module, values) for each in found]
        if any(each.maybe for each in holders):
            notes.append("names with a question mark are uncertain: several values have the same origin and shape.")
    else:
        notes.append("the holders are unknown: this backend hands out no text of the compiled program.")
    return Memory(
        arguments + outputs + temporaries, arguments, outputs, temporaries, sum(sizes(compiled, "host_")),
        tuple(sorted(holders, key=lambda each: -each.bytes)), tuple(notes),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Piece:
    bytes: int
    kind: Literal["argument", "output", "temporary"]
    places: tuple[tuple[str, int], ...]


def _pieces(compiled: Any, module: Module, text: str) -> tuple[list[_Piece], str]:
    """What lives at the peak, and how that is known."""
    buffers = liveness.buffers(module, text)
    fixed = [
        _Piece(each.bytes, each.kind, each.places)
        for each in buffers
        if each.kind in ("argument", "output") and each.bytes and not each.on_host
    ]
    live = [_Piece(each.bytes, "temporary", each.places) for each in liveness.live_at_peak(buffers)]
    note = "temporaries at the peak follow from the schedule: XLA hands out no heap trace here."
    try:
        record = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
        held = assignment.live_at_peak(record or b"")
        rest = sum(sizes(compiled)) - sum(each.bytes for each in fixed + live)
        # A profile takes longer, so only where the schedule does not explain XLA's figures.
        if held is None and abs(rest) > _FAR * sum(sizes(compiled)) and jax.default_backend() != "cpu":
            held = assignment.live_at_peak(assignment.from_profile(module))
    except WireError as error:
        return (
            fixed + live,
            f"temporaries at the peak follow from the schedule: XLA's heap trace is unreadable ({error})",
        )
    if held is None:
        return fixed + live, note
    # The trace does not say what passes a buffer on.
    known = {place: each.places for each in buffers for place in each.places}
    live = []
    for each in held:
        places = dict.fromkeys((*each.places, *(place for held in each.places for place in known.get(held, ()))))
        live.append(_Piece(each.bytes, "temporary", tuple(places)))
    return fixed + live, "temporaries at the peak are those of XLA's heap trace."


def _about_names(values: NamedValues | None) -> list[str]:
    if values is None:
        return ["names of residuals are unknown: pass the jitted function and its arguments instead."]
    if not values.names:
        return ["no value of the step has a name (jax.ad_checkpoint.checkpoint_name)."]
    if not values.readable:
        return ["names of residuals are unknown: the compiled program does not say which lines it comes from."]
    return []


def _holder(piece: _Piece, module: Module, values: NamedValues | None) -> Holder:
    match = Match(frozenset())
    if values is not None and piece.kind != "argument":
        # Memory that holds several values in turn: a stack and what it starts with, an update and what it updates.
        matches = [found for place in piece.places if (found := values.match(place)).names]
        match = next((found for found in matches if found.certain), matches[0] if matches else match)
    seen = _origin(piece, module)
    if seen is None:
        return Holder(piece.bytes, piece.kind, "", _shape(piece, module))
    if piece.kind == "argument":
        return Holder(piece.bytes, piece.kind, seen.op_name or seen.name, _shape(piece, module))
    scope = scope_of(seen.op_name)
    certain = match.certain
    return Holder(
        piece.bytes, piece.kind, "/".join(filter(None, (*scope.path, scope.primitive))), _shape(piece, module),
        scope.stage,
        next(iter(match.names)) if certain else None,
        () if certain else tuple(sorted(filter(None, match.names))),
    )  # fmt: skip


def _origin(piece: _Piece, module: Module) -> Instruction | None:
    """The instruction that describes the memory best."""
    chains = [contents(module, place) for place in piece.places]
    if piece.kind == "argument":
        return next((each for chain in chains for each, _ in chain if each.opcode == "parameter"), None)
    # What fills a stack says more than what it starts with.
    chains.sort(key=lambda chain: bool(chain) and chain[-1][0].opcode in _UNSEEN)
    return next((each for chain in chains for each, _ in chain[::-1] if each.op_name), None)


def _shape(piece: _Piece, module: Module) -> str:
    for name, leaf in piece.places:
        arrays = module.instructions[name][0].arrays if name in module.instructions else ()
        if leaf < len(arrays) and arrays[leaf].bytes == piece.bytes:
            return str(arrays[leaf])
    return ""


def _devices(compiled: Any) -> int:
    try:
        return max((len(each.device_set) for each in _shardings(compiled)), default=1)
    except (AttributeError, TypeError):
        return 1


def _shardings(compiled: Any) -> Sequence[Any]:
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _sums(pairs: Any) -> dict[Any, int]:
    found = collections.Counter()
    for key, each in pairs:
        found[key] += each.bytes
    return dict(found.most_common())


def _name_of(holder: Holder) -> str:
    return holder.name or (" or ".join(holder.maybe) + "?" if holder.maybe else "")


def _rest(size: int) -> str:
    return "not explained: gaps, padding" if size >= 0 else "counted twice: temporaries that share memory with others"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
