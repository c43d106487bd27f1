"""Checkpoints: which are written, kept and read. Runs that are killed are in tests/models/test_launch.py."""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from models.training import checkpoints as checkpoints_module
from models.training.checkpoints import Checkpoints, checksums, saved_steps


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted))


def arrays(width: int = 4, **more):
    return {"params": {"kernel": jnp.arange(8.0 * width).reshape(8, width), **more}, "step": jnp.int32(0)}


def test_an_empty_folder_starts_from_the_beginning(tmp_path):
    state = arrays()
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.start(state) == (state, 0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (arrays(5), r"params/kernel is float32\[8, 4\] there and float32\[8, 5\] here\. Resume"),
        (arrays(bias=jnp.zeros(4)), r"params/bias is missing there and float32\[4\] here"),
        ({"step": jnp.int32(0)}, r"params/kernel is float32\[8, 4\] there and missing here"),
        ({**arrays(), "step": jnp.float32(0)}, r"step is int32\[\] there and float32\[\] here"),
        (
            arrays(5, a=jnp.zeros(4), b=jnp.zeros(4), c=jnp.zeros(4)),
            r"params/a is.*params/b is.*params/c is missing there and float32\[4\] here, and 1 more",
        ),
    ],
    ids=["shape", "one more", "one less", "dtype", "many"],
)
def test_another_model_is_an_error(state, message, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(arrays(), 2)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(typer.BadParameter, match=message):
        checkpoints.start(state)


def test_which_stay(tmp_path):
    """The newest two, and the best: no loss is less than one that is not a number, and none is least beside it."""
    heldout = {1: float("nan"), 2: 3.0, 4: 1.0, 6: float("nan"), 8: 2.0}
    with Checkpoints(tmp_path, keep=2, keep_best=True) as checkpoints:
        for done in (1, 2, 4, 6, 8):
            checkpoints.save(arrays(), done, heldout=heldout.get(done))
    assert saved_steps(tmp_path) == [4, 6, 8]
    with Checkpoints(tmp_path, keep=2, keep_best=True) as checkpoints:  # another process knows the best, too
        for done in (10, 11):
            checkpoints.save(arrays(), done)
    assert saved_steps(tmp_path) == [4, 10, 11]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(arrays(), 12)
    assert saved_steps(tmp_path) == [11, 12]


def saved(folder, *steps: int):
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save({**arrays(), "step": jnp.int32(step)}, step, heldout=1.5)


def data_file(folder) -> Path:
    """The largest file, which holds the arrays."""
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace(file: Path, old: str, new: str) -> None:
    content = file.read_text("utf-8")
    assert old in content
    file.write_text(content.replace(old, new), "utf-8")


DAMAGES = {
    "flipped": lambda step: flip(data_file(step)),
    "truncated": lambda step: os.truncate(data_file(step), 10),
    "no arrays": lambda step: data_file(step).unlink(),
    "no metadata": lambda step: (step / "_METADATA").unlink(),
    "no checksums": lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
    "damaged checksums": lambda step: replace(step / "_CHECKPOINT_METADATA", '"params/kernel": ', '"params/kernel": 1'),
    "damaged loss": lambda step: replace(step / "_CHECKPOINT_METADATA", '"heldout": 1', '"heldout": 0'),
    "truncated metadata": lambda step: os.truncate(step / "_CHECKPOINT_METADATA", 200),
    "empty": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(damage, tmp_path):
    saved(tmp_path, 2, 4, 6)
    damage(tmp_path / "6")
    said = []
    with Checkpoints(tmp_path) as checkpoints:
        state, done = checkpoints.start(arrays(), said.append)
        assert (done, checkpoints.steps) == (4, [2, 4])
        assert_same_bits(state, {**arrays(), "step": jnp.int32(4)})
        (line,) = said
        assert line.startswith(f"{tmp_path / '6'} is damaged: ")
        assert line.endswith("It is now 6.damaged, and the checkpoint before it is taken.")
        assert len(line.splitlines()) == 1
        checkpoints.save(arrays(), 6)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [2, 4, 6]


def test_one_number_is_another(tmp_path):
    """An array of random bits, stored uncompressed: only the checksum detects it."""
    kernel = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 4):
            checkpoints.save({"kernel": kernel}, step)
    flip(data_file(tmp_path / "4"))
    said = []
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.start({"kernel": jnp.zeros_like(kernel)}, said.append)[1] == 2
    assert "4 is damaged: the checksum of kernel is not what was saved" in said[0]


def test_all_are_damaged(tmp_path):
    saved(tmp_path, 2, 4)
    flip(data_file(tmp_path / "2"))
    os.truncate(data_file(tmp_path / "4"), 10)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(typer.BadParameter, match=r"all checkpoints are damaged\. .*/4: .*; .*/2: .*Take another folder"),
    ):
        checkpoints.start(arrays())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]


UNFIT = r"cannot hold checkpoints: .*\. Take another folder with --out\.$"
NAMES = ["run[1]", "a\\b", "\udcff"]  # which the libraries misread


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_path_is_a_path(name, tmp_path):
    folder = tmp_path / name / "checkpoints"
    saved(folder, 2, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208 - TensorStore made a folder "a" of "a\\b"
    flip(data_file(folder / "4"))
    said = []
    with Checkpoints(folder) as checkpoints:
        state, done = checkpoints.start(arrays(), said.append)
    assert done == 2
    assert_same_bits(state, {**arrays(), "step": jnp.int32(2)})
    assert said[0].startswith(f"{folder / '4'} is damaged: ")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_without_proc_a_folder_needs_a_plain_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints_module, "DESCRIPTORS", tmp_path / "missing")
    with pytest.raises(typer.BadParameter, match=UNFIT):
        Checkpoints(tmp_path / name)


def test_a_full_disk_is_an_error_before_the_training(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.start(arrays())[1] == 0
        assert not list(tmp_path.iterdir())  # what it tried with is gone

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoints._writer, "save", full)
        with pytest.raises(typer.BadParameter, match=UNFIT):
            checkpoints.start(arrays())


@pytest.mark.parametrize("name", ["file", "file/checkpoints", "x" * 256])
def test_no_folder_can_be_there(name, tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(typer.BadParameter, match=UNFIT):
        Checkpoints(tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"mine"


DTYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_its_place_shape_and_dtype_count(dtype):
    """One changed bit of any element changes the checksum, and so does another order of the same elements."""
    rng, size = np.random.default_rng(0), np.dtype(dtype).itemsize
    bits = rng.integers(0, 256, (3, 5, size), np.uint8)
    changed = np.broadcast_to(bits, (bits.size, *bits.shape)).copy()
    changed.reshape(bits.size, bits.size)[range(bits.size), range(bits.size)] ^= 1 << rng.integers(
        0, 8, bits.size
    ).astype(np.uint8)
    whole, *others = (each.view(dtype)[..., 0] for each in (bits, *changed))
    swapped = whole.copy()
    swapped[1, 4], swapped[2, 1] = whole[2, 1], whole[1, 4]
    others += [whole[::-1], np.roll(whole, 2, axis=1), swapped, whole.T, whole.reshape(5, 3), whole.reshape(15)]
    others.append(whole.view({1: np.int8, 2: np.uint16, 4: np.uint32}[size]))
    sums = checksums({str(i): jnp.asarray(array) for i, array in enumerate([whole, *others])})
    assert checksums({"again": jnp.asarray(whole.copy())})["again"] == sums["0"]
    assert len(set(sums.values())) == len(sums), sums
