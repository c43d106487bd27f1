"""Where a run writes: never over what another run has written, or what looks like it."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from models.training import folders


def run_in(folder: Path, *names: str) -> Path:
    """A folder with these files, which are not empty; names that end with / are folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).mkdir(parents=True) if name.endswith("/") else (folder / name).write_text("before")
    return folder


def contents(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def test_a_new_folder_each_time(tmp_path):
    default = tmp_path / "runs" / "lm-[demo]"
    new = lambda: folders.new(None, default, resumes=False).name
    assert [new(), new(), new()] == ["lm-[demo]", "lm-[demo]-2", "lm-[demo]-3"]
    (default.parent / "lm-[demo]-2").rmdir()
    (default.parent / "lm-[demo]-x").mkdir()
    (default.parent / "lm-[demo]-7").write_text("a file")
    assert new() == "lm-[demo]-8"  # the newest has the highest number


@pytest.mark.parametrize("out", [None, "out"])
def test_one_of_those_that_start_together_gets_a_folder(out, tmp_path):
    given = None if out is None else tmp_path / out

    def claim(_):
        try:
            return folders.new(given, tmp_path / "runs" / "lm", resumes=False)
        except ValueError:
            return None

    with ThreadPoolExecutor(16) as pool:
        got = [folder for folder in pool.map(claim, range(16)) if folder is not None]
    assert len(got) == len(set(got)) == (16 if out is None else 1)


NAMES = ("config.yaml", "data.json", "metrics.jsonl", "report.png", "samples.png")


@pytest.mark.parametrize("name", [*NAMES, "tensorboard/", "checkpoint-hf/", "profile/", "checkpoints/"])
@pytest.mark.parametrize("resumes", [False, True])
def test_what_a_run_would_overwrite(name, resumes, tmp_path):
    out = run_in(tmp_path / "a run", name)
    before = contents(out)
    with pytest.raises(ValueError, match=rf"{re.escape(str(out))} holds a run.*: {name.strip('/')}\. Take another"):
        folders.new(out, tmp_path / "default", resumes=resumes)
    assert contents(out) == before


def test_checkpoints_of_another_run(tmp_path):
    out = run_in(tmp_path / "out", "config.yaml", "checkpoints/20/", "checkpoints/100/")
    with pytest.raises(ValueError, match="has checkpoints up to step 100: write --resume to go on from there, or take"):
        folders.new(out, tmp_path / "default", resumes=False)


def test_other_files_stay(tmp_path):
    out = run_in(tmp_path / "out", "notes.txt", "mine.yaml", "data/")
    assert folders.new(out, tmp_path / "default", resumes=False) == out
    assert contents(out) == {"notes.txt": "before", "mine.yaml": "before", "data": None, "config.yaml": ""}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("before")
    with pytest.raises(ValueError, match="out is no folder: write another one with --out"):
        folders.new(tmp_path / "out", tmp_path / "default", resumes=False)


def test_which_run_is_resumed(tmp_path, monkeypatch):
    """The newest by its number, wherever the file system lists it."""
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder))))
    default, find = tmp_path / "runs" / "lm", lambda: folders.to_resume(None, tmp_path / "runs" / "lm")
    assert find() is None
    first = run_in(default, "config.yaml", "data.json")  # killed before its first checkpoint
    assert find() == first
    tenth = run_in(tmp_path / "runs" / "lm-10", "config.yaml", "checkpoints/2/")
    run_in(tmp_path / "runs" / "lm-9", "config.yaml", "checkpoints/4/")
    run_in(tmp_path / "runs" / "lm-11", "config.yaml", "metrics.jsonl", "checkpoint-hf/")  # without --save-every
    run_in(tmp_path / "runs" / "lm-12")
    assert find() == tenth
    assert folders.to_resume(first, default) == first
    assert folders.to_resume(tmp_path / "runs" / "lm-11", default) is None
    assert folders.to_resume(tmp_path / "none", default) is None


def test_a_run_that_was_killed_as_it_began(tmp_path):
    """Between claiming a folder and writing its settings."""
    out = folders.new(tmp_path / "out", tmp_path / "default", resumes=False)
    run_in(out, "data.json")
    assert folders.to_resume(out, tmp_path / "default") is None
    assert folders.new(out, tmp_path / "default", resumes=True) == out
    with pytest.raises(ValueError, match=r"holds a run already.*: config\.yaml, data\.json"):
        folders.new(out, tmp_path / "default", resumes=False)


def test_one_run_writes_at_a_time(tmp_path, monkeypatch):
    with folders.written_by_one(tmp_path):
        with (
            pytest.raises(typer.BadParameter, match=r"another process is writing to .*: wait for its end"),
            folders.written_by_one(tmp_path),
        ):
            pass
        with monkeypatch.context() as in_another_process:
            in_another_process.setattr(folders, "is_first", lambda: False)
            with folders.written_by_one(tmp_path):  # of the same run
                pass
            in_another_process.setattr(folders, "exchanged", lambda own: own or "what the first one found")
            with pytest.raises(typer.BadParameter, match="what the first one found"), folders.written_by_one(tmp_path):
                pass
    with folders.written_by_one(tmp_path):
        pass
