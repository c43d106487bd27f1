"""Padded lengths that many batches share, so that few programs are compiled."""

from jaxops._lib.arrays.checks import check_integer


def bucket_length(length: int, *, multiple: int = 128, steps: int = 8) -> int:
    """The length to pad `length` rows to, so that batches of any length share few compiled programs.

    A program is compiled per shape. Rows outside the groups (or sequences) are written as zeros and affect nothing: pad
    to a bucket and leave the offsets unchanged. Buckets are multiples of `multiple`; from `2 * steps * multiple` on, of
    twice that, four times, ..., with `steps` buckets per octave. Padding is less than `multiple` rows or less than
    `length / steps`, whichever is more.

    >>> import jaxops
    >>> [jaxops.bucket_length(n) for n in (1, 1_000, 5_000, 30_000)]
    [128, 1024, 5120, 30720]
    >>> len({jaxops.bucket_length(n) for n in range(4_097, 8_193)})  # programs for four thousand lengths
    8

    Args:
      length: rows of a batch, known on the host; at least 0.
      multiple: every bucket is a multiple of it; at least 1.
      steps: buckets per octave; at least 1.

    Returns:
      The smallest bucket of at least `length` rows; 0 for 0.

    Raises:
      ValueError: a negative length, or a multiple or steps below 1.
      TypeError: anything but Python and numpy integers. For an array on a device write int(length), which waits for it.
    """
    length, step = check_integer("length", length, 0), check_integer("multiple", multiple, 1)
    steps = check_integer("steps", steps, 1)
    while length > 2 * steps * step:
        step *= 2
    return -(-length // step) * step
