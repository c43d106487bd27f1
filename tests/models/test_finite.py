"""A run whose numbers are not finite: its checkpoints are those before, and it ends with a line and without a model."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import typer

from models.training import loop
from models.training.finite import NotFinite, Watch
from models.training.report import MetricsLog, plot_report
from tests.models.commands import rows_of
from tests.models.interrupted_run import train, watched_steps

pytestmark = pytest.mark.usefixtures("tiny")


def spoil(monkeypatch, field: str, steps: set[int], value: float) -> None:
    """A number of these steps of the run, counted from 1."""
    wrong = jax.device_put(np.float32(value))

    def wrap(step, number):
        state, metrics = step()
        return state, metrics._replace(**{field: wrong}) if number in steps else metrics

    monkeypatch.setattr(loop, "make_step", watched_steps(loop.make_step, wrap))


@pytest.mark.parametrize(
    ("bad", "most", "read_every", "says"),
    [
        ({2, 3, 4}, 3, 1, "since step 2 (3 in a row)"),
        ({3}, 1, 1, "since step 3 (1 in a row)"),
        ({5}, 3, 1, "since step 5 (1 in a row)"),  # the last one's are the model's
        ({1, 2, 4, 5}, 2, 1, "since step 1 (2 in a row)"),
        # All of a reading of several steps are counted, and the steps after the bad ones change nothing.
        ({2, 3}, 2, 4, "since step 2 (2 in a row)"),
        ({2, 4}, 2, 1, ""),
    ],
)
@pytest.mark.parametrize(("field", "value"), [("loss", math.nan), ("gradient_norm", math.inf)])
def test_which_steps_end_a_run(bad, most, read_every, says, field, value):
    watch, said = Watch(most), ""
    fine = {"loss": 1.0, "gradient_norm": 1.0}
    for done in range(read_every, 6, read_every):
        steps = range(done + 1 - read_every, done + 1)
        watch.add(done, [SimpleNamespace(**fine | ({field: value} if step in bad else {})) for step in steps], None)
        assert read_every > 1 or watch.finite == (done not in bad)
        try:
            watch.check(ended=done == 5)
        except NotFinite as error:
            said = str(error)
            break
    assert said == (f"The loss or the gradient norm is not finite {says}." if says else "")


def test_it_ends_without_a_model(tmp_path, monkeypatch, capsys):
    """The checkpoints are those of the finite steps; step 1 has the best loss."""
    spoil(monkeypatch, "loss", {2, 4, 5}, math.nan)
    with pytest.raises(typer.Exit) as caught:
        train(tmp_path, save_every=1)
    assert caught.value.exit_code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "The loss or the gradient norm is not finite since step 4 (2 in a row). The run ends without"
    )
    assert "The checkpoint of step 3 is kept" in last
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "3"]
    assert not (tmp_path / "checkpoint-hf").exists()
    assert [row["step"] for row in rows_of(tmp_path) if row["loss"] is None] == [2, 4, 5]


def test_a_heldout_loss_that_is_not_finite(tmp_path, monkeypatch, capsys):
    """The evaluations are after steps 1, 4 and 5: none is finite, so no checkpoint is written."""
    monkeypatch.setattr(loop, "make_evaluate", lambda *_: lambda *_: jax.device_put(np.float32(math.nan)))
    with pytest.raises(typer.Exit):
        train(tmp_path, save_every=1)
    assert "The held-out loss is not finite since step 1 (3 in a row). The run ends" in capsys.readouterr().out
    assert list((tmp_path / "checkpoints").iterdir()) == []


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
