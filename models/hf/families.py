"""Hugging Face's architectures as one table: which keys of config.json each one reads, and what they are in a decoder.

A key is read, or `models.hf.unread` knows that it changes nothing, or `models.hf.config` refuses it by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from models.decoder import DecoderConfig, Latent
from models.hf.rope import STRICT, Rope, Whole, rope_keys

FULL, SLIDING = "full_attention", "sliding_attention"


class Quantization(pydantic.BaseModel):
    """Keys that change nothing: which tensors are quantized, their dtypes say; scale_fmt is of activations."""

    model_config = STRICT

    modules_to_not_convert: Any = None
    modules_to_convert: Any = None
    dequantize: Any = None
    scale_fmt: Any = None


class Fp8(Quantization):
    quant_method: Literal["fp8"]
    weight_block_size: list[Literal[128]] = pydantic.Field(min_length=2, max_length=2)
    fmt: Literal["e4m3"] | None = None
    activation_scheme: Literal["dynamic"] | None = None
    expert_dtype: Literal["fp8"] | None = None


class Mxfp4(Quantization):
    quant_method: Literal["mxfp4"]


class ReadByAll(pydantic.BaseModel):
    """The keys that every class of transformers reads here, with its defaults."""

    model_config = STRICT

    vocab_size: PositiveInt = 32_000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11_008
    num_hidden_layers: PositiveInt = pydantic.Field(32, le=10_000)
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None  # as many as there are heads
    head_dim: PositiveInt | None = None  # hidden_size / num_attention_heads
    hidden_act: Literal["silu", "swish"] = "silu"
    max_position_embeddings: PositiveInt = 2048
    original_max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10_000.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: Whole = 1.0
    quantization_config: Annotated[Fp8 | Mxfp4, pydantic.Field(discriminator="quant_method")] | None = None


class Keys(ReadByAll):
    """All keys that decide what a model computes. Those that a class does not read have the value that it computes."""

    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: PositiveFloat | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = True
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    num_experts: PositiveInt = 1
    num_experts_per_tok: PositiveInt = 1
    norm_topk_prob: bool = True
    moe_intermediate_size: PositiveInt = 1
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: PositiveInt = 1
    first_k_dense_replace: NonNegativeInt = 0
    shared_expert_intermediate_size: PositiveInt = 1
    n_shared_experts: PositiveInt = 1
    swiglu_alpha: float = pydantic.Field(1.702, ge=1.702, le=1.702)
    swiglu_limit: PositiveFloat = 7.0
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    routed_scaling_factor: PositiveFloat = 1.0
    kv_lora_rank: PositiveInt = 1
    q_lora_rank: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt = 1
    qk_nope_head_dim: PositiveInt = 1
    v_head_dim: PositiveInt = 1
    rope_interleave: bool = False
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"


# Keys that are settings of a `DecoderConfig` as they are.
SAME = {
    "vocab_size": "vocab",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "out_bias",
    "qkv_bias": "qkv_bias",
    "mlp_bias": "mlp_bias",
    "clip_qkv": "qkv_clip",
    "num_experts": "experts",
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "normalize",
    "shared_expert_intermediate_size": "shared_hidden",
    "swiglu_limit": "clamp",
    "n_group": "expert_groups",
    "topk_group": "top_expert_groups",
    "routed_scaling_factor": "weight_scale",
    "rope_interleave": "rope_pairs",
}


DEFAULT_ROPE = Rope()


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture."""

    model_type: str  # its name in config.json
    defaults: dict[str, Any]  # what it reads beside `ReadByAll`, and other defaults than there
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of a `DecoderConfig` that no key says
    # Whether a layer has the window, without layer_types.
    slides: Callable[[Keys, int], bool] = lambda keys, layer: keys.sliding_window is not None
    experts: str = "num_experts"  # the key of their number
    rope: Rope = DEFAULT_ROPE  # where config.json says none
    # The folder of the experts, and the names of gate, up and down; gpt-oss has others.
    expert_names: tuple[str, ...] = ("mlp", "gate_proj", "up_proj", "down_proj")
    shared: str = ""  # the folder of the shared expert

    @property
    def reads(self) -> set[str]:
        return {*ReadByAll.model_fields, *self.defaults}

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.defaults


def _last_ones(keys: Keys, layer: int) -> bool:
    return keys.use_sliding_window and keys.sliding_window is not None and layer >= keys.max_window_layers


# fmt: off
_MISTRAL = {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_QWEN2 = {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None,
}
_QWEN_MOE = {
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32_768,
    "norm_topk_prob": False, "mlp_only_layers": None, "decoder_sparse_step": 1, "sliding_window": 4096,
    "use_sliding_window": False, "max_window_layers": 28,
}
MODELS = {
    "LlamaForCausalLM": Family("llama", {"attention_bias": False, "mlp_bias": False}),
    "MistralForCausalLM": Family("mistral", _MISTRAL | {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN2, {"qkv_bias": True}, slides=_last_ones),
    "Qwen3ForCausalLM": Family(
        "qwen3", _QWEN2 | {"head_dim": 128, "attention_bias": False}, {"qk_norm": True}, slides=_last_ones
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        _MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_experts": 8,
                    "num_experts_per_tok": 2},
        experts="num_local_experts",
        expert_names=("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _QWEN_MOE | {"intermediate_size": 6144, "num_key_value_heads": 4, "attention_bias": False, "num_experts": 128,
                     "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        {"qk_norm": True},
        slides=lambda keys, layer: keys.use_sliding_window and keys.sliding_window is not None,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        _QWEN_MOE | {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
                     "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                     "qkv_bias": True, "layer_types": None},
        {"shared_gate": True},
        slides=lambda keys, layer: keys.use_sliding_window and layer % 2 == 0 and layer < keys.max_window_layers,
        shared="mlp.shared_expert",
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        {"vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
         "num_experts_per_tok": 8, "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
        {"qk_norm": "all_heads"},
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
         "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "layer_types": None, "num_experts": 128,
         "num_experts_per_tok": 4, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        {"sinks": True, "expert_bias": True},
        slides=lambda keys, layer: layer % 2 == 0,
        experts="num_local_experts",
        rope=Rope(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
         "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "max_position_embeddings": 4096, "attention_bias": False, "num_experts": 256, "num_experts_per_tok": 8,
         "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True, "moe_layer_freq": 1,
         "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        {"score": "sigmoid", "selection_bias": True},
        experts="n_routed_experts",
        shared="mlp.shared_experts",
    ),
}
# fmt: on


def window_of(family: Family, keys: Keys) -> tuple[int | None, tuple[int, ...] | None]:
    """How many tokens a token sees, and in which layers; None for all."""
    layers, kinds = range(keys.num_hidden_layers), keys.layer_types
    if kinds is None:
        kinds = [SLIDING if family.slides(keys, layer) else FULL for layer in layers]
    elif SLIDING in kinds and not keys.use_sliding_window:
        raise ValueError("layer_types has sliding_attention, and use_sliding_window is false")
    if len(kinds) != len(layers) or not set(kinds) <= {SLIDING, FULL}:
        raise ValueError(f"layer_types is {kinds}; it must be {SLIDING} or {FULL} for each of {len(layers)} layers")
    sliding = tuple(layer for layer in layers if kinds[layer] == SLIDING)
    if sliding and keys.sliding_window is None:
        raise ValueError("layer_types has sliding_attention, and sliding_window is null")
    if not sliding:
        return None, None
    return keys.sliding_window, None if len(sliding) == len(layers) else sliding


def layer_kinds(layers: int, window: int | None, sliding: tuple[int, ...] | None) -> list[str]:
    """What layer_types says of `window_of`."""
    slides = set() if window is None else set(range(layers) if sliding is None else sliding)
    return [SLIDING if layer in slides else FULL for layer in range(layers)]


def settings_of(family: Family, keys: Keys) -> dict[str, Any]:
    """Settings of a `DecoderConfig`."""
    heads, reads = keys.num_attention_heads, family.reads
    if isinstance(keys.quantization_config, Mxfp4) and family is not MODELS["GptOssForCausalLM"]:
        raise ValueError("quantization_config is mxfp4, which only GptOssForCausalLM has here")
    if keys.head_dim is None and keys.hidden_size < heads:
        raise ValueError(f"hidden_size is {keys.hidden_size} and num_attention_heads {heads}, without a head_dim")
    window, sliding = window_of(family, keys)
    given = keys.rope_scaling or keys.rope_parameters
    rope = family.rope if given is None else given
    scaling = rope.scaling(keys.max_position_embeddings, keys.original_max_position_embeddings)
    same = {setting: getattr(keys, key) for key, setting in SAME.items() if key in reads}
    found = {setting: value for setting, value in same.items() if value is not None} | {
        "kv_heads": keys.num_key_value_heads or heads,
        "head_dim": keys.head_dim or keys.hidden_size // heads,
        "hidden": keys.intermediate_size,
        "rope_base": float(rope.rope_theta or keys.rope_theta),
        "rope_scaling": scaling,
        "window": window,
        "sliding": sliding,
    }
    if "attention_bias" in reads:
        found["qkv_bias"] = keys.attention_bias
    if "moe_intermediate_size" in reads:
        only, step, first = keys.mlp_only_layers or (), keys.decoder_sparse_step, keys.first_k_dense_replace
        layers = range(keys.num_hidden_layers)
        dense = tuple(layer for layer in layers if layer < first or layer in only or (layer + 1) % step)
        if len(dense) == len(layers):
            says = reads & {"mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"}
            raise ValueError(f"no layer has experts, by {' and '.join(sorted(says))}")
        dense_hidden = keys.intermediate_size if dense else None
        found |= {"hidden": keys.moe_intermediate_size, "dense_layers": dense, "dense_hidden": dense_hidden}
    if "kv_lora_rank" in reads:
        for key, needed in (("num_key_value_heads", heads), ("head_dim", keys.qk_rope_head_dim)):
            if getattr(keys, key) not in (None, needed):
                raise ValueError(f"{key} is {getattr(keys, key)}; latent attention needs {needed}")
        if scaling is not None:
            found["rope_scaling"] = dataclasses.replace(scaling, sharpness=rope.mscale_all_dim or 0.0)
        found |= {
            "head_dim": keys.qk_nope_head_dim + keys.qk_rope_head_dim,
            "rotary_dim": keys.qk_rope_head_dim,
            "latent": Latent(keys.kv_lora_rank, keys.q_lora_rank, keys.v_head_dim),
            "shared_hidden": keys.moe_intermediate_size * keys.n_shared_experts,
        }
    return found | family.fixed


def keys_of(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The keys of a config.json, as this configuration has them: what `settings_of` reads."""
    c = config
    found = {key: getattr(c, setting) for key, setting in SAME.items()} | {
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.hidden,
        "rope_theta": c.rope_base,
        "rope_parameters": rope_keys(c.rope_base, c.rope_scaling),
        "hidden_act": "silu",
        "sliding_window": c.window,
        "use_sliding_window": c.window is not None,
        "max_window_layers": 0,
        "layer_types": layer_kinds(c.layers, c.window, c.sliding),
        "mlp_only_layers": list(c.dense_layers),
        "decoder_sparse_step": 1,
        "first_k_dense_replace": len(c.dense_layers),
        "n_shared_experts": c.shared_hidden // c.hidden,
    }
    if "moe_intermediate_size" in family.reads:
        found |= {"intermediate_size": c.dense_hidden or c.hidden, "moe_intermediate_size": c.hidden}
    if c.rope_scaling is not None and c.rope_scaling.kind in ("linear", "dynamic"):
        found["max_position_embeddings"] = c.rope_scaling.original_length
    if c.latent is not None:
        found |= {
            "head_dim": c.rotary,
            "qk_rope_head_dim": c.rotary,
            "qk_nope_head_dim": c.head_dim - c.rotary,
            "v_head_dim": c.latent.value_dim,
            "kv_lora_rank": c.latent.rank,
            "q_lora_rank": c.latent.query_rank,
        }
    return {key: value for key, value in found.items() if key in family.reads}
