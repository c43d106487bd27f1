"""The keys of Hugging Face's config.json that models are computed by, for each architecture.

A key is read, or `models.hf.unread` knows that it changes nothing, or `models.hf.config` refuses it by name.
"""

import dataclasses
from typing import Any, ClassVar

import pydantic
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from models.decoder import Latent
from models.hf.rope import Rope


class Keys(pydantic.BaseModel):
    """The keys that decide what a model computes, with transformers' defaults for the model type."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    qk_norm: ClassVar[Any] = False
    qkv_bias_always: ClassVar[bool] = False

    vocab_size: PositiveInt = 32_000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11_008
    num_hidden_layers: PositiveInt = pydantic.Field(32, le=10_000)
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None  # as many as there are heads
    head_dim: PositiveInt | None = None  # hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt = 2048
    original_max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: float = 1.0
    quantization_config: dict[str, Any] | None = None

    @property
    def rope(self) -> Rope:
        return self.rope_scaling or self.rope_parameters or Rope()

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        """How many tokens a token sees, and in which layers; None for all."""
        return None, None

    def layer_kinds(self) -> list[str]:
        """What layer_types says of `window`."""
        window, sliding = self.window()
        slides = [
            window is not None and (sliding is None or layer in sliding) for layer in range(self.num_hidden_layers)
        ]
        return ["sliding_attention" if s else "full_attention" for s in slides]

    def foreign(self) -> dict[str, bool]:
        """For each unsupported feature, whether the checkpoint uses it."""
        # transformers ignores it in these architectures, or fails: by the kind of rope.
        partial = {self.partial_rotary_factor, self.rope.partial_rotary_factor} != {1.0}
        return {"hidden_act": self.hidden_act not in ("silu", "swish"), "partial_rotary_factor": partial}

    def sizes(self) -> dict[str, Any]:
        """Settings of a `DecoderConfig`.

        Raises:
          ValueError: keys that do not fit together.
        """
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size < heads:
            raise ValueError(f"hidden_size is {self.hidden_size} and num_attention_heads {heads}, without a head_dim")
        window, sliding = self.window()
        rope = self.rope
        return {
            "vocab": self.vocab_size,
            "width": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": heads,
            "kv_heads": self.num_key_value_heads or heads,
            "head_dim": self.head_dim or self.hidden_size // heads,
            "hidden": self.intermediate_size,
            "rope_base": float(rope.rope_theta or self.rope_theta),
            "rope_scaling": rope.scaling(self.max_position_embeddings, self.original_max_position_embeddings),
            "norm_epsilon": self.rms_norm_eps,
            "tie_embeddings": self.tie_word_embeddings,
            "qk_norm": self.qk_norm,
            "window": window,
            "sliding": sliding,
        }


class Biased(Keys):
    """With biases in all of attention's products, if attention_bias says so."""

    attention_bias: bool = False

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"qkv_bias": self.attention_bias, "out_bias": self.attention_bias}


class Llama(Biased):
    mlp_bias: bool = False

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"mlp_bias": self.mlp_bias}


class SlidesEverywhere(Keys):
    sliding_window: PositiveInt | None = None

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        return self.sliding_window, None


class Mistral(SlidesEverywhere):
    intermediate_size: PositiveInt = 14_336
    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 131_072
    sliding_window: PositiveInt | None = 4096


class ByLayer(Keys):
    """With a window in the layers that layer_types says."""

    sliding_window: PositiveInt | None = 4096
    layer_types: list[str] | None = None

    def slides(self, layer: int) -> bool:
        """Whether a layer slides, without layer_types."""
        raise NotImplementedError

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        layers, kinds = range(self.num_hidden_layers), self.layer_types
        if kinds is None:
            kinds = ["sliding_attention" if self.slides(layer) else "full_attention" for layer in layers]
        if len(kinds) != len(layers) or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise ValueError(
                f"layer_types is {kinds}; it must be sliding_attention or full_attention for each of {len(layers)} "
                "layers"
            )
        sliding = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
        if sliding and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, and sliding_window is null")
        if not sliding:
            return None, None
        return self.sliding_window, None if len(sliding) == len(layers) else sliding


class Qwen2(ByLayer):
    qkv_bias_always: ClassVar[bool] = True
    vocab_size: PositiveInt = 151_936
    intermediate_size: PositiveInt = 22_016
    num_key_value_heads: PositiveInt | None = 32
    max_position_embeddings: PositiveInt = 32_768
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and self.sliding_window is not None and layer >= self.max_window_layers

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        if "sliding_attention" in (self.layer_types or ()) and not self.use_sliding_window:
            raise ValueError("layer_types has sliding_attention, and use_sliding_window is false")
        return super().window()

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"qkv_bias": self.qkv_bias_always}


class Qwen3(Qwen2, Biased):
    qk_norm: ClassVar[Any] = True
    head_dim: PositiveInt | None = 128

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"qkv_bias": self.attention_bias}


class Experts(Keys):
    num_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"experts": self.num_experts, "top_k": self.num_experts_per_tok}


class Mixtral(Experts, SlidesEverywhere):
    intermediate_size: PositiveInt = 14_336
    num_key_value_heads: PositiveInt | None = 8
    max_position_embeddings: PositiveInt = 131_072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 1_000_000.0
    num_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2


class Olmoe(Experts, Biased):
    qk_norm: ClassVar[Any] = "all_heads"
    vocab_size: PositiveInt = 50_304
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 16
    num_attention_heads: PositiveInt = 16
    max_position_embeddings: PositiveInt = 4096
    rms_norm_eps: PositiveFloat = 1e-5
    num_experts: PositiveInt = 64
    norm_topk_prob: bool = False
    clip_qkv: PositiveFloat | None = None

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"normalize": self.norm_topk_prob, "qkv_clip": self.clip_qkv}


class Mixed(Experts):
    """With dense layers among those with experts."""

    vocab_size: PositiveInt = 151_936
    hidden_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 24
    max_position_embeddings: PositiveInt = 32_768
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: PositiveInt = 1

    def dense(self) -> tuple[int, ...]:
        only, step = self.mlp_only_layers or [], self.decoder_sparse_step
        return tuple(layer for layer in range(self.num_hidden_layers) if layer in only or (layer + 1) % step)

    def sizes(self) -> dict[str, Any]:
        sizes, dense = super().sizes(), self.dense()
        if len(dense) == self.num_hidden_layers:
            raise ValueError("mlp_only_layers and decoder_sparse_step leave no layer with experts")
        return sizes | {
            "hidden": self.moe_intermediate_size,
            "normalize": self.norm_topk_prob,
            "dense_layers": dense,
            "dense_hidden": self.intermediate_size if dense else None,
        }


class Qwen3Moe(Mixed, Biased):
    qk_norm: ClassVar[Any] = True
    intermediate_size: PositiveInt = 6144
    num_key_value_heads: PositiveInt | None = 4
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28  # all layers slide, whatever it says

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        return self.sliding_window if self.use_sliding_window else None, None


class Qwen2Moe(Mixed, ByLayer):
    intermediate_size: PositiveInt = 5632
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt | None = 16
    moe_intermediate_size: PositiveInt = 1408
    shared_expert_intermediate_size: PositiveInt = 5632
    num_experts: PositiveInt = 60
    num_experts_per_tok: PositiveInt = 4
    use_sliding_window: bool = False
    max_window_layers: int = 28
    qkv_bias: bool = True

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and layer % 2 == 0 and layer < self.max_window_layers

    def window(self) -> tuple[int | None, tuple[int, ...] | None]:
        if "sliding_attention" in (self.layer_types or ()) and not self.use_sliding_window:
            raise ValueError("layer_types has sliding_attention, and use_sliding_window is false")
        return super().window()

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {
            "qkv_bias": self.qkv_bias,
            "shared_hidden": self.shared_expert_intermediate_size,
            "shared_gate": True,
        }


class GptOss(Experts, ByLayer, Biased):
    vocab_size: PositiveInt = 201_088
    hidden_size: PositiveInt = 2880
    intermediate_size: PositiveInt = 2880
    num_hidden_layers: PositiveInt = 36
    num_attention_heads: PositiveInt = 64
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 64
    max_position_embeddings: PositiveInt = 131_072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 150_000.0
    sliding_window: PositiveInt | None = 128
    num_experts_per_tok: PositiveInt = 4
    attention_bias: bool = True
    swiglu_alpha: PositiveFloat = 1.702
    swiglu_limit: PositiveFloat = 7.0

    @property
    def rope(self) -> Rope:
        given = self.rope_scaling or self.rope_parameters
        yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
        return Rope(**yarn) if given is None else given

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def foreign(self) -> dict[str, bool]:
        return super().foreign() | {"swiglu_alpha": self.swiglu_alpha != 1.702}

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"sinks": True, "expert_bias": True, "clamp": self.swiglu_limit}


class DeepseekV3(Experts, Biased):
    vocab_size: PositiveInt = 129_280
    hidden_size: PositiveInt = 7168
    intermediate_size: PositiveInt = 18_432
    moe_intermediate_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 61
    num_attention_heads: PositiveInt = 128
    num_key_value_heads: PositiveInt | None = 128
    max_position_embeddings: PositiveInt = 4096
    num_experts: PositiveInt = 256
    n_shared_experts: PositiveInt = 1
    n_group: PositiveInt | None = 8
    topk_group: PositiveInt | None = 4
    routed_scaling_factor: PositiveFloat = 2.5
    norm_topk_prob: bool = True
    first_k_dense_replace: NonNegativeInt = 3
    kv_lora_rank: PositiveInt = 512
    q_lora_rank: PositiveInt | None = 1536
    qk_rope_head_dim: PositiveInt = 64
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    rope_interleave: bool = True
    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def foreign(self) -> dict[str, bool]:
        return super().foreign() | {
            "moe_layer_freq": self.moe_layer_freq != 1,
            "scoring_func": self.scoring_func != "sigmoid",
            "topk_method": self.topk_method != "noaux_tc",
            "num_key_value_heads": self.num_key_value_heads not in (None, self.num_attention_heads),
            "head_dim": self.head_dim not in (None, self.qk_rope_head_dim),
        }

    def sizes(self) -> dict[str, Any]:
        sizes, layers = super().sizes(), self.num_hidden_layers
        dense = tuple(range(min(self.first_k_dense_replace, layers)))
        if len(dense) == layers:
            raise ValueError("first_k_dense_replace leaves no layer with experts")
        if sizes["rope_scaling"] is not None:
            sharpness = self.rope.mscale_all_dim or 0.0
            sizes["rope_scaling"] = dataclasses.replace(sizes["rope_scaling"], sharpness=sharpness)
        return sizes | {
            "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "rotary_dim": self.qk_rope_head_dim,
            "rope_pairs": self.rope_interleave,
            "latent": Latent(self.kv_lora_rank, self.q_lora_rank, self.v_head_dim),
            "hidden": self.moe_intermediate_size,
            "dense_layers": dense,
            "dense_hidden": self.intermediate_size if dense else None,
            "shared_hidden": self.moe_intermediate_size * self.n_shared_experts,
            "normalize": self.norm_topk_prob,
            "score": "sigmoid",
            "weight_scale": self.routed_scaling_factor,
            "selection_bias": True,
            "expert_groups": self.n_group or 1,
            "top_expert_groups": self.topk_group or 1,
        }
