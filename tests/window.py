"""Small arrays in place of those whose offsets overflow int32."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.anew import traced_anew


@contextlib.contextmanager
def window(reached: int) -> Iterator[None]:
    """As if int32 reached that many 1-byte numbers, and arrays of over twice as many bytes were counted in int64."""
    with traced_anew(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxops._lib.pallas.launch_pallas._MOST_INT32", reached)
        patch.setattr("jaxops._lib.pallas.launch_pallas._MOST_BYTES", 2 * reached)
        yield
