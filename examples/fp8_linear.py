"""Train a small network in FP8: all three products of each linear layer, with three recipes, beside bfloat16.

python examples/fp8_linear.py
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxops.nn import Fp8Linear

WIDTH, HIDDEN, BATCH = 128, 256, 128


class MLP(nnx.Module):
    def __init__(self, linear, rngs: nnx.Rngs):
        self.up = linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@nnx.jit
def train_step(model, optimizer, x, target):
    def loss_fn(model):
        return jnp.mean((model(x).astype(jnp.float32) - target) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)  # parameters and gradients are float32
    return loss


def train(linear, steps: int) -> float:
    # "delayed" keeps a history of maxima in the layer: wrt=nnx.Param leaves it out of the optimizer.
    model = MLP(linear, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH), jnp.bfloat16)
    target = jnp.tanh(2 * x.astype(jnp.float32))[:, ::-1]
    return [float(train_step(model, optimizer, x, target)) for _ in range(steps)][-1]


def main(steps: int = 30) -> None:
    plain = train(nnx.Linear, steps)
    print(f"bfloat16    loss after {steps} steps: {plain:.4f}")
    for recipe in ("tensorwise", "delayed", "blockwise"):
        loss = train(functools.partial(Fp8Linear, recipe=recipe), steps)
        print(f"{recipe:11s} loss after {steps} steps: {loss:.4f}")
        assert abs(loss - plain) < 0.1 * plain


if __name__ == "__main__":
    main()
