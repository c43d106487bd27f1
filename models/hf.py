"""Checkpoints of Hugging Face's transformers (safetensors), to and from `models.decoder.Decoder`.

Llama, Qwen3, Mixtral and Qwen3-MoE.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax import nnx, traverse_util

from models.decoder import Decoder, DecoderConfig
from models.hf_config import MODELS, read_config, read_json, write_config
from models.whole_files import verify, written_whole

INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
NAMED = 20  # things that are wrong, in one error
NOT_LOADED = re.compile(r"\brotary_emb\.inv_freq$")  # older checkpoints hold them; transformers computes them, too


@dataclasses.dataclass(frozen=True)
class Entry:
    """A decoder parameter's tensors in a checkpoint.

    Attributes:
      path: of the parameter.
      name: of its tensors; {layer} numbers the first axis, {expert} the second.
      transposed: whether they are [out, in], as torch's linear layers.
    """

    path: tuple[str, ...]
    name: str
    transposed: bool = False

    def sizes(self, shape: tuple[int, ...]) -> list[int]:
        """Sizes of the axes of a parameter of `shape` that are split into tensors."""
        return [shape[i] for i, axis in enumerate(("{layer}", "{expert}")) if axis in self.name]


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
QK_NORM = tuple(
    Entry(("blocks", "attention", f"{x}_norm", "scale"), f"{_LAYER}self_attn.{x}_norm.weight") for x in "qk"
)
DENSE = tuple(
    Entry(("blocks", "mlp", part, "kernel"), f"{_LAYER}mlp.{part}_proj.weight", True) for part in ("gate", "up", "down")
)


def _experts(folder: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    router = Entry(("blocks", "mlp", "moe", "router", "kernel"), f"{_LAYER}{folder}.gate.weight", True)
    named = (("gate", gate), ("up", up), ("down", down))
    return (
        router,
        *(
            Entry(("blocks", "mlp", "moe", ours), f"{_LAYER}{folder}.experts.{{expert}}.{theirs}.weight", True)
            for ours, theirs in named
        ),
    )


# Block parameters beside those of `COMMON`.
BLOCKS = {
    "LlamaForCausalLM": DENSE,
    "Qwen3ForCausalLM": QK_NORM + DENSE,
    "MixtralForCausalLM": _experts("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": QK_NORM + _experts("mlp", "gate_proj", "up_proj", "down_proj"),
}


def table(architecture: str, config: DecoderConfig) -> tuple[Entry, ...]:
    """The entries of all parameters."""
    return COMMON + BLOCKS[architecture] + (() if config.tie_embeddings else (HEAD,))


def tensors(entry: Entry, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, index into the parameter) of each tensor of a parameter of `shape`."""
    for index in itertools.product(*map(range, entry.sizes(shape))):
        yield entry.name.format(**dict(zip(("layer", "expert"), index, strict=False))), index


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """
    Raises:
      FileNotFoundError: there is no checkpoint, or it lacks a file that its index names.
      ValueError: an index that says no files.
    """
    index, names = folder / INDEX, ["model.safetensors"]
    if index.exists():
        named = read_json(index).get("weight_map")
        names = (
            sorted(set(named.values()))
            if isinstance(named, dict) and all(isinstance(name, str) for name in named.values())
            else []
        )
        if not names or any(pathlib.Path(name).name != name for name in names):
            raise ValueError(
                f'{index}: "weight_map" must give a file in this folder for each tensor. Copy the file again.'
            )
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}. Copy what is missing.")
    return [folder / name for name in names]


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    """
    Raises:
      ValueError: no safetensors file.
    """
    try:
        with safetensors.safe_open(file, framework="flax") as stored:
            yield stored
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Copy the file again.") from error


def _headers(files: list[pathlib.Path], wrong: list[str]) -> dict[str, tuple[pathlib.Path, tuple[int, ...]]]:
    """The file and shape of each tensor to load; `wrong` collects those that cannot be loaded."""
    found = {}
    for file in files:
        with _opened(file) as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                header = stored.get_slice(name)
                if NOT_LOADED.search(name):
                    continue
                if name in found:
                    wrong.append(f"{name} is in {found[name][0].name} and in {file.name}")
                if header.get_dtype() not in DTYPES:
                    wrong.append(f"{name} in {file.name} is {header.get_dtype()}; only {', '.join(DTYPES)} are read")
                found[name] = file, tuple(header.get_shape())
    return found


def _raise(folder: pathlib.Path, wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise ValueError(f"{folder}: {'; '.join(wrong[:NAMED])}{more}.")


def load(folder: str | pathlib.Path, **options: Any) -> tuple[str, Decoder]:
    """(architecture, model) of a checkpoint, read tensor by tensor into float32 parameters.

    Args:
      folder: has config.json and model.safetensors, or the files of model.safetensors.index.json. A SHA256SUMS, as
        `save` writes it, is verified first.
      options: settings that a checkpoint does not have, such as dtype, attention or backend of `DecoderConfig`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: another architecture, a damaged file, or tensors that are missing, unknown, of another shape than
        config.json says, of an unsupported dtype or not finite; all of them are named.
    """
    folder = pathlib.Path(folder)
    verify(folder)
    architecture, config = read_config(folder, **options)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    params: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(nnx.to_pure_dict(abstract))
    wrong: list[str] = []
    headers = _headers(_files(folder), wrong)
    entries = table(architecture, config)
    if (count := sum(math.prod(entry.sizes(params[entry.path].shape)) for entry in entries)) > 2 * len(headers) + NAMED:
        wrong.append(f"it has {len(headers)} tensors, and with config.json there would be {count}")
        _raise(folder, wrong)
    where = {name: (entry, index) for entry in entries for name, index in tensors(entry, params[entry.path].shape)}
    second_head: np.ndarray | None = None
    tied_head = config.tie_embeddings and HEAD.name in headers
    for name, (_, shape) in headers.items():
        if name in where:
            entry, index = where[name]
            expected = params[entry.path].shape[len(index) :]
            expected = expected[::-1] if entry.transposed else expected
            if shape != expected:
                wrong.append(f"{name} is {list(shape)}, and config.json says {list(expected)}")
        elif not (tied_head and name == HEAD.name):
            wrong.append(f"{name} is not a part of the model")
    wrong += [f"{name} is missing" for name in sorted(where.keys() - headers.keys())]
    _raise(folder, wrong)

    params |= {entry.path: np.empty(params[entry.path].shape, np.float32) for entry in entries}
    for file in sorted({file for file, _ in headers.values()}):
        with _opened(file) as stored:
            for name in (name for name, (found_in, _) in headers.items() if found_in == file):
                tensor = np.asarray(stored.get_tensor(name).astype(jnp.float32))
                if not np.isfinite(tensor).all():
                    wrong.append(f"{name} in {file.name} has a NaN or an infinity")
                if name in where:
                    entry, index = where[name]
                    params[entry.path][index] = tensor.T if entry.transposed else tensor
                else:
                    second_head = tensor
    if second_head is not None and not np.array_equal(second_head, params[COMMON[0].path]):
        wrong.append(f"{HEAD.name} is not {COMMON[0].name}, and config.json ties them")
    _raise(folder, wrong)
    nnx.replace_by_pure_dict(abstract, traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, params)))
    return architecture, nnx.merge(graphdef, abstract)


def save(
    folder: str | pathlib.Path,
    architecture: str,
    model: Decoder,
    *,
    dtype: str = "float32",
    max_bytes: int = 5 * 10**9,
    end: int | None = None,
    beside: dict[str, str] | None = None,
) -> None:
    """Writes a checkpoint that transformers loads, as one file or several with an index, and SHA256SUMS.

    The files get their names when all are complete.

    Args:
      folder: created if missing.
      architecture: one of `MODELS`.
      dtype: of the tensors.
      max_bytes: approximate size limit of a file.
      end: the token that ends a text, for config.json.
      beside: further text files by name, such as tokenizer.json.

    Raises:
      ValueError: an architecture that is not in `MODELS`, or not this model's.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture={architecture!r}: write one of {', '.join(MODELS)}.")
    params: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    entries = table(architecture, model.config)
    if differ := sorted(".".join(path) for path in {entry.path for entry in entries} ^ set(params)):
        raise ValueError(f"this model is no {architecture}: they differ in {', '.join(differ)}.")
    with written_whole(pathlib.Path(folder)) as new:
        write_config(new, architecture, model.config, end)
        _save_tensors(new, entries, params, dtype, max_bytes)
        for name, text in (beside or {}).items():
            (new / name).write_text(text)


def _save_tensors(
    folder: pathlib.Path, entries: tuple[Entry, ...], params: dict[tuple[str, ...], Any], dtype: str, max_bytes: int
) -> None:
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
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        )
