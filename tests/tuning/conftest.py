"""What every test of the tuner runs under."""

import pytest

from jaxops._lib.planning.tuned import read_rows


@pytest.fixture(autouse=True)
def _own_rows(tmp_path, monkeypatch):
    """Each test starts without rows of its own, and leaves none behind in the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read_rows.cache_clear()
    yield
    read_rows.cache_clear()
