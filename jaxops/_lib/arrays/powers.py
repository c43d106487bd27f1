"""Powers of two: sizes of Triton's arrays, and so of tiles."""


def power_of_2(n: int) -> int:
    """The least power of two that is no less than n."""
    return 1 << max(0, n - 1).bit_length()


def covering(size: int, least: int, most: int) -> int:
    """The power of two from least to most whose multiples cover size with the least excess; the largest of equals."""
    widths = [1 << i for i in range(least.bit_length() - 1, most.bit_length())]
    return min(widths, key=lambda width: (-(-size // width) * width, -width))
