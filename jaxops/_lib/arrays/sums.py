"""Sums whose parts several programs write."""

import functools

import jax
import jax.numpy as jnp


def sum_of_parts(parts: jax.Array) -> jax.Array:
    """parts [n, ...] added one after another: elementwise, so that XLA does it in the operation that reads the sum, and
    always in this order."""
    return functools.reduce(jnp.add, [parts[i] for i in range(parts.shape[0])])


def steps_of_part(steps: int, parts: int, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first step and the number of steps of part `number` of a sum of so many steps. A short sum's last parts have
    none."""
    each = -(-steps // parts)
    return number * each, jnp.clip(steps - number * each, 0, each)


def parts_of_sums(K: int, programs: int, cores: int, each: int = 5) -> int:
    """Into how many parts sums over K are split, a power of two, where reading K rows or columns takes the time.

    At most `each` programs a multiprocessor, and at most eight parts of at least 256 numbers. Sums of fewer than 1,024
    are whole: a second pass takes longer than it saves (H200, 2026-11-25, sums of 768, tiles of one row: 9.7 us in
    three parts, 8.4 whole).

    Args:
      programs: without a split.
    """
    most = min(8, K // 256, each * cores // max(1, programs)) if K >= 1024 else 1
    return 1 << max(1, most).bit_length() - 1
