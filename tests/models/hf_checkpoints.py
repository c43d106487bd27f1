"""The small checkpoints in tests/data/hf, and changed copies of them."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import safetensors
from flax import nnx

from models import hf
from models.decoder import Decoder
from models.hf.tensors import DTYPES, new_header, write_file
from tests.arrays import put

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf"
NAMES = sorted(folder.name for folder in DATA.iterdir())
# Whose parts other ones have.
ALIKE = ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe_weights_as_they_are", "gpt_oss_mxfp4")


@functools.cache
def loaded(name: str) -> tuple[str, Decoder]:
    """A checkpoint on the XLA backend, which no test changes. Like new arrays it is on no device for good: what is
    computed with them is neither, and takes the same programs."""
    architecture, model = hf.load(DATA / name, backend="xla")
    nnx.update(model, jax.tree.map(lambda x: put(np.asarray(x)), nnx.state(model)))
    return architecture, model


def read(file: pathlib.Path) -> dict[str, jax.Array]:
    """By the library's own parser, which knows float8, as its functions for arrays do not."""
    return {
        name: put(np.frombuffer(said["data"], DTYPES[said["dtype"]]).reshape(said["shape"]))
        for name, said in safetensors.deserialize(file.read_bytes())
    }


def write(file: pathlib.Path, tensors: dict[str, jax.Array]) -> None:
    kinds = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    found = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    header = new_header((name, kinds[x.dtype], x.shape) for name, x in found.items())
    write_file(file, header, (lambda x=x: x for x in found.values()))


def stored(folder: pathlib.Path) -> dict[str, jax.Array]:
    return {name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in read(file).items()}


def changed(tmp_path: pathlib.Path, name: str = "mixtral", tensors=None, **config) -> pathlib.Path:
    """A copy with other tensors, or other keys of config.json: None leaves one out."""
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder, ignore=lambda *_: ["expected.safetensors"])
    if tensors is not None:
        found = stored(folder)
        tensors(found)
        write(folder / "model.safetensors", found)
    say(folder, name, **config)
    return folder


def say(folder: pathlib.Path, name: str, **config) -> None:
    """Writes the config.json of a checkpoint with other keys: None leaves one out, "null" makes it null."""
    said = json.loads((DATA / name / "config.json").read_text()) | config
    left = {key: value for key, value in said.items() if key not in config or value is not None}
    left = {key: None if value == "null" else value for key, value in left.items()}
    (folder / "config.json").write_text(json.dumps(left))
