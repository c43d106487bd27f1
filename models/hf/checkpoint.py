"""Checkpoints of Hugging Face's transformers (safetensors), to and from `models.decoder.Decoder`.

docs/checkpoints.md lists architectures and features.
"""

import functools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh

from models.decoder import Decoder, DecoderConfig
from models.distributed.mesh import shardings
from models.generate.inference import inference_dtype
from models.hf.config import MODELS, OF_A_RUN, read_config, write_config
from models.hf.names import EMBEDDING, HEAD, Entry, Path, table
from models.hf.place import Placed
from models.hf.tensors import INDEX, Tensor, is_finite, new_header, read_ahead, read_headers, stored_in, write_file
from models.precision import DTYPES
from models.training.terminal import first_of
from models.training.whole_files import verify, written_whole

NAMED = 20  # things that are wrong, in one error
NOT_LOADED = re.compile(r"\brotary_emb\.inv_freq$")  # older checkpoints hold them; transformers computes them, too
BESIDE = (".json", ".jinja", ".txt", ".model")  # of files that are saved as they came
Params = dict[Path, Any]


def _raise(folder: pathlib.Path, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(f"{folder}: {first_of(wrong, NAMED, '; ')}.")


def _is_loaded(name: str, architecture: str, config: DecoderConfig) -> bool:
    """Not layers after the last one, DeepSeek's for predicting several tokens: transformers skips them, too."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    after = architecture == "DeepseekV3ForCausalLM" and layer is not None and int(layer[1]) >= config.layers
    return not after and NOT_LOADED.search(name) is None


Use = tuple[Entry, tuple[int, ...]]


def uses_of(entries: Iterable[Entry], shapes: dict[Path, Any]) -> dict[str, list[Use]]:
    """The parameters that a tensor holds, by its name."""
    found: dict[str, list[Use]] = {}
    for entry in entries:
        for name, index in entry.tensors(shapes[entry.path].shape):
            found.setdefault(name, []).append((entry, index))
    return found


def load(
    folder: str | pathlib.Path, *, mesh: Mesh | None = None, param_dtype: str = "float32",
    ignore_config: Collection[str] = (), **options: Any,
) -> tuple[str, Decoder]:  # fmt: skip
    """(architecture, model) of a checkpoint, read tensor by tensor into parameters on their devices.

    The host holds two tensors at a time, of experts in one tensor two experts, and parameters of less than 16 MB a
    device until they are whole.

    Args:
      folder: has config.json and model.safetensors, or the files of model.safetensors.index.json. A SHA256SUMS, as
        `save` writes it, is verified first.
      mesh: devices that the parameters are split over, as `models.distributed.mesh.shardings` says; None for one.
      param_dtype: of the matrices that `models.generate.inference.for_inference` casts, never made in float32:
        for inference give the dtype of the computation. Norms, biases, sinks and routers are float32.
      ignore_config: unknown keys of config.json to go on without; see `models.hf.config.read_config`.
      options: settings that a checkpoint does not have, such as dtype, attention or backend of `DecoderConfig`. With
        stored_fp8=True the matrices of an FP8 checkpoint stay in FP8, for inference.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unknown param_dtype, or another one than float32 with a recipe; another architecture, a damaged
        file, or tensors that are missing, unknown, of another shape than config.json says, of an unsupported dtype or
        not finite; all of them are named.
    """
    folder = pathlib.Path(folder)
    verify(folder)
    architecture, config = read_config(folder, ignore_config=ignore_config, **options)
    if param_dtype not in DTYPES:
        raise ValueError(f"param_dtype is {param_dtype!r}; write one of {', '.join(DTYPES)}.")
    if config.recipe is not None and param_dtype != "float32":
        raise ValueError(f"param_dtype is {param_dtype!r}, and recipe {config.recipe!r} casts float32: leave one out.")
    wrong: list[str] = []
    tensors = [tensor for _, _, some in read_headers(folder) for tensor in some]
    tensors = [tensor for tensor in tensors if _is_loaded(tensor.name, architecture, config)]
    stored = stored_in(tensors, config.stored_fp8, wrong)
    # Before the names are made: config.json may say any number of them.
    if config.layers * max(1, 0 if config.expert_bias else config.experts) > 2 * len(tensors) + NAMED:
        wrong.append(f"it has {len(tensors)} tensors, too few for config.json's {config.layers} layers")
        _raise(folder, wrong)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    shapes: Params = traverse_util.flatten_dict(nnx.to_pure_dict(abstract))
    splits: Params = {} if mesh is None else traverse_util.flatten_dict(nnx.to_pure_dict(shardings(abstract, mesh)))
    entries = table(architecture, config)
    uses = uses_of(entries, shapes)
    tied_head = config.tie_embeddings and HEAD.name in stored
    for name, found in stored.items():
        if name in uses:
            entry, _ = uses[name][0]
            expected = entry.tensor_shape(shapes[entry.path].shape)
            if found.shape != expected:
                wrong.append(f"{name} is {list(found.shape)}, and config.json says {list(expected)}")
            if (found.kind == "raw") != (entry.path[-1] == "weight"):
                wrong.append(f"{name} is {found.tensors[0].dtype}, and stored_fp8 needs float8 with weight_scale_inv")
        elif not (tied_head and name == HEAD.name):
            wrong.append(f"{name} is not a part of the model")
    wrong += [f"{name} is missing" for name in sorted(uses.keys() - stored.keys())]
    _raise(folder, wrong)

    paths = {entry.path for entry in entries}
    dtypes = {path: inference_dtype("/".join(path), shapes[path].dtype, param_dtype) for path in paths}
    placed = {path: Placed(shapes[path].shape, dtypes[path], splits.get(path)) for path in paths}
    sent: list[jax.Array] = []
    finite: dict[str, list[Any]] = {}
    reads = []
    for name, found in stored.items():
        own = uses.get(name, [])
        by_expert = any(entry.by_expert for entry, _ in own)
        for at in [(expert,) for expert in range(found.shape[0])] if by_expert else [()]:
            if not own or any(placed[entry.path].wants((*index, *at)) for entry, index in own):
                reads.append((name, at))
    arrays = read_ahead(functools.partial(stored[name].read, *at) for name, at in reads)
    for (name, at), array in zip(reads, arrays, strict=True):
        # One tensor is read while the one before is copied; a slow device would otherwise leave many on the host.
        jax.block_until_ready([part for part in sent if not part.is_deleted()])
        sent = []
        own = uses.get(name, [])
        flags = finite.setdefault(name, [] if own else [is_finite(array)])
        for entry, index in own:
            copies, checks = placed[entry.path].put((*index, *at), entry.from_tensor(array))
            sent += copies
            flags += checks
    for name, flags in jax.device_get(finite).items():
        if not all(flags):
            wrong.append(f"{name} in {stored[name].tensors[0].file.name} has a NaN or an infinity")
    params: Params = {path: placed.pop(path).whole() if path in paths else shapes[path] for path in shapes}
    if tied_head:
        head, shards = stored[HEAD.name].read(), params[EMBEDDING.path].addressable_shards
        if not all(np.array_equal(head[shard.index].astype(shard.data.dtype), shard.data) for shard in shards):
            wrong.append(f"{HEAD.name} is not {EMBEDDING.name}, and config.json ties them (tie_word_embeddings)")
    _raise(folder, wrong)
    nnx.replace_by_pure_dict(abstract, traverse_util.unflatten_dict(params))
    return architecture, nnx.merge(graphdef, abstract)


def save(
    folder: str | pathlib.Path, architecture: str, model: Decoder, *, like: str | pathlib.Path | None = None,
    dtype: str = "float32", max_bytes: int = 5 * 10**9, end: int | None = None,
    beside: dict[str, str | bytes] | None = None,
) -> None:  # fmt: skip
    """Writes a checkpoint that transformers loads, as one file or several with an index, and SHA256SUMS.

    The files get their names when all are complete. The host holds one tensor at a time.

    Args:
      folder: created if missing.
      architecture: one of `MODELS`.
      like: the checkpoint that the model was loaded from. Then files, names, dtypes, quantization and config.json are
        as there, with the small files beside them: weights that did not change are saved as the same bytes. dtype,
        max_bytes and end do not count.
      dtype: of the tensors.
      max_bytes: approximate size limit of a file.
      end: the token that ends a text, for config.json.
      beside: further files by name, such as tokenizer.json; text is UTF-8.

    Raises:
      ValueError: an architecture that is not in `MODELS`, or not this model's or like's.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture={architecture!r}: write one of {', '.join(MODELS)}.")
    params: Params = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model)))
    with written_whole(pathlib.Path(folder)) as new:
        if like is None:
            write_config(new, architecture, model.config, end)
        else:
            _copy_beside(new, pathlib.Path(like), architecture, model.config)
        entries = table(architecture, model.config)
        params = {path: array for path, array in params.items() if path[-1] != "amax_history"}
        if differ := sorted(".".join(path) for path in {entry.path for entry in entries} ^ set(params)):
            raise ValueError(f"this model is no {architecture}: they differ in {', '.join(differ)}.")
        uses = uses_of(entries, params)
        if like is None:
            if model.config.stored_fp8:
                raise ValueError("a model with stored_fp8 is saved like the checkpoint that it came from: give like.")
            _save_new(new, uses, params, dtype, max_bytes)
        else:
            _save_like(new, pathlib.Path(like), uses, params, architecture, model.config)
        for name, text in (beside or {}).items():
            (new / name).write_bytes(text.encode() if isinstance(text, str) else text)


def checkpoint_tensor(uses: list[Use], params: Params) -> np.ndarray:
    """The tensor that these parameters are parts of, float32 or raw float8."""
    arrays = []
    for entry, index in uses:
        array = np.asarray(params[entry.path][index] if index else params[entry.path])
        arrays.append(array.T if entry.transposed else array)
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)


def _save_new(folder: pathlib.Path, uses: dict[str, list[Use]], params: Params, dtype: str, max_bytes: int) -> None:
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    shards: list[list[str]] = [[]]
    held = total = 0
    shapes = {name: some[0][0].tensor_shape(params[some[0][0].path].shape) for name, some in uses.items()}
    for name, shape in shapes.items():
        each = int(np.prod(shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize
        if shards[-1] and held + each > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held, total = held + each, total + each
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = new_header((name, kind, shapes[name]) for name in shard)
        makes = (lambda name=name: checkpoint_tensor(uses[name], params).astype(jnp.dtype(dtype)) for name in shard)
        write_file(folder / file, header, makes)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _copy_beside(new: pathlib.Path, like: pathlib.Path, architecture: str, config: DecoderConfig) -> None:
    """config.json and other small files of `like`, which must be of the same architecture and settings."""
    # Unknown keys have been checked when the model was loaded.
    named, settings = read_config(like, ignore_config=None, **{name: getattr(config, name) for name in OF_A_RUN})
    if named != architecture or settings != config:
        raise ValueError(f"{like} is a {named} of other settings than this {architecture}: save it without like.")
    for file in sorted(like.iterdir()):
        if file.suffix in BESIDE and file.is_file():
            shutil.copyfile(file, new / file.name)


def _save_like(
    new: pathlib.Path, like: pathlib.Path, uses: dict[str, list[Use]], params: Params, architecture: str,
    config: DecoderConfig,
) -> None:  # fmt: skip
    wrong: list[str] = []
    files = list(read_headers(like))
    loaded = [tensor for _, _, some in files for tensor in some if _is_loaded(tensor.name, architecture, config)]
    stored = stored_in(loaded, config.stored_fp8, wrong)
    _raise(like, wrong + [f"{name} is missing" for name in sorted(uses.keys() - stored.keys())])
    owner = {tensor.name: found for found in stored.values() for tensor in found.tensors}
    made: dict[str, np.ndarray] = {}  # of the quantized tensor that is being written

    def make(tensor: Tensor) -> np.ndarray:
        found = owner.get(tensor.name)
        if found is None or (found.name not in uses and found.name != HEAD.name):
            return tensor.read()
        if tensor.name not in made:
            made.clear()
            own = uses[found.name if found.name in uses else EMBEDDING.name]  # the head of a tied model
            parts = found.write(checkpoint_tensor(own, params))
            made.update(zip((part.name for part in found.tensors), parts, strict=True))
        return made.pop(tensor.name)

    for file, header, tensors in files:
        makes: Iterator[Callable[[], np.ndarray]] = (lambda tensor=tensor: make(tensor) for tensor in tensors)
        write_file(new / file.name, header, makes)
