"""Lowers a function for an NVIDIA H200 without one."""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@contextlib.contextmanager
def on_h200():
    """Traces and lowers as on one H200."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=H200)):
        yield


def lower_for_h200(fn, *shapes) -> str:
    """The StableHLO of fn for an H200; shapes are jax.ShapeDtypeStruct."""
    with on_h200():
        return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
