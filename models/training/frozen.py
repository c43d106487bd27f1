"""Parameters that a training leaves as they are, by patterns of their names."""

import re
from collections.abc import Sequence

import jax
from flax import nnx

from models.training.terminal import first_of

NAMED = 20  # parameters, in one error


def name_of_parameter(path: tuple) -> str:
    """As in "blocks/attention/q/kernel"; layers are stacked, so that a name is of all layers."""
    return "/".join(map(str, path))


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the regular expressions matches a part of the name."""
    return any(re.search(pattern, name) for pattern in patterns)


def split(params: nnx.State, patterns: Sequence[str]) -> tuple[nnx.State, nnx.State]:
    """(trained, frozen) parameters."""
    if not patterns:
        return params, nnx.State({})
    trained, frozen = nnx.split_state(params, lambda path, _: not is_frozen(name_of_parameter(path), patterns), ...)
    return trained, frozen


def joined(params: nnx.State, trained: nnx.State) -> nnx.State:
    """All parameters, with those of `trained` in place of their own."""
    return nnx.merge_state(params, trained)


def check(params: nnx.State, patterns: Sequence[str]) -> None:
    """Refuses patterns that are no regular expression, match no parameter, or leave none to train."""
    names = [name_of_parameter(path) for path, _ in nnx.to_flat_state(params)]
    shown = first_of(names, NAMED)
    for pattern in patterns:
        try:
            found = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(f"freeze {pattern!r} is no regular expression: {error}.") from error
        if not found:
            raise ValueError(f"freeze {pattern!r} matches no parameter; these are {shown}.")
    if patterns and all(is_frozen(name, patterns) for name in names):
        raise ValueError(f"freeze {list(patterns)} leaves no parameter to train; these are {shown}.")


def remark(params: nnx.State, patterns: Sequence[str]) -> str:
    """The line about how much is frozen, with its line break; empty for nothing."""
    if not patterns:
        return ""
    frozen, whole = (sum(x.size for x in jax.tree.leaves(part)) for part in (split(params, patterns)[1], params))
    return f"{frozen:,} of {whole:,} parameters are frozen\n"
