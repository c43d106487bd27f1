"""Runs jaxops' Gluon and Triton kernels on a CPU, without Triton: their own functions, with NumPy behind `gl`.

    with simulated():
        jaxops.grouped_matmul(lhs, rhs, offsets, plan=Plan("triton", ...))

Inside, JAX sees a Hopper GPU with few multiprocessors. See CONTRIBUTING.md, "Add a kernel".
"""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxops._lib.planning import device as devices
from tests.gluon_simulator import launch
from tests.gluon_simulator.machine import SimulationError
from tests.gluon_simulator.modules import in_place_of, simulated_modules

__all__ = ["SimulationError", "simulated"]


@contextlib.contextmanager
def simulated(seed: int = 0, cores: int = 5) -> Iterator[launch.Settings]:
    """
    Args:
      seed: of the order in which partitions run and asynchronous operations end.
      cores: multiprocessors, the programs of a persistent kernel.
    """
    modules = simulated_modules()
    card = AbstractDevice(device_kind="NVIDIA H200", num_cores=cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=card)
    with (
        pytest.MonkeyPatch.context() as patch,
        in_place_of(modules),
        jax.sharding.use_abstract_mesh(mesh),
        launch.setting(seed=seed) as settings,
    ):
        patch.setattr(devices, "gluon_missing", lambda: "")
        patch.setattr(devices.Device, "interpret", property(lambda self: True))
        try:
            yield settings
        except Exception as error:
            if settings.error is not None and settings.error is not error:
                raise settings.error from error
            raise
