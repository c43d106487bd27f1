"""A block's gated unit."""

import functools

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.decoder.config import DecoderConfig
from models.decoder.weights import SideBySide, linear_of
from models.distributed.tensor_parallel import narrow, wide


class GatedUnit(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, hidden: int, *, rngs: nnx.Rngs):
        linear = functools.partial(linear_of(config), use_bias=config.mlp_bias, rngs=rngs)
        self.gate = linear(config.width, hidden)
        self.up = linear(config.width, hidden)
        self.gate_up: SideBySide | None = nnx.data(None)  # instead of these: `join`
        self.down = linear(hidden, config.width)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, None]:
        """mask: as of `Experts`, for which this stands; unused."""
        gate, up = wide(x, self.gate, self.up) if self.gate_up is None else self.gate_up.parts(x)
        gate, up = checkpoint_name(gate, "mlp.gate"), checkpoint_name(up, "mlp.up")
        return narrow(jax.nn.silu(gate) * up, self.down), None
