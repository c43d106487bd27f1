"""A grouped matmul and its gradients: each row of tokens is multiplied by its own expert's matrix.

python examples/grouped_matmul.py
"""

import jax
import jax.numpy as jnp

import jaxops

ROWS, WIDTH, HIDDEN, EXPERTS = 512, 64, 128, 8


@jax.jit
def loss_and_grads(tokens, experts, offsets):
    def loss(tokens, experts):
        # The float32 matrices are multiplied in bfloat16; their gradients are float32 and never rounded to bfloat16.
        out = jaxops.grouped_matmul(tokens, experts, offsets, compute_dtype=jnp.bfloat16)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(tokens, experts)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.normal(keys[0], (ROWS, WIDTH), jnp.bfloat16)  # rows sorted by expert
    experts = jax.random.normal(keys[1], (EXPERTS, WIDTH, HIDDEN)) / WIDTH**0.5  # float32

    for step in range(3):  # each step routes differently: the same compiled program runs
        sizes = jax.random.multinomial(jax.random.fold_in(keys[2], step), ROWS, jnp.ones(EXPERTS) / EXPERTS)
        sizes = sizes.astype(jnp.int32).at[step].set(0)  # an expert without rows; the last rows are in no group
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
        loss, (_, d_experts) = loss_and_grads(tokens, experts, offsets)
        empty = float(jnp.abs(d_experts[step]).max())
        print(f"step {step}: loss {loss:.4f}, rows per expert {sizes.tolist()}, gradient of the empty expert {empty}")
        assert empty == 0.0
    assert loss_and_grads._cache_size() == 1  # compiled once


if __name__ == "__main__":
    main()
