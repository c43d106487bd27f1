"""The list's ops across devices, as functions of whole arrays: each call is a `jax.shard_map` of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.contracts.entry import EXACT, Arguments, Dims, Op, f32, i32
from tests.parallel.cases import mesh_of, over

DEVICES = min(2, jax.device_count())
WAYS: dict[str, dict[str, Any]] = {"xla": {"backend": "xla"} | EXACT}


def reference(a: Arguments) -> jax.Array:
    there = jnp.arange(a["x"].shape[0])[:, None] < a["rows"]
    y = jnp.matmul(jnp.where(there, a["x"], 0), a["w"], precision="highest") + a["bias"][None]
    return jnp.where(there, y, 0)


def rows_past(a: Arguments) -> tuple[Arguments, list]:
    past = np.arange(a["x"].shape[0])[:, None] >= a["rows"]
    return {"x": past}, [past]


def collective(name: str, shapes) -> Op:
    def call(a: Arguments, **how) -> jax.Array:
        return over(mesh_of(DEVICES), name, bias=True, rows=True, **how)(a["x"], a["w"], a["bias"], a["rows"])

    return Op(
        name, call, lambda d: shapes(d) | {"rows": i32()}, {"M": 7, "K": 12, "N": 8}, WAYS, reference,
        wrt=("x", "w", "bias"), local=("x", "rows"),
        integers=lambda rng, d: {"rows": np.int32(rng.integers(0, DEVICES * d["M"] + 1))}, outside=rows_past,
        multiplies=True, sharded=True,
    )  # fmt: skip


def gathered(d: Dims) -> Arguments:
    return {"x": f32(DEVICES * d["M"], d["K"]), "w": f32(d["K"], DEVICES * d["N"]), "bias": f32(DEVICES * d["N"])}


def scattered(d: Dims) -> Arguments:
    return {"x": f32(DEVICES * d["M"], DEVICES * d["N"]), "w": f32(DEVICES * d["N"], d["K"]), "bias": f32(d["K"])}


COLLECTIVES = [collective("all_gather_matmul", gathered), collective("matmul_reduce_scatter", scattered)]
