"""Keep a deep stack's activations in host memory: `offload.scan` copies them out and back while layers compute.

    python examples/offload_scan.py

On a CPU nothing moves (host memory is the device's memory), and the numbers are the same.
"""

import jax
import jax.numpy as jnp

import jaxops
from jaxops import offload

LAYERS, TOKENS, WIDTH, HIDDEN, EXPERTS = 4, 128, 32, 64, 4


def layer(x, w):
    routing = jaxops.route(x @ w["router"], k=2)
    y = jaxops.moe_mlp(x, w["gate"], w["up"], w["down"], routing, compute_dtype=jnp.bfloat16)
    return x + y, routing.aux_loss


def main() -> None:
    sizes = {
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(sizes))
    weights = {
        name: 0.1 * jax.random.normal(key, (LAYERS, *size))
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))

    # "carry" is each layer's input; "route" and "moe_mlp" are what these ops keep for their backward.
    policy = offload.policy({"carry": "offload", "moe_mlp": "offload", "route": "keep"})

    def loss(weights, x, scan):
        y, aux_losses = scan(layer, x, weights)
        return jnp.mean(y**2) + 0.01 * jnp.sum(aux_losses)

    def offloaded(body, init, xs):
        return offload.scan(body, init, xs, policy=policy)

    options = offload.compiler_options()  # separate streams for kernels and copies
    step = jax.jit(jax.grad(lambda w: loss(w, x, offloaded)), compiler_options=options)
    print(offload.report(step.lower(weights).compile()))

    got, want = step(weights), jax.jit(jax.grad(lambda w: loss(w, x, jax.lax.scan)))(weights)
    for name in sizes:
        assert jnp.allclose(got[name], want[name], atol=1e-3), name
    print("gradients are those of jax.lax.scan")


if __name__ == "__main__":
    main()
