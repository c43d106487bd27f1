"""Plans with small tiles by the ways to run them, and random problems with NaN in rows outside of the groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.ops import grouped_matmul
from jaxops.ops.grouped_glu import Plan, Tiles
from tests.ops.grouped_matmul.cases import RUNS, make_case
from tests.ops.grouped_matmul.cases import plan_of as product_plan_of

__all__ = ["FUSED", "RUNS", "SPLIT", "Case", "make_unit", "plan_of"]
# The forward's kernel for few rows, and with sums that are split over programs.
FUSED, SPLIT = ([run, pytest.param(f"{run}-gpu", marks=pytest.mark.gpu)] for run in ("fused", "fused-split"))


def plan_of(run: str) -> Plan:
    """Blocks smaller than the tests' sizes. "interpret" runs the activation kernels only, with products by XLA;
    "fused" the forward's kernel for few rows beside them."""
    if run.startswith("own") or run == "xla":  # "own": tiles of the plan's choice
        return Plan("xla" if run == "xla" else "pallas")
    if run.startswith("fused"):
        tiles = grouped_matmul.Tiles(32, 16, 16, panel=2, tail=16, split=2 if "split" in run else 1)
        return dataclasses.replace(plan_of("gpu" if run.endswith("gpu") else "interpret"), fused=tiles)
    return Plan("pallas", Tiles(8, 32), Tiles(4, 16), product_plan_of("xla" if run == "interpret" else run))


@dataclasses.dataclass(frozen=True)
class Case:
    """x[M, K], w_gate[G, K, F], w_up[G, K, F], dh[M, F]; rows outside the groups are NaN in x and dh."""

    x: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    dh: jax.Array
    offsets: jax.Array

    @property
    def arrays(self) -> tuple:
        return tuple(vars(self).values())

    def clean(self, *, joined: bool = False, biased: bool = False) -> dict:
        """The op's arguments in numpy, without NaN. biased: with the rows of a weight matrix as biases."""
        bias = (self.w_up[:, -1], self.w_gate[:, 0]) if biased else None
        weights = {"w_gate": self.w_gate, "w_up": self.w_up}
        if joined:
            weights = {"w_gate": jnp.concatenate([self.w_gate, self.w_up], axis=2), "w_up": None}
            bias = (jnp.concatenate(bias, axis=1), None) if biased else None
        given = {"x": jnp.nan_to_num(self.x)} | weights | {"group_offsets": self.offsets, "biases": bias}
        return jax.tree.map(np.asarray, given)


def make_unit(sizes, K: int, F: int, *, dtype="float32", before: int = 0, after: int = 0) -> Case:
    gate, up = (make_case(sizes, K, F, dtype=dtype, before=before, after=after, seed=seed) for seed in (0, 1))
    scale = jnp.asarray(max(1, K) ** -0.5, dtype)  # a gate of about one, where activations bend
    return Case(gate.lhs, scale * gate.rhs, up.rhs, gate.dout, gate.offsets)
