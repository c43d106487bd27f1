"""Where in a model an instruction comes from: JAX's named scopes, and the paths of nnx modules, which have none."""

import contextlib
import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import jax

from jaxops._lib.planning import jit_keys

_WRAPPED = re.compile(r"([\w.\-]+)\((.*)\)$")
# Parts of a path that are transformations and calls, not the user's or a module's names.
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


@dataclasses.dataclass(frozen=True)
class Scope:
    """A place in the model.

    Attributes:
      path: named scopes and modules, outermost first.
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
    """Reads HLO's `op_name`, such as "jit(step)/transpose(jvp(Decoder))/mlp/dot_general"."""
    parts = _split(op_name.partition(";")[0])  # XLA joins the names of instructions that it merges
    path: list[str] = []
    wrappers: set[str] = set()
    for part in parts[:-1]:
        is_call = False
        while found := _WRAPPED.fullmatch(part):
            # jit(f) names a function: a call, unless it stands around a scope, as in jvp(jit(f)).
            is_call |= found[1] in ("jit", "pjit")
            wrappers.add(found[1])
            part = found[2]
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


def scoped() -> contextlib.AbstractContextManager[None]:
    """Calls inside take the programs that were traced inside `module_scopes`."""
    return jit_keys.scopes_named(True)


@contextlib.contextmanager
def module_scopes() -> Iterator[None]:
    """Functions traced inside have a named scope for each call of an nnx module: the path of attributes that lead to it
    from the module around it, or its class.

    Functions that were compiled before are traced and compiled again: scopes are part of the program. They come from
    JAX's cache on disk only with their own names and line numbers. flax is not imported; without it there are no paths.
    """
    nnx = sys.modules.get("flax.nnx")
    with contextlib.nullcontext() if nnx is None else _patched(nnx.Module), scoped(), _own_metadata():
        yield


@contextlib.contextmanager
def _own_metadata() -> Iterator[None]:
    """Programs compiled inside are not taken from JAX's cache on disk with the names of another source."""
    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, key)
    jax.config.update(key, True)
    try:
        yield
    finally:
        jax.config.update(key, before)


_stack = threading.local()
_lock = threading.Lock()


@contextlib.contextmanager
def _patched(base: type) -> Iterator[None]:
    """`__call__` of all subclasses of `base` opens a scope, in threads that trace inside `module_scopes`."""
    with _lock:
        originals = {each: each.__dict__["__call__"] for each in _subclasses(base) if "__call__" in each.__dict__}
        for each, original in originals.items():
            each.__call__ = _with_scope(original)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with _lock:
            for each, original in originals.items():
                each.__call__ = original  # pyright: ignore[reportAttributeAccessIssue]


def _subclasses(base: type) -> set[type]:
    return {base}.union(*(_subclasses(each) for each in base.__subclasses__()))


def _with_scope(call: Any) -> Any:
    @functools.wraps(call)
    def scoped(self, *args, **kwargs):
        active: list = _stack.__dict__.setdefault("modules", [])
        if not jit_keys.scopes_named.value or (active and active[-1] is self):  # super().__call__ is the same module
            return call(self, *args, **kwargs)
        name = (_path(active[-1], self) if active else "") or type(self).__name__
        active.append(self)
        try:
            with jax.named_scope(name):
                return call(self, *args, **kwargs)
        finally:
            active.pop()

    return scoped


def _path(parent: Any, child: Any, depth: int = 3) -> str:
    """The attributes and indices that lead from one module to another; empty if none do."""
    if isinstance(parent, dict):
        items = parent.items()
    elif isinstance(parent, (list, tuple)):
        items = enumerate(parent)
    else:
        items = getattr(parent, "__dict__", {}).items()
    items = [(str(name), value) for name, value in items if not str(name).startswith("_pytree")]
    for name, value in items:
        if value is child:
            return name
    for name, value in items if depth else ():
        is_container = isinstance(value, (dict, list, tuple)) or type(value).__module__.startswith("flax.nnx")
        if is_container and (rest := _path(value, child, depth - 1)):
            return f"{name}/{rest}"
    return ""
