"""Train a mixture-of-experts layer with Flax NNX and optax.

python examples/moe_layer.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxops.nn import MoE, Router

WIDTH, HIDDEN, EXPERTS, TOKENS = 32, 64, 8, 256


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        router = Router(WIDTH, EXPERTS, k=2, rngs=rngs)
        self.moe = MoE(EXPERTS, WIDTH, HIDDEN, router=router, dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        y, routing = self.moe(x)
        return self.out(x + y), routing


@nnx.jit
def train_step(model, optimizer, x, target):
    def loss_fn(model):
        y, routing = model(x)
        error = jnp.mean((y - target) ** 2)
        return error + 0.01 * routing.aux_loss, (error, routing.load)  # aux_loss balances the experts

    (_, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return aux


def main(steps: int = 40) -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    target = jnp.sin(3 * x) * jnp.roll(x, 1, axis=1)

    errors = []
    for step in range(steps):
        error, load = train_step(model, optimizer, x, target)
        errors.append(float(error))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}: error {errors[-1]:.4f}, tokens per expert {load.tolist()}")
    assert errors[-1] < errors[0]


if __name__ == "__main__":
    main()
