"""Faults on purpose (tests/faults.py): a hundred of them, and a check that looks at nothing would be seen."""

import shutil

import pytest

from models.training import checkpoints
from tests import faults


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    faults.prepare(folder, 3)
    return folder


def test_a_hundred(whole):
    wrong: list[str] = []
    counts = faults.run_cases(100, 3, whole, wrong.append)
    assert not wrong
    assert counts.total() == 100
    assert {outcome.split(":")[0] for outcome in counts} == set(faults.SHARES)
    assert counts["checkpoint: the one before"] >= 5
    assert counts["hf: named"] >= 5
    assert counts["run: named"] >= 1


def test_a_checksum_that_says_always_the_same_is_seen(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "checksums", lambda arrays: dict.fromkeys(arrays, 0))
    monkeypatch.setattr(
        checkpoints.Checkpoints,
        "_metadata",
        lambda self, step: {checkpoints.CHECKSUMS: dict.fromkeys(faults.state_of(0), 0)},
    )
    arrays = max((whole / "checkpoints" / "6").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
    wrong = 0
    for number, place in enumerate(range(100, 4000, 500)):
        folder = shutil.copytree(whole / "checkpoints", tmp_path / str(number))
        content = bytearray(arrays.read_bytes())
        content[place] ^= 1
        (folder / arrays.relative_to(whole / "checkpoints")).write_bytes(content)
        try:
            faults.read_checkpoints(folder, set(faults.STEPS), {6})
        except faults.WrongError:
            wrong += 1
    assert wrong >= 4
