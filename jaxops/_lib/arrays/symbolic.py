"""Sizes that `jax.export` leaves open, such as the number of tokens."""

from typing import Any

import jax


def is_symbolic(size: Any) -> bool:
    """Whether it is a size of `jax.export.symbolic_shape`, and not a number."""
    return jax.export.is_symbolic_dim(size)


def below(size: Any, limit: int) -> bool:
    """size < limit. A symbolic size counts as below: whoever calls the exported program keeps the limit."""
    return is_symbolic(size) or size < limit


def least(limit: int, size: Any) -> int:
    """min(limit, size), or the limit where the size is symbolic."""
    return limit if is_symbolic(size) else min(limit, size)
