"""Powers of two: what Triton's arrays, and so tiles, must be."""


def power_of_2(n: int) -> int:
    """The least one that is no less than n."""
    return 1 << max(0, n - 1).bit_length()


def check_powers_of_2(tile, *names: str) -> None:
    """The named attributes of a tile are powers of two; `warps` among them are at most 32.

    Raises:
      ValueError: one is not.
    """
    for name in names:
        if (size := getattr(tile, name)) < 1 or size & (size - 1):
            raise ValueError(f"{type(tile).__name__}.{name}={size} must be a power of two.")
    if "warps" in names and tile.warps > 32:
        raise ValueError(f"{type(tile).__name__}.warps={tile.warps} must be at most 32.")
