"""A tiny training over a mesh for tests/models/test_mesh.py, and, as one of two processes, for tests/models/test_distributed.py."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxops.nn import AmaxHistory
from models import distributed
from models.checkpoints import Checkpoints
from models.decoder import DecoderConfig, loss_fn
from models.loop import make_optimizer
from models.mesh import create_sharded, make_mesh, own_rows, replicate, shard_batch, split_objective
from models.presets import Preset
from models.train_lm import init_state

SPARSE = DecoderConfig(32, 16, 2, 2, 2, 8, 24, experts=4, top_k=2, tie_embeddings=True, backend="xla")
DENSE = dataclasses.replace(SPARSE, experts=0, top_k=0, tie_embeddings=False)
WINDOWS = np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32)


class Outcome(NamedTuple):
    """What the steps gave, and the program that made them; `first` is the first step's (loss, routed) and gradient."""

    state: Any
    first: Any
    loss: list[float]
    program: str


def train(config: DecoderConfig, mesh: Mesh | None = None, steps: int = 3, check_vma: bool = True) -> Outcome:
    preset = Preset(dataclasses.replace(config, sharded=mesh is not None), 8, 4, steps=8, learning_rate=1e-2, warmup_steps=1, eval_every=8)
    graphdef, state = init_state(preset, 0) if mesh is None else create_sharded(lambda: init_state(preset, 0), mesh)
    optimizer, key = make_optimizer(preset), jax.random.key(0)
    windows = WINDOWS if mesh is None else shard_batch(WINDOWS[own_rows(4, mesh)], mesh)

    def objective(params, histories, windows, key):
        model = nnx.merge(graphdef, params, histories, copy=True)
        loss, routed = loss_fn(model, windows)
        balance = 0.0 if routed is None else 0.1 * jnp.mean(routed.aux_loss) + 0.01 * jnp.mean(routed.z_loss)
        return loss + balance, ((loss, routed), nnx.state(model, AmaxHistory))

    if mesh is not None:
        objective, key = split_objective(objective, mesh, check_vma=check_vma), replicate(key, mesh)

    def step(state, windows, key):
        grads, (measured, histories) = jax.grad(objective, has_aux=True)(state.params, state.histories, windows, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        state = state._replace(params=optax.apply_updates(state.params, updates), histories=histories, opt_state=opt_state, step=state.step + 1)
        return state, (measured, grads)

    # Compiled before it is called, it takes no other shardings: each step's state is split as the one before.
    compiled = jax.jit(step, donate_argnums=0).lower(state, windows, key).compile()
    results = []
    for _ in range(steps):
        state, result = compiled(state, windows, key)
        results.append(result)
    return Outcome(state, results[0], [float(measured[0]) for measured, _ in results], compiled.as_text())


def main(coordinator: str, process_id: str, folder: str) -> None:
    distributed.initialize(coordinator, 2, int(process_id))
    outcome = train(DENSE, make_mesh("fsdp=2"), steps=2)
    with Checkpoints(Path(folder), every=2) as checkpoints:
        checkpoints.save(outcome.state.params, 2)
    with Checkpoints(Path(folder), every=2) as checkpoints:
        read, _ = checkpoints.start(outcome.state.params, resume=True)
    for ours, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(outcome.state.params), strict=True):
        assert ours.sharding == wanted.sharding
        np.testing.assert_array_equal(ours.addressable_data(0), wanted.addressable_data(0))
    distributed.make_console().print(*(f"{loss:.6f}" for loss in outcome.loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
