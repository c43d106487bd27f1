"""Which tensors of a checkpoint a decoder's parameters are, for each of Hugging Face's architectures."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from models.decoder import DecoderConfig
from models.hf.families import MODELS, Family

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A decoder parameter's tensors in a checkpoint."""

    path: Path  # of the parameter
    name: str  # of its tensors; {layer} numbers the first axis, {expert} the second
    transposed: bool = False  # whether they are [out, in], as torch's linear layers
    layers: tuple[int, ...] = ()  # the numbers of the layers along the first axis
    part: int = 0  # which of `parts` interleaved ones of a tensor's last axis it is (gpt-oss has gate and up in one)
    parts: int = 1
    by_expert: bool = False  # whether a tensor's first axis are the experts, which are read one by one

    def tensors(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, index into the parameter) of each tensor of a parameter of `shape`."""
        axes = [axis for axis in ("layer", "expert") if f"{{{axis}}}" in self.name]
        for index in itertools.product(*(range(shape[number]) for number in range(len(axes)))):
            numbers = dict(zip(axes, index, strict=True))
            if "layer" in numbers:
                numbers["layer"] = self.layers[numbers["layer"]]
            yield self.name.format(**numbers), index

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor."""
        own = shape[self.name.count("{") :]
        own = (*own[:-1], own[-1] * self.parts)
        return own[::-1] if self.transposed else own

    def from_tensor(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter's part of a tensor, or of one expert's."""
        tensor = tensor.T if self.transposed else tensor
        return tensor[..., self.part :: self.parts]


def _entry(ours: str, theirs: str, transposed: bool = False, **more: Any) -> Entry:
    return Entry(tuple(ours.split("/")), theirs, transposed, **more)


def _linear(ours: str, theirs: str, c: DecoderConfig, bias: bool = False) -> list[Entry]:
    found = [_entry(f"{ours}/kernel", f"{theirs}.weight", True)]
    if c.stored_fp8:
        found = [_entry(f"{ours}/weight", f"{theirs}.weight"), _entry(f"{ours}/scale", f"{theirs}.weight_scale_inv")]
    return [*found, _entry(f"{ours}/bias", f"{theirs}.bias")] if bias else found


def _attention(c: DecoderConfig) -> list[Entry]:
    linears = {"q": ("q_proj", c.qkv_bias), "k": ("k_proj", c.qkv_bias), "v": ("v_proj", c.qkv_bias)}
    norms = {"q_norm": "q_norm", "k_norm": "k_norm"} if c.qk_norm else {}
    if c.latent is not None:
        linears, norms = {"q": ("q_proj", False)}, {"kv_norm": "kv_a_layernorm"}
        if c.latent.query_rank is not None:
            linears = {"q_down": ("q_a_proj", c.qkv_bias), "q": ("q_b_proj", False)}
            norms["q_norm"] = "q_a_layernorm"
        linears |= {"kv_down": ("kv_a_proj_with_mqa", c.qkv_bias), "kv": ("kv_b_proj", False)}
    linears["out"] = ("o_proj", c.out_bias)
    found = [_entry("attention/sinks", "self_attn.sinks")] if c.sinks else []
    for ours, (theirs, bias) in linears.items():
        found += _linear(f"attention/{ours}", f"self_attn.{theirs}", c, bias)
    return found + [_entry(f"attention/{x}/scale", f"self_attn.{theirs}.weight") for x, theirs in norms.items()]


def _gated_unit(ours: str, theirs: str, c: DecoderConfig) -> list[Entry]:
    linear = lambda part: _linear(f"{ours}/{part}", f"{theirs}.{part}_proj", c, c.mlp_bias)
    return [*linear("gate"), *linear("up"), *linear("down")]


def _gpt_oss_experts() -> list[Entry]:
    found = [_entry("mlp/moe/router/kernel", "mlp.router.weight", True)]
    found.append(_entry("mlp/moe/router/bias", "mlp.router.bias"))
    for ours, theirs, part, parts in (("gate", "gate_up", 0, 2), ("up", "gate_up", 1, 2), ("down", "down", 0, 1)):
        name = f"mlp.experts.{theirs}_proj"
        found.append(_entry(f"mlp/moe/{ours}", name, part=part, parts=parts, by_expert=True))
        found.append(_entry(f"mlp/moe/{ours}_bias", f"{name}_bias", part=part, parts=parts))
    return found


def _experts(family: Family, c: DecoderConfig) -> list[Entry]:
    folder, *names = family.expert_names
    found = [_entry("mlp/moe/router/kernel", f"{folder}.gate.weight", True)]
    if c.selection_bias:
        found.append(_entry("mlp/moe/router/selection_bias", f"{folder}.gate.e_score_correction_bias"))
    for ours, theirs in zip(("gate", "up", "down"), names, strict=True):
        name = f"{folder}.experts.{{expert}}.{theirs}.weight"
        if c.stored_fp8:
            found += [_entry(f"mlp/moe/{ours}/weight", name), _entry(f"mlp/moe/{ours}/scale", f"{name}_scale_inv")]
        else:
            found.append(_entry(f"mlp/moe/{ours}", name, True))
    if c.shared_hidden:
        found += _gated_unit("mlp/shared", family.shared, c)
    if c.shared_gate:
        found.append(_entry("mlp/shared_gate/kernel", f"{family.shared}_gate.weight", True))
    return found


HEAD = _entry("head/kernel", "lm_head.weight", True)
EMBEDDING = _entry("embed/embedding", "model.embed_tokens.weight")


def table(architecture: str, config: DecoderConfig) -> tuple[Entry, ...]:
    """The entries of all parameters."""
    found = [EMBEDDING, _entry("norm/scale", "model.norm.weight")]
    for stack, layers in zip(("blocks", "dense_blocks"), config.stacks(), strict=False):
        block = [
            _entry("attention_norm/scale", "input_layernorm.weight"),
            _entry("mlp_norm/scale", "post_attention_layernorm.weight"),
            *_attention(config),
        ]
        if stack == "dense_blocks" or not config.experts:
            block += _gated_unit("mlp", "mlp", config)
        else:
            block += _gpt_oss_experts() if config.expert_bias else _experts(MODELS[architecture], config)
        for entry in block:
            name = f"model.layers.{{layer}}.{entry.name}"
            found.append(dataclasses.replace(entry, path=(stack, *entry.path), name=name, layers=layers))
    return (*found, *(() if config.tie_embeddings else (HEAD,)))
