"""A run whose numbers are not finite: its checkpoints are those before, and it ends with a line and without a model."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
import typer

from models.training import lm as train_lm
from models.training.report import MetricsLog, plot_report
from tests.models.interrupted_run import train

pytestmark = pytest.mark.usefixtures("tiny")
BAD = {"nan": math.nan, "inf": math.inf}


def rows_of(out) -> list[dict]:
    """Of strict JSON."""
    text = (out / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]


def spoil(monkeypatch, field: str, steps: set[int], value: float) -> None:
    """A number of these steps of the run, counted from 1."""
    make_step, wrong = train_lm.make_step, jax.device_put(np.float32(value))

    def spoiled(*arguments):
        step, calls = make_step(*arguments), iter(range(1, 100))

        def run(*given):
            state, metrics = step(*given)
            return state, metrics._replace(**{field: wrong}) if next(calls) in steps else metrics

        return run

    monkeypatch.setattr(train_lm, "make_step", spoiled)


@pytest.mark.parametrize(
    ("field", "value", "steps", "options", "done", "checkpoints", "says"),
    [
        ("loss", "nan", {2, 3, 4}, {}, 4, ["1"], "since step 2 (3 in a row)"),
        ("gradient_norm", "inf", {1, 2, 3}, {}, 3, [], "since step 1 (3 in a row)"),
        ("loss", "inf", {3}, {"bad_steps": 1}, 3, ["1", "2"], "since step 3 (1 in a row)"),
        ("loss", "nan", {5}, {}, 5, ["1", "2", "3", "4"], "since step 5 (1 in a row)"),  # step 1 has the best loss
        ("loss", "nan", {1, 2, 4, 5}, {"bad_steps": 2}, 2, [], "since step 1 (2 in a row)"),
        # All of a reading of several steps are counted, and the steps after the bad ones change nothing.
        ("loss", "nan", {2, 3}, {"bad_steps": 2, "save_every": 4}, 4, [], "since step 2 (2 in a row)"),
    ],
)
def test_it_ends(field, value, steps, options, done, checkpoints, says, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, field, steps, BAD[value])
    with pytest.raises(typer.Exit) as caught:
        train(tmp_path, **{"save_every": 1, **options})
    assert caught.value.exit_code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"The loss or the gradient norm is not finite {says}. The run ends without a model. ")
    kept = f"The checkpoint of step {checkpoints[-1]} is kept" if checkpoints else "No checkpoint was finished."
    assert kept in last
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) in (checkpoints, checkpoints[1:])
    assert not (tmp_path / "checkpoint-hf").exists()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, done + 1))
    assert {row["step"] for row in rows if row[field] is None} == {step for step in steps if step <= done}


def test_a_few_bad_steps_end_no_run(tmp_path, monkeypatch):
    spoil(monkeypatch, "loss", {2, 4}, math.nan)
    train(tmp_path, save_every=1, bad_steps=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3", "5"]
    assert (tmp_path / "checkpoint-hf" / "model.safetensors").exists()


def test_a_heldout_loss_that_is_not_finite(tmp_path, monkeypatch, capsys):
    """The evaluations are after steps 1, 4 and 5: none is finite, so no checkpoint is written."""
    monkeypatch.setattr(train_lm, "make_evaluate", lambda *_: lambda *_: jax.device_put(np.float32(math.nan)))
    with pytest.raises(typer.Exit):
        train(tmp_path, save_every=1)
    assert "The held-out loss is not finite since step 1 (3 in a row). The run ends" in capsys.readouterr().out
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_finished_run_with_a_broken_checkpoint(whole, tmp_path, monkeypatch, capsys):
    """As earlier versions wrote it: no model is made of it."""
    out = shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(out / "checkpoint-hf")
    monkeypatch.setattr(train_lm, "make_evaluate", lambda *_: lambda *_: jax.device_put(np.float32(math.nan)))
    with pytest.raises(typer.Exit):
        train(out, save_every=2, resume=True)
    assert "The held-out loss is not finite since step 5 (1 in a row)." in capsys.readouterr().out
    assert not (out / "checkpoint-hf").exists()


def test_a_log_with_null_is_read_again(tmp_path):
    row = {"step": 1, "loss": None, "tokens": 4, "fill": 1.0, "learning_rate": 0.1, "gradient_norm": None}
    lines = [row, row | {"step": 2, "loss": 2.5, "gradient_norm": 1.5, "heldout": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with MetricsLog(tmp_path, 2, say=pytest.fail) as log:
        assert (math.isnan(log.history.loss[0]), log.history.loss[1]) == (True, 2.5)
        assert math.isnan(log.history.last_heldout)
    assert rows_of(tmp_path) == lines
    plot_report(log.history, "nats", tmp_path / "report.png")
    for line in log.history.rows:
        line["gradient_norm"] = math.nan
    plot_report(log.history, "nats", tmp_path / "report.png")
