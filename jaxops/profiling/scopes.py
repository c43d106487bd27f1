"""Where in a model an instruction comes from: the path that JAX gives it and XLA keeps as `op_name`."""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

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
