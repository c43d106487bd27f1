"""Where in a model an instruction comes from: the path that JAX gives it and XLA keeps as `op_name`."""

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax

from jaxops._lib.hlo import Instruction, Module

_WRAPPED = re.compile(r"([\w.\-]+)\((.*)\)$")
# Parts of a path that are transformations and calls, not the user's names.
# fmt: off
_CALLS = frozenset((
    "while", "body", "cond", "closed_call", "eval_jaxpr", "scan", "pallas_call", "triton_kernel_call",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "core_call", "named_call", "shard_map",
    "custom_partitioning", "xla_call",
))
# fmt: on
_RECOMPUTED = "rematted_computation"
_CHECKPOINT = ("checkpoint", "remat", "remat2", _RECOMPUTED)
Stage = Literal["forward", "backward", "recomputed", "other"]


class Scope(NamedTuple):
    """A place in the model.

    Attributes:
      path: named scopes, outermost first.
      primitive: JAX's, such as "dot_general".
      stage: "recomputed": computed a second time, for `jax.checkpoint`; "other": not part of a gradient.
    """

    path: tuple[str, ...] = ()
    primitive: str = ""
    stage: Stage = "other"

    def __str__(self) -> str:
        return "/".join(self.path)


@functools.lru_cache(maxsize=100_000)
def scope_of(op_name: str) -> Scope:
    """Reads HLO's `op_name`, such as "jit(step)/transpose(jvp(decoder))/mlp/dot_general"."""
    parts = _split(op_name.partition(";")[0])  # XLA joins the names of instructions that it merges
    path: list[str] = []
    wrappers: set[str] = set()
    for part in parts[:-1]:
        is_call = False
        while wrapped := _WRAPPED.fullmatch(part):
            # jit(f) names a function: a call, unless it stands around a scope, as in jvp(jit(f)).
            is_call |= wrapped[1] in ("jit", "pjit")
            wrappers.add(wrapped[1])
            part = wrapped[2]
        if part in _CHECKPOINT:
            wrappers.add(part)
            path = _once(path)
        elif part and not is_call and part not in _CALLS and not part.startswith("branch_"):
            path += part.split("/")
    # A recomputation stands inside the backward's path, but computes the forward.
    stage: Stage = "forward" if "jvp" in wrappers else "other"
    stage = "recomputed" if _RECOMPUTED in wrappers else "backward" if "transpose" in wrappers else stage
    return Scope(tuple(_once(path)), parts[-1], stage)


def _once(path: list[str]) -> list[str]:
    """Without the repetition that a gradient through `jax.checkpoint` has: its path starts once more at the root."""
    half = len(path) // 2
    return path[half:] if path[:half] == path[half:] else path


def _split(op_name: str) -> list[str]:
    """The parts between slashes, except those inside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(op_name):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(op_name[start:i])
            start = i + 1
    return [*parts, op_name[start:]]


def scopes_of(module: Module) -> Callable[[Instruction], Scope]:
    """instruction -> where in the model it comes from; of a fusion that has no scope, the commonest scope inside.

    Without named scopes the path has the classes whose `__call__` was running, as far as XLA knows the stack.
    """
    classes = _classes(module.head)

    def own(instruction: Instruction) -> Scope:
        scope = scope_of(instruction.text("op_name"))
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        return scope if scope.path or not frame else scope._replace(path=classes.get(int(frame[1]), ()))

    def scope(instruction: Instruction) -> Scope:
        if (outer := own(instruction)).path:
            return outer
        inner = collections.Counter(each for inside in module.inner(instruction) if (each := own(inside)).path)
        return inner.most_common(1)[0][0] if inner else outer

    return scope


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


@contextlib.contextmanager
def own_metadata() -> Iterator[None]:
    """Programs compiled inside are not taken from JAX's cache on disk with the names of another source."""
    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, key)
    jax.config.update(key, True)
    try:
        yield
    finally:
        jax.config.update(key, before)
