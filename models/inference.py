"""A decoder as generation reads it: each layer's parameters by themselves, in the dtype of the computation."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder import Block, Decoder
from models.mesh import name_of

KEPT = re.compile(r"\b(scale|router)\b")  # norms and routers compute in float32


def for_inference(model: Decoder, *, consume: bool = False) -> Decoder:
    """The same model with `blocks` a list of single blocks and parameters cast to config.dtype, in evaluation mode.

    Results are the same: training casts the same parameters at every use. A step then reads each parameter once, as it
    is stored; out of a stack XLA would copy each layer's first. A model that is one already is returned as it is.

    Args:
      consume: whether the given model's arrays are freed one by one, so that a second copy of one array at the most is
        alive. The model cannot be used afterwards.
    """
    if isinstance(model.blocks, nnx.List):
        return model
    config = model.config

    def convert(path: tuple, x: Any, parts: int | None) -> Any:
        """The array cast, or with parts a list of that many."""
        casts = config.recipe is None and x.dtype == jnp.float32 and not KEPT.search(name_of(path))
        dtype = jnp.dtype(config.dtype) if casts else x.dtype
        if parts is None and dtype == x.dtype:
            return x
        made = x.astype(dtype) if parts is None else [x[i].astype(dtype) for i in range(parts)]
        if consume:
            jax.block_until_ready(made)
            x.delete()
        return made

    new = nnx.merge(*nnx.split(model))
    graphdef, stack = nnx.split(new.blocks)
    leaves, tree = jax.tree.flatten_with_path(stack)
    apart = [convert(path, x, config.layers) for path, x in leaves]
    blocks: list[Block] = [nnx.merge(graphdef, jax.tree.unflatten(tree, parts)) for parts in zip(*apart, strict=True)]
    new.blocks = nnx.List(blocks[:0])
    nnx.update(new, jax.tree.map_with_path(lambda path, x: convert(path, x, None), nnx.state(new)))
    new.blocks = nnx.List(blocks)
    new.eval()
    return new
