"""AdaLN over packed sequences: images of unequal sizes in one array, one modulation per image, no padding between them.

python examples/packed_adaln.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxops
from jaxops.nn import AdaLayerNorm

WIDTH, COND = 64, 16


def main() -> None:
    norm = AdaLayerNorm(WIDTH, COND, modulation_init=nnx.initializers.normal(0.1), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    forward = nnx.jit(lambda norm, *args: norm(*args))
    gradient = nnx.jit(nnx.grad(lambda norm, *args: jnp.sum(norm(*args).astype(jnp.float32) ** 2)))

    rng = np.random.default_rng(0)
    for lengths in ([64, 100, 36], [20, 150, 64], [90, 90, 61]):  # tokens of each image
        # Pad the batch, not the images: rows after the last sequence are ignored and their result is zero.
        rows = np.zeros((jaxops.bucket_length(sum(lengths)), WIDTH), np.float32)
        rows[: sum(lengths)] = rng.normal(size=(sum(lengths), WIDTH))
        x = jnp.asarray(rows, jnp.bfloat16)
        offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        timesteps = jnp.asarray(rng.normal(size=(len(lengths), COND)), jnp.float32)  # a vector per image

        y = forward(norm, x, timesteps, offsets)
        grads = gradient(norm, x, timesteps, offsets)
        print(
            f"lengths {lengths}: {len(x)} rows, rms of the result {float(jnp.sqrt(jnp.mean(y**2))):.3f}, "
            f"largest gradient of the modulation {float(jnp.abs(grads.modulation.kernel[...]).max()):.3f}"
        )
        assert not y[sum(lengths) :].any()

    # The op below the layer, with scale and shift of your own: norm(x) * (1 + scale[s]) + shift[s].
    scale, shift = 0.1 * jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    y = jax.jit(jaxops.adaln)(x, scale, shift, offsets)
    assert y.shape == x.shape


if __name__ == "__main__":
    main()
