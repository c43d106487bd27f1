"""The times that XLA's scheduler reads from kernels and allocations."""

import jax
import pytest

from jaxops._lib.planning.costs import Cost, allocated

pytestmark = pytest.mark.versions


def test_nanoseconds():
    """Of a product by its operations, of a copy by its bytes; of an allocation none."""
    assert Cost(600_000_000_000, 1).nanoseconds == 1_002_000
    assert Cost(0, 3_500_000).nanoseconds == 3_000
    text = jax.jit(lambda: allocated((3,), "float32")).lower().as_text()
    assert 'latency_metadata = "0"' in text
