"""Random faults in files of checkpoints and models: the same bits, the checkpoint before, or an error of one line."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import hf
from models.decoder import Decoder
from models.training.checkpoints import Checkpoints
from tests.models.hf_checkpoints import DATA

CASES = 60


def state_of(step: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    return {
        "kernel": jnp.asarray(rng.normal(size=(24, 16)), jnp.float32),
        "scale": jnp.asarray(rng.normal(size=16), jnp.bfloat16),
        "step": jnp.int32(step),
    }


def damage(folder: Path, rng: np.random.Generator) -> None:
    """One file: a bit flipped, cut, overwritten in part, emptied or removed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = files[rng.integers(len(files))]
    content, kind = bytearray(file.read_bytes()), rng.choice(["flip", "flip", "cut", "overwrite", "empty", "remove"])
    at = int(rng.integers(max(1, len(content))))
    if kind == "remove":
        file.unlink()
    elif kind == "flip" and content:
        content[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
    elif kind == "overwrite":
        content[at : at + 16] = rng.bytes(len(content[at : at + 16]))
        file.write_bytes(content)
    else:
        file.write_bytes(content[: 0 if kind == "empty" else at])


def test_checkpoints(tmp_path):
    whole, taken = tmp_path / "whole", []
    with Checkpoints(whole) as checkpoints:
        for step in (2, 4):
            checkpoints.save(state_of(step), step)
    for seed in range(CASES):
        folder, said = shutil.copytree(whole, tmp_path / str(seed)), []
        damage(folder / "4", np.random.default_rng(seed))
        with Checkpoints(folder) as checkpoints:
            state, done = checkpoints.start(jax.tree.map(jnp.zeros_like, state_of(0)), said.append)
        jax.tree.map(np.testing.assert_array_equal, state, state_of(done))
        assert len(said) == (done == 2), f"seed {seed}"
        assert all(line.startswith(f"{folder / '4'} is damaged: ") and "\n" not in line for line in said)
        taken.append(done)
    assert set(taken) == {2, 4}


def read_or_refused(folder: Path) -> Decoder | str:
    """The model, or the message of the error."""
    try:
        return hf.load(folder)[1]
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def test_models(tmp_path):
    whole, seen = tmp_path / "whole", 0
    architecture, model = hf.load(DATA / "llama")
    hf.save(whole, architecture, model, beside={"tokenizer.json": "{}"})
    for seed in range(CASES):
        folder = shutil.copytree(whole, tmp_path / str(seed))
        damage(folder, np.random.default_rng(seed))
        found = read_or_refused(folder)
        if isinstance(found, str):
            assert str(folder) in found
            assert len(found.splitlines()) == 1, f"seed {seed}"
            seen += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(model))
    assert seen > CASES / 2
