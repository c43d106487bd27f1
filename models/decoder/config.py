"""The choices of a decoder."""

import dataclasses
import math
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from models.distributed.tensor_parallel import check_heads
from models.precision import Attends, Computation


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer texts than those of the first training.

    Attributes:
      kind: "linear" divides all frequencies by factor. "dynamic" raises the base in texts longer than original_length
        (of one text, not of a batch). "llama3" divides low frequencies and blends the middle ones. "yarn" blends by
        dimension (Peng et al. 2023, arXiv:2309.00071).
      factor: the longest text over original_length.
      original_length: tokens of the longest text of the first training.
      low, high: kind "llama3": wavelengths above original_length / low are divided, those below original_length / high
        are kept.
      slow, fast: kind "yarn": dimensions that turn less than `slow` times in original_length tokens are divided, those
        that turn more than `fast` times are kept.
      whole: kind "yarn": whether the blend starts and ends at whole dimensions.
      magnitude: factor on sines and cosines.
      sharpness: attention's logits are multiplied by (1 + 0.1 * sharpness * log(factor)) ** 2 (DeepSeek's
        mscale_all_dim).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: PositiveFloat
    original_length: PositiveInt
    low: PositiveFloat = 1.0
    high: PositiveFloat = 4.0
    slow: PositiveFloat = 1.0
    fast: PositiveFloat = 32.0
    whole: bool = True
    magnitude: PositiveFloat = 1.0
    sharpness: NonNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Keys and values are products of one short vector a token. The last rotary_dim features of a query and a key have
    rotary positions; those of the key are common to all heads. A cache holds these and the vector.

    Attributes:
      rank: of that vector.
      query_rank: of a query's vector, or None for one product.
      value_dim: of a head's value; a head's query and key have head_dim.
    """

    rank: PositiveInt
    query_rank: PositiveInt | None
    value_dim: PositiveInt


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Computation):
    """Sizes and choices of a `Decoder`.

    Logits and the router's product are float32; these and the embedding are never in FP8. Names for a policy:
    "attention" (the residuals of attention), "middle" (after attention), "mlp" (of a dense unit).

    Attributes:
      vocab, width, layers: number of tokens, width of the residual stream, number of blocks.
      heads, kv_heads, head_dim: of the attention; heads / kv_heads queries share a key and a value.
      hidden: width inside a block's gated unit, or inside each expert.
      experts, top_k: gated units of a block, and how many of them a token uses; 0 experts for one dense unit.
      normalize: whether a token's expert weights are divided by their sum.
      qk_norm: whether queries and keys are normalized: head by head (True, Qwen3), or "all_heads" as one vector
        (OLMoE).
      rope_base, rope_scaling: of the rotary position embedding.
      norm_epsilon: added to the mean square in every norm; in latent attention's own two norms it is 1e-6.
      tie_embeddings: whether the output projection uses the embeddings.
      fp8_experts: whether the recipe is for the experts, the shared one included, too.
      attention: backend of `jaxops.packed_attention`; all but "xla" are for bfloat16 on a GPU and `plain_attention`
        without a window shorter than the rows.
      max_documents: of a row, padding included; every attention but "xla" needs it where documents share rows. With
        more the results are NaN. The training command raises it to what its data needs.
      rotary_dim: features of a head with rotary positions, the first ones; None for all.
      rope_pairs: whether rotary pairs are neighbours, instead of half a head apart.
      qkv_bias, out_bias, mlp_bias: whether the products of attention and of dense gated units have biases.
      qkv_clip: limit of the magnitude of queries, keys and values before the positions (OLMoE).
      window: tokens that a token sees, itself included, in layers that slide; None for all.
      sliding: the layers that slide, by number; None for all layers.
      sinks: whether each head has a learned logit that takes a part of the attention (gpt-oss).
      latent: sizes of latent attention (DeepSeek), with rotary_dim; kv_heads is then heads.
      dense_layers, dense_hidden: layers with a dense unit among those with experts, by number, and its width.
      score, weight_scale, expert_groups, top_expert_groups, selection_bias: of the router, as in `jaxops.nn.Router`.
      shared_hidden, shared_gate: width of the unit that all tokens use beside the experts, 0 for none; whether a
        sigmoid of the token weighs it (Qwen2-MoE).
      expert_bias: whether router and experts have biases (gpt-oss).
      clamp: 7, the limit of gate and up of gpt-oss' unit, (up + 1) * gate * sigmoid(1.702 * gate), or None.
      stored_fp8: whether matrices are float8 with a scale for each 128 x 128, as DeepSeek-V3's checkpoints have them;
        for inference.
    """

    vocab: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden: PositiveInt
    experts: NonNegativeInt = 0
    top_k: NonNegativeInt = 0
    normalize: bool = True
    qk_norm: bool | Literal["all_heads"] = False
    rope_base: PositiveFloat = 10_000.0
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False
    fp8_experts: bool = True
    attention: Attends = "xla"
    max_documents: PositiveInt | None = None
    rope_scaling: RopeScaling | None = None
    rotary_dim: PositiveInt | None = None
    rope_pairs: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qkv_clip: PositiveFloat | None = None
    window: PositiveInt | None = None
    sliding: tuple[int, ...] | None = None
    sinks: bool = False
    latent: Latent | None = None
    dense_layers: tuple[int, ...] = ()
    dense_hidden: PositiveInt | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    weight_scale: PositiveFloat = 1.0
    expert_groups: PositiveInt = 1
    top_expert_groups: PositiveInt = 1
    selection_bias: bool = False
    shared_hidden: NonNegativeInt = 0
    shared_gate: bool = False
    expert_bias: bool = False
    clamp: PositiveFloat | None = None
    stored_fp8: bool = False

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; heads must be a multiple of kv_heads."
            )
        if self.rotary % 2 or self.rotary > self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary} of head_dim {self.head_dim}; rotary positions need an even number of a "
                "head's features."
            )
        if not min(1, self.experts) <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k} of {self.experts} experts; it must be within 1 and experts, and 0 without "
                "experts."
            )
        size = self.experts // self.expert_groups
        if size * self.expert_groups != self.experts or not self.top_k <= size * self.top_expert_groups <= self.experts:
            raise ValueError(
                f"expert_groups is {self.expert_groups} and top_expert_groups {self.top_expert_groups}, of "
                f"{self.experts} experts: groups must be equal, and those that a token chooses from have top_k experts."
            )
        for name in ("sliding", "dense_layers"):
            numbers = getattr(self, name) or ()
            if list(numbers) != sorted(set(numbers)) or not all(0 <= number < self.layers for number in numbers):
                raise ValueError(f"{name} is {numbers}; it must be numbers of the {self.layers} layers, in order.")
        if self.dense_layers and not (self.experts and self.dense_hidden and len(self.dense_layers) < self.layers):
            raise ValueError(
                f"dense_layers is {self.dense_layers}: it names some of the layers of a model with experts, and needs "
                "dense_hidden."
            )
        if self.sliding is not None and self.window is None:
            raise ValueError("sliding names layers, and window is None: how many tokens do they see?")
        if self.latent is not None and (self.kv_heads != self.heads or self.rotary_dim is None):
            raise ValueError("latent attention needs rotary_dim, and kv_heads as many as heads.")
        if self.clamp not in (None, 7):
            raise ValueError(
                f"clamp (swiglu_limit) is {self.clamp}; units are clamped at 7, as gpt-oss', or not: None."
            )
        if self.recipe is not None and (self.expert_bias or self.clamp or self.stored_fp8):
            raise ValueError(
                f"recipe is {self.recipe!r}, and expert_bias, clamp or stored_fp8 is set: experts in FP8 have no "
                "biases or clamps, and stored float8 weights no recipe. Write recipe: null."
            )
        if self.stored_fp8 and (self.expert_bias or self.clamp):
            raise ValueError("stored_fp8 is set, and expert_bias or clamp: stored float8 experts have neither.")

    def check_tensor(self, devices: int) -> None:
        """Checks whether the mesh axis `tensor` can have so many devices.

        Raises:
          ValueError: it does not divide the heads, or the model has what is not split.
        """
        if devices == 1:
            return
        check_heads(devices, heads=self.heads, kv_heads=self.kv_heads)
        if self.qk_norm == "all_heads":
            raise ValueError(
                f"tensor={devices} splits the heads, and qk_norm='all_heads' needs all of a token's at once: write "
                "data, fsdp or expert instead."
            )
        if self.stored_fp8:
            raise ValueError(f"tensor={devices} does not split stored_fp8, which is for inference.")

    @property
    def rotary(self) -> int:
        """Features of a head with rotary positions."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def sliding_layers(self) -> frozenset[int]:
        """The layers whose tokens see `window` tokens."""
        if self.window is None:
            return frozenset()
        return frozenset(range(self.layers) if self.sliding is None else self.sliding)

    @property
    def scale(self) -> float:
        """Factor on attention's logits."""
        scale, rope = self.head_dim**-0.5, self.rope_scaling
        if rope is None or rope.factor <= 1:
            return scale
        return scale * (1 + 0.1 * rope.sharpness * math.log(rope.factor)) ** 2

    @property
    def plain_attention(self) -> bool:
        """Whether `jax.nn.dot_product_attention` computes it: no sinks, other scale or latents."""
        return self.scale == self.head_dim**-0.5 and not (self.sinks or self.latent)

    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of `Decoder.blocks` and, if there are some, of `Decoder.dense_blocks`, by number."""
        others = tuple(layer for layer in range(self.layers) if layer not in self.dense_layers)
        return (others, self.dense_layers) if self.dense_layers else (others,)
