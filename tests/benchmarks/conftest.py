"""What every test of a benchmark runs under."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _caches_stay(monkeypatch):
    """A benchmark empties JAX's caches between its cases: all other tests' programs would be compiled again."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
