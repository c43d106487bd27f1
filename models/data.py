"""The bytes of the Python standard library's own sources: a corpus that every machine already has."""

import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SEPARATOR = b"\0"
HELDOUT_EVERY = 10


class Corpus(NamedTuple):
    """Bytes to train on and bytes to evaluate on, from different files; uint8 vectors."""

    train: np.ndarray
    heldout: np.ndarray


def source_files(root: Path) -> list[Path]:
    """The Python files under root in an order that every machine agrees on, without tests and installed packages."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRECTORIES]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads every file under root (the running Python's standard library by default); each tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = source_files(root)
    if len(files) < HELDOUT_EVERY:
        raise FileNotFoundError(
            f"{root} holds {len(files)} Python files; at least {HELDOUT_EVERY} are needed. A Python without its sources? Install them, or use another Python."
        )
    texts = [path.read_bytes() + SEPARATOR for path in files]
    heldout = texts[HELDOUT_EVERY - 1 :: HELDOUT_EVERY]
    train = [text for i, text in enumerate(texts) if i % HELDOUT_EVERY != HELDOUT_EVERY - 1]
    return Corpus(np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(heldout), np.uint8))


def random_windows(data: jax.Array, key: jax.Array, count: int, length: int) -> jax.Array:
    """[count, length] windows at random places of data, cut on the device."""
    starts = jax.random.randint(key, (count,), 0, data.shape[0] - length + 1)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(data, (start,), (length,)))(starts)


def even_windows(data: np.ndarray, count: int, length: int) -> np.ndarray:
    """[count, length] windows at evenly spaced places of data: the same for every run."""
    starts = np.linspace(0, len(data) - length, count).astype(np.int64)
    return data[starts[:, None] + np.arange(length)]


def bigram_nats(train: np.ndarray, windows: np.ndarray) -> float:
    """Mean nats a byte that a table of train's byte pairs, each counted once more than seen, needs for windows[:, 1:]."""
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256 * 256).reshape(256, 256) + 1
    log_probs = np.log(pairs / pairs.sum(axis=1, keepdims=True))
    return float(-np.mean(log_probs[windows[:, :-1], windows[:, 1:]]))
