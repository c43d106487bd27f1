"""Flax NNX modules around the ops. Linen users wrap them with `flax.nnx.bridge.to_linen`."""

from jaxops.nn.adaln import AdaLayerNorm, AdaLNZeroBlock, AdaRMSNorm
from jaxops.nn.attention import PackedAttention, PackedMask, packed_attention_fn
from jaxops.nn.fp8 import AmaxHistory, Fp8DotGeneral, Fp8Linear
from jaxops.nn.grouped_linear import GroupedLinear
from jaxops.nn.moe import MoE
from jaxops.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from jaxops.nn.router import Router, RouterBias
from jaxops.nn.shared_experts import SharedExperts

__all__ = [
    "AdaLNZeroBlock", "AdaLayerNorm", "AdaRMSNorm", "AmaxHistory", "ColumnParallelLinear", "Fp8DotGeneral",
    "Fp8Linear", "GroupedLinear", "MoE", "PackedAttention", "PackedMask", "Router", "RouterBias", "RowParallelLinear",
    "SharedExperts", "packed_attention_fn",
]  # fmt: skip
