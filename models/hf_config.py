"""config.json of Hugging Face's transformers, to and from `models.decoder.DecoderConfig`.

Llama, Qwen3, Mixtral and Qwen3-MoE.
"""

import dataclasses
import json
import pathlib
from typing import Any

import pydantic
from pydantic import PositiveFloat, PositiveInt

from models.decoder import DecoderConfig

NAME = "config.json"


class Keys(pydantic.BaseModel):
    """The keys that decide what a model computes, with transformers' defaults for the model type.

    All other keys are ignored: transformers ignores them too, or computes the same for any value.
    """

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", frozen=True)

    vocab_size: PositiveInt = 32_000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11_008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None  # as many as there are heads
    head_dim: PositiveInt | None = None  # hidden_size / num_attention_heads
    hidden_act: str = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10_000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        return self.rope_scaling or self.rope_parameters or {}

    def foreign(self) -> dict[str, bool]:
        """For each unsupported feature, whether the checkpoint uses it."""
        return {
            "rope type": self.rope.get("rope_type", self.rope.get("type", "default")) != "default",
            "hidden_act": self.hidden_act not in ("silu", "swish"),
            "quantization_config": self.quantization_config is not None,
        }

    def sizes(self) -> dict[str, Any]:
        """Settings of a `DecoderConfig`."""
        theta = self.rope.get("rope_theta", self.rope_theta)
        if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < float("inf"):
            raise ValueError(f"rope_theta is {theta!r}; it must be a positive number")
        if self.head_dim is None and self.hidden_size < self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}, without a "
                "head_dim"
            )
        return {
            "vocab": self.vocab_size,
            "width": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "hidden": self.intermediate_size,
            "rope_base": float(theta),
            "norm_epsilon": self.rms_norm_eps,
            "tie_embeddings": self.tie_word_embeddings,
        }


class Llama(Keys):
    attention_bias: bool = False
    mlp_bias: bool = False

    def foreign(self) -> dict[str, bool]:
        return super().foreign() | {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}


class Qwen3(Keys):
    vocab_size: PositiveInt = 151_936
    intermediate_size: PositiveInt = 22_016
    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def foreign(self) -> dict[str, bool]:
        slides = self.use_sliding_window and self.sliding_window is not None
        window = slides and self.max_window_layers < self.num_hidden_layers
        if self.layer_types is not None:
            window = set(self.layer_types) != {"full_attention"} or len(self.layer_types) != self.num_hidden_layers
        return super().foreign() | {"attention_bias": self.attention_bias, "sliding window": window}


class Experts(Keys):
    """transformers 5 reads the number of experts by either key, for all model types."""

    num_experts: PositiveInt = pydantic.Field(
        128, validation_alias=pydantic.AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: PositiveInt = 8

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"experts": self.num_experts, "top_k": self.num_experts_per_tok}


class Mixtral(Experts):
    intermediate_size: PositiveInt = 14_336
    num_key_value_heads: PositiveInt | None = 8
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 1_000_000.0
    num_experts: PositiveInt = pydantic.Field(
        8, validation_alias=pydantic.AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: PositiveInt = 2
    sliding_window: PositiveInt | None = None

    def foreign(self) -> dict[str, bool]:
        return super().foreign() | {"sliding window": self.sliding_window is not None}


class Qwen3Moe(Experts):
    vocab_size: PositiveInt = 151_936
    hidden_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 24
    num_key_value_heads: PositiveInt | None = 4
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: PositiveInt = 1

    def foreign(self) -> dict[str, bool]:
        dense = any(0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers or [])
        return super().foreign() | {
            "attention_bias": self.attention_bias,
            "sliding window": self.use_sliding_window and self.sliding_window is not None,
            "dense layers among experts": dense or self.decoder_sparse_step != 1,
        }

    def sizes(self) -> dict[str, Any]:
        return super().sizes() | {"hidden": self.moe_intermediate_size, "normalize": self.norm_topk_prob}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture's differences.

    Attributes:
      model_type: its name in config.json.
      keys: what is read.
      qk_norm: whether queries and keys are normalized.
      hidden: the key of the width inside a gated unit or an expert.
      experts: the key of their number; None for a dense model.
      normalize: the key of whether a token's expert weights are divided by their sum; None if they always are.
    """

    model_type: str
    keys: type[Keys]
    qk_norm: bool = False
    hidden: str = "intermediate_size"
    experts: str | None = None
    normalize: str | None = None


MODELS = {
    "LlamaForCausalLM": Architecture("llama", Llama),
    "Qwen3ForCausalLM": Architecture("qwen3", Qwen3, qk_norm=True),
    "MixtralForCausalLM": Architecture("mixtral", Mixtral, experts="num_local_experts"),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", Qwen3Moe, True, "moe_intermediate_size", "num_experts", "norm_topk_prob"
    ),
}


def fitting(config: DecoderConfig) -> str | None:
    """The architecture that a model of this configuration is saved as; None if none fits."""
    for name, kind in MODELS.items():
        normalizes = config.normalize or kind.normalize or not kind.experts
        if (kind.qk_norm, bool(kind.experts)) == (config.qk_norm, bool(config.experts)) and normalizes:
            return name
    return None


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """
    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no JSON object.
    """
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; it must be a JSON object.")
    return found


def _architecture(given: dict[str, Any]) -> str:
    """By "architectures", or "model_type" if that is missing; both must agree."""
    named, model_type = given.get("architectures"), given.get("model_type")
    if named is None:
        named = [name for name, kind in MODELS.items() if kind.model_type == model_type]
    known = f"these are known: {', '.join(MODELS)}"
    if not isinstance(named, list) or len(named) != 1 or named[0] not in MODELS:
        raise ValueError(
            f"architectures is {given.get('architectures')!r} and model_type {model_type!r}; one must be named, and "
            f"{known}"
        )
    if model_type not in (None, MODELS[named[0]].model_type):
        raise ValueError(f"architectures is {named!r}, and model_type is {model_type!r}, which is another one")
    return named[0]


def read_config(folder: str | pathlib.Path, **options: Any) -> tuple[str, DecoderConfig]:
    """(architecture, configuration) of a checkpoint's config.json; missing keys have transformers' defaults.

    Args:
      options: settings that a checkpoint does not have, such as dtype or backend.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: an architecture that is not in `MODELS`, an unsupported feature, or an invalid value; named with the
        file.
    """
    file = pathlib.Path(folder) / NAME
    given = read_json(file)
    try:
        architecture = _architecture(given)
        kind = MODELS[architecture]
        if (
            len({json.dumps(given[key]) for key in ("num_experts", "num_local_experts") if key in given}) == 2
            and kind.experts
        ):
            raise ValueError(
                f"num_experts is {given['num_experts']} and num_local_experts {given['num_local_experts']}; both mean "
                "the same"
            )
        keys = kind.keys.model_validate(given)
        if missing := [name for name, lacks in keys.foreign().items() if lacks]:
            raise ValueError(f"the decoder does not have this checkpoint's {', '.join(missing)}")
        return architecture, DecoderConfig(qk_norm=kind.qk_norm, **keys.sizes(), **options)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, wrong['loc']))} is {wrong['input']!r}: {wrong['msg']}" for wrong in error.errors()
        )
        raise ValueError(f"{file}: {problems}.") from error
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).rstrip('.')}.") from error


def write_config(folder: pathlib.Path, architecture: str, config: DecoderConfig, end: int | None) -> None:
    """
    Args:
      end: the token that ends a text, or None.
    """
    c, kind = config, MODELS[architecture]
    found = {
        "architectures": [architecture],
        "model_type": kind.model_type,
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        kind.hidden: c.hidden,
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
        "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": "silu",
        "sliding_window": None,
    }
    if kind.experts:
        found |= {kind.experts: c.experts, "num_experts_per_tok": c.top_k}
    if kind.normalize:
        found |= {kind.normalize: c.normalize}
    if end is not None:
        found |= {"eos_token_id": end}
    (folder / NAME).write_text(json.dumps(found, indent=2) + "\n")


def end_token(folder: pathlib.Path) -> int | None:
    """The first token that a checkpoint's config.json gives as the end of a text.

    Raises:
      ValueError: no JSON object, or no token.
    """
    end = read_json(folder / NAME).get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if end is not None and (not isinstance(end, int) or isinstance(end, bool) or end < 0):
        raise ValueError(f"{folder / NAME}: eos_token_id is {end!r}; it must be a token's number.")
    return end
