"""Times of calls: those of kernels where some ran, else of the host's clock."""

import jax.numpy as jnp
import pytest

from jaxops import profiling
from jaxops.profiling.device_times import device_times_us, wall_times_us

pytestmark = pytest.mark.versions


def test_times_of_calls():
    calls = []
    times = wall_times_us(lambda x: calls.append(x) or jnp.ones(3), 7, iterations=4)
    assert len(times) == 4
    assert min(times) > 0
    assert calls == [7] * 5  # one to warm up
    assert profiling.device_times_us is device_times_us


def test_no_kernel_no_time(monkeypatch):
    def measure(fn, *, iterations):
        return lambda *args: (fn(*args), None)

    monkeypatch.setattr("jaxops.profiling.device_times.profiler.measure", measure)
    with pytest.raises(RuntimeError, match="no kernel ran on a GPU"):
        device_times_us(jnp.negative, jnp.ones(3))
