"""The JAX sides of the grouped matmul comparison.

Each has three passes as functions of (lhs, rhs, dout, group_offsets, group_sizes).
"""

import importlib
import importlib.util
import logging
import pathlib
import sys
from collections.abc import Callable

import jax

import jaxops
from jaxops.ops.grouped_matmul import Plan

Passes = dict[str, Callable[..., jax.Array]]


def jaxops_passes(backend: str, plan: Plan | None = None) -> Passes:
    return {
        "fwd": lambda lhs, rhs, dout, offsets, sizes: jaxops.grouped_matmul(
            lhs, rhs, offsets, backend=backend, plan=plan
        ),
        "dgrad": lambda lhs, rhs, dout, offsets, sizes: jaxops.grouped_matmul(
            dout, rhs, offsets, transpose_rhs=True, backend=backend, plan=plan
        ),
        "wgrad": lambda lhs, rhs, dout, offsets, sizes: jaxops.grouped_wgrad(
            lhs, dout, offsets, backend=backend, plan=plan
        ),
    }


def vjp_passes(dot: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Passes:
    """From a differentiable dot(lhs, rhs, group_sizes). XLA drops the forward of a gradient."""
    return {
        "fwd": lambda lhs, rhs, dout, offsets, sizes: dot(lhs, rhs, sizes),
        "dgrad": lambda lhs, rhs, dout, offsets, sizes: jax.vjp(lambda lhs: dot(lhs, rhs, sizes), lhs)[1](dout)[0],
        "wgrad": lambda lhs, rhs, dout, offsets, sizes: jax.vjp(lambda rhs: dot(lhs, rhs, sizes), rhs)[1](dout)[0],
    }


def dense_passes() -> Passes:
    """Equal operations without groups, through cuBLAS: rhs and the result of wgrad are one matrix [K, N]."""
    return {
        "fwd": lambda lhs, rhs, dout, offsets, sizes: lhs @ rhs,
        "dgrad": lambda lhs, rhs, dout, offsets, sizes: dout @ rhs.T,
        "wgrad": lambda lhs, rhs, dout, offsets, sizes: lhs.T @ dout,
    }


def tokamax_dot(name: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """tokamax.ragged_dot of (lhs, rhs, group_sizes) by tokamax_mosaic or tokamax_triton.

    Raises:
      ImportError: it is not installed.
    """
    tokamax, implementation = _tokamax(), {"tokamax_mosaic": "mosaic_gpu", "tokamax_triton": "triton"}[name]
    return lambda lhs, rhs, sizes: tokamax.ragged_dot(lhs, rhs, sizes, implementation=implementation)


def jax_peer(name: str) -> Passes:
    """
    Raises:
      ImportError: the peer is not installed.
    """
    if name == "xla":
        return jaxops_passes("xla")
    if name == "ragged_dot":
        return vjp_passes(jax.lax.ragged_dot)
    if name == "cublas":
        return dense_passes()
    if name in ("tokamax_mosaic", "tokamax_triton"):
        return vjp_passes(tokamax_dot(name))  # with its defaults: it ships no tuned rows for Hopper
    raise ValueError(
        f"peer {name!r}: write ragged_dot, cublas, tokamax_mosaic, tokamax_triton, torch_grouped_mm or xla."
    )


def _tokamax():
    # tokamax imports xprof for its own benchmarks only. A stub in .gpu/ replaces it where it is missing.
    stub = pathlib.Path(".gpu/tokamax_stub.py")
    if "tokamax" not in sys.modules and importlib.util.find_spec("xprof") is None and stub.is_file():
        spec = importlib.util.spec_from_file_location("tokamax_stub", stub)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns at each trace that it has no tuned row
    return importlib.import_module("tokamax")
