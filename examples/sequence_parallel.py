"""A feed-forward block with tensor and sequence parallelism in `jax.shard_map`, here on host devices of a CPU.

python examples/sequence_parallel.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxops.nn import ColumnParallelLinear, RowParallelLinear

WIDTH, HIDDEN, TOKENS, AXIS = 32, 128, 64, "tensor"


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, AXIS, rngs=rngs)  # all-gather of the rows, then the product
        self.down = RowParallelLinear(HIDDEN, WIDTH, AXIS, rngs=rngs)  # the product, then reduce-scatter of its rows

    def __call__(self, x):  # x: this device's rows [TOKENS / devices, WIDTH]
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def spec(path, _):
    """How a parameter is sharded: columns of the first kernel, rows of the second; all others are replicated."""
    sharded = {("up", "kernel"): P(None, AXIS), ("up", "bias"): P(AXIS), ("down", "kernel"): P(AXIS)}
    return sharded.get(path[:2], P())


def main(steps: int = 5) -> None:
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    graphdef, params = nnx.split(Block(rngs=nnx.Rngs(0)))  # the whole parameters; shard_map splits them
    block = jax.shard_map(
        lambda params, x: nnx.merge(graphdef, params)(x),
        mesh=mesh,
        in_specs=(nnx.map_state(spec, params), P(AXIS)),
        out_specs=P(AXIS),
    )

    @jax.jit
    def train_step(params, x, target):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((block(params, x) - target) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss

    x, target = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    losses = []
    for step in range(steps):
        params, loss = train_step(params, x, target)
        losses.append(float(loss))
        print(f"step {step}: loss {losses[-1]:.4f} on {mesh.size} devices")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # before the first array; no effect on GPUs
    main()
