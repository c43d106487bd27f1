"""Which tensors of a checkpoint a decoder's parameters are, for each of Hugging Face's architectures."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from models.decoder import DecoderConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A decoder parameter's tensors in a checkpoint.

    Attributes:
      path: of the parameter.
      name: of its tensors; {layer} numbers the first axis, {expert} the second.
      transposed: whether they are [out, in], as torch's linear layers.
      layers: the numbers of the layers along the first axis.
      part: which of `parts` interleaved ones of a tensor's last axis it is (gpt-oss has gate and up in one).
      by_expert: whether a tensor's first axis are the experts, which are read one by one.
    """

    path: Path
    name: str
    transposed: bool = False
    layers: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1
    by_expert: bool = False

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


def _linear(ours: str, theirs: str, *, bias: bool, fp8: bool) -> list[Entry]:
    path = tuple(ours.split("/"))
    found = [Entry((*path, "kernel"), f"{theirs}.weight", True)]
    if fp8:
        found = [Entry((*path, "weight"), f"{theirs}.weight"), Entry((*path, "scale"), f"{theirs}.weight_scale_inv")]
    return found + ([Entry((*path, "bias"), f"{theirs}.bias")] if bias else [])


def _attention(c: DecoderConfig) -> list[Entry]:
    fp8, found = c.stored_fp8, []
    if c.latent is not None:
        query = [("q_down", "q_a_proj", c.qkv_bias), ("q", "q_b_proj", False)]
        for ours, theirs, bias in (
            *(query if c.latent.query_rank is not None else [("q", "q_proj", False)]),
            ("kv_down", "kv_a_proj_with_mqa", c.qkv_bias),
            ("kv", "kv_b_proj", False),
            ("out", "o_proj", c.out_bias),
        ):
            found += _linear(f"attention/{ours}", f"self_attn.{theirs}", bias=bias, fp8=fp8)
        norms = ("q", "kv") if c.latent.query_rank is not None else ("kv",)
        return found + [Entry(("attention", f"{x}_norm", "scale"), f"self_attn.{x}_a_layernorm.weight") for x in norms]
    for ours, theirs in zip(("q", "k", "v", "out"), "qkvo", strict=True):
        bias = c.out_bias if ours == "out" else c.qkv_bias
        found += _linear(f"attention/{ours}", f"self_attn.{theirs}_proj", bias=bias, fp8=fp8)
    if c.qk_norm:
        found += [Entry(("attention", f"{x}_norm", "scale"), f"self_attn.{x}_norm.weight") for x in "qk"]
    if c.sinks:
        found.append(Entry(("attention", "sinks"), "self_attn.sinks"))
    return found


def _gated_unit(ours: str, theirs: str, c: DecoderConfig) -> list[Entry]:
    return [
        entry
        for part in ("gate", "up", "down")
        for entry in _linear(f"{ours}/{part}", f"{theirs}.{part}_proj", bias=c.mlp_bias, fp8=c.stored_fp8)
    ]


# Of an architecture: the folder of the experts, and the names of gate, up and down.
_EXPERTS = {"MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2"))}
_SHARED = {"Qwen2MoeForCausalLM": "mlp.shared_expert", "DeepseekV3ForCausalLM": "mlp.shared_experts"}


def _experts(architecture: str, c: DecoderConfig) -> list[Entry]:
    moe = ("mlp", "moe")
    if architecture == "GptOssForCausalLM":
        found = [
            Entry((*moe, "router", "kernel"), "mlp.router.weight", True),
            Entry((*moe, "router", "bias"), "mlp.router.bias"),
        ]
        for ours, theirs, part, parts in (("gate", "gate_up", 0, 2), ("up", "gate_up", 1, 2), ("down", "down", 0, 1)):
            name = f"mlp.experts.{theirs}_proj"
            found.append(Entry((*moe, ours), name, part=part, parts=parts, by_expert=True))
            found.append(Entry(("mlp", "bias", ours), f"{name}_bias", part=part, parts=parts))
        return found
    folder, names = _EXPERTS.get(architecture, ("mlp", ("gate_proj", "up_proj", "down_proj")))
    found = [Entry((*moe, "router", "kernel"), f"{folder}.gate.weight", True)]
    if c.selection_bias:
        found.append(Entry((*moe, "router", "selection_bias"), f"{folder}.gate.e_score_correction_bias"))
    for ours, theirs in zip(("gate", "up", "down"), names, strict=True):
        name = f"{folder}.experts.{{expert}}.{theirs}.weight"
        if c.stored_fp8:
            found += [Entry((*moe, ours, "weight"), name), Entry((*moe, ours, "scale"), f"{name}_scale_inv")]
        else:
            found.append(Entry((*moe, ours), name, True))
    if c.shared_hidden:
        found += _gated_unit("mlp/shared", _SHARED[architecture], c)
    if c.shared_gate:
        found.append(Entry(("mlp", "shared_gate", "kernel"), f"{_SHARED[architecture]}_gate.weight", True))
    return found


HEAD = Entry(("head", "kernel"), "lm_head.weight", True)
EMBEDDING = Entry(("embed", "embedding"), "model.embed_tokens.weight")


def table(architecture: str, config: DecoderConfig) -> tuple[Entry, ...]:
    """The entries of all parameters."""
    found = [EMBEDDING, Entry(("norm", "scale"), "model.norm.weight")]
    for number, (stack, layers) in enumerate(zip(("blocks", "dense_blocks"), config.stacks(), strict=False)):
        sparse = config.experts and number == 0
        block = [
            Entry(("attention_norm", "scale"), "input_layernorm.weight"),
            Entry(("mlp_norm", "scale"), "post_attention_layernorm.weight"),
            *_attention(config),
            *(_experts(architecture, config) if sparse else _gated_unit("mlp", "mlp", config)),
        ]
        found += [
            dataclasses.replace(
                entry, path=(stack, *entry.path), name=f"model.layers.{{layer}}.{entry.name}", layers=layers
            )
            for entry in block
        ]
    return (*found, *(() if config.tie_embeddings else (HEAD,)))
