"""A decoder as generation reads it: each layer's parameters by themselves, in the dtype of the computation."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder import Decoder
from models.decoder.attention import Attention
from models.decoder.block import Block
from models.decoder.weights import GatedUnit, join
from models.distributed.mesh import name_of

# Matrices. Norms, biases, sinks and routers are small, and computed with in float32.
CAST = re.compile(r"\b(kernel|embedding|moe/(gate|up|down))\b")
KEPT = re.compile(r"\b(router|shared_gate|scale)\b")


def inference_dtype(name: str, stored: Any, dtype: Any) -> Any:
    """The dtype of a parameter for inference: of a float32 matrix `dtype`, of others the one they have."""
    casts = stored == jnp.float32 and CAST.search(name) and not KEPT.search(name)
    return jnp.dtype(dtype) if casts else stored


def for_inference(model: Decoder, *, consume: bool = False) -> Decoder:
    """The same model with `blocks` a list of single blocks and matrices cast to config.dtype, in evaluation mode.

    Results are the same: training casts the same matrices at every use. A step then reads each of them once, as it is
    stored; out of a stack XLA would copy each layer's first. Matrices of one input are put side by side, as one. A
    model that is one already is returned as it is.

    Args:
      consume: whether the given model's arrays are freed one by one, so that a second copy of one array at the most is
        alive. The model cannot be used afterwards.
    """
    if isinstance(model.blocks, nnx.List):
        return model
    return _apart(model, consume=True) if consume else nnx.merge(*_converted(*nnx.split(model)))


@functools.partial(jax.jit, static_argnums=0)
def _converted(graphdef: nnx.GraphDef, state: nnx.State) -> tuple[nnx.GraphDef, nnx.State]:
    """As one program: a slice of each array of each layer would be hundreds of calls."""
    return nnx.split(_apart(nnx.merge(graphdef, state), consume=False))


def _apart(model: Decoder, *, consume: bool) -> Decoder:
    config = model.config

    def convert(path: tuple, x: Any, parts: int | None) -> Any:
        """The array cast, or with parts a list of that many."""
        dtype = x.dtype if config.recipe is not None else inference_dtype(name_of(path), x.dtype, config.dtype)
        if parts is None and dtype == x.dtype:
            return x
        made = x.astype(dtype) if parts is None else [x[i].astype(dtype) for i in range(parts)]
        if consume:
            jax.block_until_ready(made)
            x.delete()
        return made

    new = nnx.merge(*nnx.split(model))
    stacks = [new.blocks] if new.dense_blocks is None else [new.blocks, new.dense_blocks]
    blocks: dict[int, Block] = {}
    for stack, numbers in zip(stacks, config.stacks(), strict=True):
        graphdef, state = nnx.split(stack)
        leaves, tree = jax.tree.flatten_with_path(state)
        apart = [convert(path, x, len(numbers)) for path, x in leaves]
        for number, parts in zip(numbers, zip(*apart, strict=True), strict=True):
            blocks[number] = nnx.merge(graphdef, jax.tree.unflatten(tree, parts))
    new.blocks, new.dense_blocks = nnx.List([]), nnx.data(None)
    nnx.update(new, jax.tree.map_with_path(lambda path, x: convert(path, x, None), nnx.state(new)))
    new.blocks = nnx.List([blocks[number] for number in range(config.layers)])
    for block in new.blocks:
        if isinstance(block.attention, Attention):
            join(block.attention, "qkv", "q", "k", "v")
        if isinstance(block.mlp, GatedUnit):
            join(block.mlp, "gate_up", "gate", "up")
    new.eval()
    return new
