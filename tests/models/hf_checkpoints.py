"""The small checkpoints in tests/data/hf, and changed copies of them."""

import json
import pathlib
import shutil

import jax
import safetensors.flax

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf"
NAMES = sorted(folder.name for folder in DATA.iterdir())


def stored(folder: pathlib.Path) -> dict[str, jax.Array]:
    return {
        name: tensor
        for file in sorted(folder.glob("model*.safetensors"))
        for name, tensor in safetensors.flax.load_file(file).items()
    }


def changed(tmp_path: pathlib.Path, name: str = "mixtral", tensors=None, **config) -> pathlib.Path:
    """A copy with other tensors, or other keys of config.json: None leaves one out."""
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder, ignore=lambda *_: ["expected.safetensors"])
    if tensors is not None:
        found = stored(folder)
        tensors(found)
        safetensors.flax.save_file(found, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in said.items() if config.get(key, value) is not None})
    )
    return folder
