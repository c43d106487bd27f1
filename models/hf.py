"""Checkpoints as Hugging Face's transformers has them (safetensors): Llama, Qwen3, Mixtral and Qwen3-MoE, to and from a `models.decoder.Decoder`."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax import nnx, traverse_util

from models.decoder import Decoder, DecoderConfig

INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a parameter of the decoder is in a checkpoint.

    Attributes:
      path: of the parameter.
      name: of its tensors; with {layer} one for each of the first axis, and with {expert} one for each of the second.
      transposed: whether they are [out, in], as torch has linear layers.
    """

    path: tuple[str, ...]
    name: str
    transposed: bool = False


_LAYER = "model.layers.{layer}."
COMMON = (
    Entry(("embed", "embedding"), "model.embed_tokens.weight"),
    Entry(("norm", "scale"), "model.norm.weight"),
    Entry(("blocks", "attention_norm", "scale"), _LAYER + "input_layernorm.weight"),
    Entry(("blocks", "mlp_norm", "scale"), _LAYER + "post_attention_layernorm.weight"),
    *(
        Entry(("blocks", "attention", ours, "kernel"), f"{_LAYER}self_attn.{theirs}_proj.weight", True)
        for ours, theirs in zip(("q", "k", "v", "out"), "qkvo", strict=True)
    ),
)
HEAD = Entry(("head", "kernel"), "lm_head.weight", True)
QK_NORM = tuple(Entry(("blocks", "attention", f"{x}_norm", "scale"), f"{_LAYER}self_attn.{x}_norm.weight") for x in "qk")
DENSE = tuple(Entry(("blocks", "mlp", part, "kernel"), f"{_LAYER}mlp.{part}_proj.weight", True) for part in ("gate", "up", "down"))


def _experts(folder: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    router = Entry(("blocks", "mlp", "moe", "router", "kernel"), f"{_LAYER}{folder}.gate.weight", True)
    named = (("gate", gate), ("up", up), ("down", down))
    return (router, *(Entry(("blocks", "mlp", "moe", ours), f"{_LAYER}{folder}.experts.{{expert}}.{theirs}.weight", True) for ours, theirs in named))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What tells one from another.

    Attributes:
      model_type: config.json's name of it.
      blocks: what its blocks have beside `COMMON`.
      hidden: config.json's name of the width inside a gated unit or an expert.
      experts: of how many experts there are; None of a dense model. transformers 5 writes "num_local_experts" for all of them and reads both.
      normalize: of whether a token's weights of its experts are divided by their sum; None where they are.
    """

    model_type: str
    blocks: tuple[Entry, ...]
    hidden: str = "intermediate_size"
    experts: str | None = None
    normalize: str | None = None

    @property
    def qk_norm(self) -> bool:
        return QK_NORM[0] in self.blocks


MODELS = {
    "LlamaForCausalLM": Architecture("llama", DENSE),
    "Qwen3ForCausalLM": Architecture("qwen3", QK_NORM + DENSE),
    "MixtralForCausalLM": Architecture("mixtral", _experts("block_sparse_moe", "w1", "w3", "w2"), experts="num_local_experts"),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", QK_NORM + _experts("mlp", "gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", "num_experts", "norm_topk_prob"
    ),
}


def fitting(config: DecoderConfig) -> str | None:
    """The architecture that a model of this configuration is saved as; None where there is none."""
    for name, kind in MODELS.items():
        if (kind.qk_norm, bool(kind.experts)) == (config.qk_norm, bool(config.experts)) and (config.normalize or kind.normalize or not kind.experts):
            return name
    return None


def table(architecture: str, config: DecoderConfig) -> tuple[Entry, ...]:
    """Of every parameter."""
    return COMMON + MODELS[architecture].blocks + (() if config.tie_embeddings else (HEAD,))


def read_config(folder: str | pathlib.Path, **options: Any) -> tuple[str, DecoderConfig]:
    """(architecture, its configuration) of a checkpoint's config.json. options: what a checkpoint does not say, such as dtype or backend.

    Raises:
      ValueError: an architecture that is not in `MODELS`, or one with something that the decoder has not.
    """
    file = pathlib.Path(folder) / "config.json"
    given = json.loads(file.read_text())
    (architecture,) = given.get("architectures") or ("none",)
    if architecture not in MODELS:
        raise ValueError(f"{file} is of architecture {architecture}; these are known: {', '.join(MODELS)}.")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    without = {
        "rope type": rope.get("rope_type", rope.get("type", "default")) == "default",
        "hidden_act": given.get("hidden_act", "silu") == "silu",
        "attention_bias": not given.get("attention_bias"),
        "mlp_bias": not given.get("mlp_bias"),
        "sliding window": not (given.get("sliding_window") and given.get("use_sliding_window", True)),
        "dense layers among experts": not given.get("mlp_only_layers") and given.get("decoder_sparse_step", 1) == 1,
    }
    if missing := [name for name, fine in without.items() if not fine]:
        raise ValueError(f"{file}: the decoder does not have this checkpoint's {', '.join(missing)}.")
    kind, heads = MODELS[architecture], given["num_attention_heads"]
    config = DecoderConfig(
        vocab=given["vocab_size"],
        width=given["hidden_size"],
        layers=given["num_hidden_layers"],
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        hidden=given[kind.hidden],
        experts=given.get(kind.experts) or given["num_local_experts"] if kind.experts else 0,
        top_k=given["num_experts_per_tok"] if kind.experts else 0,
        normalize=given.get(kind.normalize, False) if kind.normalize else True,  # transformers' default, too
        qk_norm=kind.qk_norm,
        rope_base=float(rope.get("rope_theta", given.get("rope_theta", 10_000.0))),
        norm_eps=given.get("rms_norm_eps", 1e-6),
        tie_embeddings=given.get("tie_word_embeddings", False),
        **options,
    )
    return architecture, config


def write_config(folder: pathlib.Path, architecture: str, config: DecoderConfig, end: int | None) -> None:
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
        "rms_norm_eps": c.norm_eps,
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
    (folder / "config.json").write_text(json.dumps(found, indent=2) + "\n")


def tensors(entry: Entry, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, index into the parameter) of each tensor that a parameter of `shape` is made of."""
    sizes = [shape[i] for i, axis in enumerate(("{layer}", "{expert}")) if axis in entry.name]
    for index in itertools.product(*map(range, sizes)):
        yield entry.name.format(**dict(zip(("layer", "expert"), index, strict=False))), index


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """
    Raises:
      FileNotFoundError: there is no checkpoint, or it lacks a file that its index names.
    """
    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}.")
    return [folder / name for name in names]


def load(folder: str | pathlib.Path, **options: Any) -> tuple[str, Decoder]:
    """(architecture, the model) of a checkpoint: one tensor at a time is read, into the parameters' memory, as float32.

    Args:
      folder: with config.json and model.safetensors, or the files that model.safetensors.index.json names.
      options: what a checkpoint does not say, such as dtype, attention or backend of `DecoderConfig`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: another architecture, tensors that are missing, that nobody asked for, or of another shape than config.json says: all of them are named.
    """
    folder = pathlib.Path(folder)
    architecture, config = read_config(folder, **options)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, abstract = nnx.split(model)
    wanted: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(nnx.to_pure_dict(abstract))
    wrong: list[str] = []
    where: dict[str, tuple[Entry, np.ndarray, tuple[int, ...]]] = {}
    for entry in table(architecture, config):
        into = wanted[entry.path] = np.empty(wanted[entry.path].shape, np.float32)
        where |= {name: (entry, into, index) for name, index in tensors(entry, into.shape)}
    unread = set(where)
    for file in _files(folder):
        with safetensors.safe_open(file, framework="flax") as stored:
            names = stored.keys()
            for name in names:
                if name not in where:
                    wrong.append(f"{name} is not a part of the model")
                    continue
                entry, into, index = where[name]
                unread.discard(name)
                tensor = np.asarray(stored.get_tensor(name).astype(jnp.float32))
                tensor = tensor.T if entry.transposed else tensor
                if tensor.shape != into[index].shape:
                    said = into[index].T.shape if entry.transposed else into[index].shape
                    wrong.append(f"{name} is {list(stored.get_tensor(name).shape)}, and config.json says {list(said)}")
                    continue
                into[index] = tensor
    wrong += [f"{name} is missing" for name in sorted(unread)]
    if wrong:
        shown = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(f"{folder}: {shown}.")
    nnx.replace_by_pure_dict(abstract, traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, wanted)))
    return architecture, nnx.merge(graphdef, abstract)


def save(folder: str | pathlib.Path, architecture: str, model: Decoder, *, dtype: str = "float32", max_bytes: int = 5 * 10**9, end: int | None = None) -> None:
    """Writes a checkpoint that transformers loads: config.json and model.safetensors, or several files and their index.

    Args:
      folder: made if it is not there.
      architecture: one of `MODELS`.
      dtype: of the tensors.
      max_bytes: about how much one file holds.
      end: the token that ends a text, for config.json.

    Raises:
      ValueError: an architecture that is not in `MODELS`, or not this model's.
    """
    folder = pathlib.Path(folder)
    if architecture not in MODELS:
        raise ValueError(f"architecture={architecture!r}: write one of {', '.join(MODELS)}.")
    params: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    entries = table(architecture, model.config)
    if differ := sorted(".".join(path) for path in {entry.path for entry in entries} ^ set(params)):
        raise ValueError(f"this model is no {architecture}: they differ in {', '.join(differ)}.")
    shards: list[list[tuple[Entry, str, tuple[int, ...]]]] = [[]]
    held = 0
    for entry in entries:
        whole = params[entry.path]
        found = list(tensors(entry, whole.shape))
        each = whole.size // len(found) * jnp.dtype(dtype).itemsize
        for name, index in found:
            if shards[-1] and held + each > max_bytes:
                shards.append([])
                held = 0
            shards[-1].append((entry, name, index))
            held += each
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, architecture, model.config, end)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        written = {}
        for entry, name, index in shard:
            tensor = params[entry.path][index].astype(dtype)
            written[name] = tensor.T if entry.transposed else tensor
            total += tensor.nbytes
        safetensors.flax.save_file(written, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(written, file)
    if len(shards) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
