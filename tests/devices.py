"""Marks for tests over several devices; on a CPU tests/conftest.py asks for four."""

import jax
import pytest

needs_four = pytest.mark.skipif(jax.device_count() != 4, reason="needs four devices")
needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
