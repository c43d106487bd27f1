"""What plan tests of the grouped products share."""

import pytest

from jaxops._lib.planning import device as device_facts


@pytest.fixture
def jax_triton(monkeypatch):
    """As if it were installed, also on Python 3.11: make_plan does not import it."""
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "")
