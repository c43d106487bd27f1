"""Whether a device has room for a step, before it starts: where one of several devices has none, the others wait for it
in the step's first collective.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import harness
from jaxops.offload.reports import needed_bytes, sizes

RESULTS = 2e9  # bytes, more than a step's results: the allocator places those of the first step before its temporaries


def demand_block(state: Any, nbytes: float) -> None:
    """Every device has a free block of nbytes.

    Args:
      state: of the step before, which is waited for: its temporaries are free only then.

    Raises:
      MemoryError: a device has no such block.
    """
    jax.block_until_ready(state)
    for device in jax.local_devices():
        free = (device.memory_stats() or {}).get("largest_free_block_bytes", nbytes)
        if free < nbytes:
            raise MemoryError(f"{device}: the largest free block is {free / 1e9:.1f} GB, needed are {nbytes / 1e9:.1f}")


def checked(step: Any) -> Callable[..., Any]:
    """A compiled step that checks before each call whether every device has a free block for its temporaries.

    So each call waits for the one before. The first argument is the state, which is donated.
    """
    temporaries, calls = sizes(step)[2], itertools.count()

    def call(state: Any, *others: Any) -> Any:
        demand_block(state, temporaries + (0 if next(calls) else RESULTS))
        return step(state, *others)

    return call


def check_fits(step: Any) -> None:
    """
    Raises:
      MemoryError: a compiled step needs more bytes than a device has free.
    """
    harness.demand_room(needed_bytes(step)[0], "state, temporaries and results")
