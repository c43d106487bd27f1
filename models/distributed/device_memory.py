"""How XLA's allocator hands out a GPU's memory."""

import os

import jax

_PARTITIONING = "xla_gpu_enable_allocator_spatial_partitioning"


def disable_partitioning() -> None:
    """Turns the spatial partitioning of XLA's GPU allocator off. Call it before anything asks JAX for its devices.

    A step's temporaries need one free block. With partitioning, the default, the allocator fills preallocated memory
    from both ends, and puts a small array into the block that the last step's temporaries have left, not into the free
    space between the ends. Then the next step finds no block: 16,384 tokens a card of `lm --preset 3b` on four H200s
    with `tensor=4` need 78 GB, and 131 GB were free in blocks of 77 and 54 (jaxlib 0.11.2, 2026-11-26).

    A choice in $XLA_FLAGS stays. Versions before 0.11 do not partition, and end the process for an unknown flag.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ >= (0, 11) and _PARTITIONING not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_PARTITIONING}=false"
