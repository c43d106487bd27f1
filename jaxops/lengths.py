"""Lengths that many batches share, so that few programs are compiled."""

from jaxops._lib.checks import check_integer


def bucket_length(length: int, *, multiple: int = 128, steps: int = 8) -> int:
    """The length to which `length` rows are padded, so that batches of any length share few compiled programs.

    A program is compiled for each shape; rows outside the groups (or sequences) come out zero and reach nothing. So pad to a bucket and leave the offsets
    as they are. Buckets are multiples of `multiple`; where those become many, of twice, four times ... as many, with `steps` buckets from each length to its
    double. Padding is less than `multiple` rows, or less than `length / steps`, whichever is more.

    >>> import jaxops
    >>> [jaxops.bucket_length(n) for n in (1, 1_000, 5_000, 30_000)]
    [128, 1024, 5120, 30720]
    >>> len({jaxops.bucket_length(n) for n in range(4_097, 8_193)})  # programs for four thousand lengths
    8

    Args:
      length: rows of a batch, known to the host; at least 0.
      multiple: what every bucket is a multiple of; at least 1.
      steps: buckets an octave; at least 1.

    Returns:
      The least bucket that is not shorter than length; 0 for 0.

    Raises:
      ValueError: a negative length, or a multiple or steps below 1.
      TypeError: anything but Python and numpy integers. Of an array on a device write int(length), which waits for it.
    """
    length, multiple, steps = (
        check_integer("length", length, 0),
        check_integer("multiple", multiple, 1),
        check_integer("steps", steps, 1),
    )
    step = multiple
    while length > 2 * steps * step:
        step *= 2
    return -(-length // step) * step
