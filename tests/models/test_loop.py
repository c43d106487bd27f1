"""The training loop: few programs are compiled, batches come in order, a log is taken up again."""

import dataclasses
import itertools
import json
import struct
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from models.data.packing import Documents
from models.training import lm as train_lm
from models.training import loop
from models.training.loop import Metrics, make_step, prefetched
from models.training.presets import Preset, of_bytes, rates
from models.training.report import MetricsLog, plot_report
from tests.models.commands import rows_of

DENSE = dataclasses.replace(
    of_bytes(layers=1, width=8, heads=2, experts=1, top_k=1, hidden=8), experts=0, top_k=0, backend="xla"
)
TINY = Preset(DENSE, context=32, batch=4, eval_windows=8, **rates(6, 1e-2, 2, 3))


def text(lengths) -> Documents:
    tokens = np.random.default_rng(0).integers(0, 256, sum(lengths), dtype=np.uint8)
    return Documents(tokens, np.cumsum([0, *lengths]))


UNEVEN = text(np.random.default_rng(1).integers(2, 33, 80).tolist())


def test_steps_of_unequal_data_share_two_programs():
    task = train_lm.LmTask(dataclasses.replace(TINY, pack=False, buckets=2, steps=100))
    rows = train_lm.make_rows(task.preset, UNEVEN)
    graphdef, state = loop.first_state(task)
    step, lengths, key = make_step(graphdef, task), set(), jax.random.key(0)
    for batch in prefetched(train_lm.make_batches(task.preset, UNEVEN, rows), 0, 100):
        lengths.add(batch.tokens.shape)
        state, _ = step(state, batch, key)
    assert int(state.step) == 100
    assert step._cache_size() == len(lengths) == len(rows) == 2


def add_steps(log: MetricsLog, first: int, last: int) -> None:
    """Of four steps a reading, with a held-out loss after each."""
    for done in range(first + 3, last + 1, 4):
        read = [
            Metrics(step / 8, None, np.ones((1, 2)) / 2, step, 0.5, 0.125, 2.0) for step in range(done - 3, done + 1)
        ]
        log.add(done, read, 100.4, heldout=done / 4)


def test_a_log_that_is_taken_up_again_is_the_same(tmp_path, monkeypatch):
    """From the checkpoint of step 8 of a run that was killed after step 12, in the middle of a line."""
    for name, last in (("whole", 16), ("half", 12)):
        with MetricsLog(tmp_path / name, 0) as log:
            add_steps(log, 1, last)
    with (tmp_path / "half" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 13, "loss": 77.0}\n{"step": 14, "lo')
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)  # another second, another file
    with MetricsLog(tmp_path / "half", 8, say=pytest.fail) as again:
        add_steps(again, 9, 16)
    rows = rows_of(tmp_path / "half")
    assert rows == rows_of(tmp_path / "whole") == again.history.rows
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert again.history.heldout == [(4, 1.0), (8, 2.0), (12, 3.0), (16, 4.0)]
    assert len(again.history.loads) == 8
    assert len(list((tmp_path / "half" / "tensorboard").iterdir())) == 2
    shown = scalars_in(tmp_path / "half" / "tensorboard")
    wanted = [(name, row["step"], value) for row in rows for name, value in row.items() if name != "step"]
    assert [each[:2] for each in shown] == [each[:2] for each in wanted]
    np.testing.assert_allclose([each[2] for each in shown], [each[2] for each in wanted], rtol=1e-6)


def test_a_new_run_begins_a_new_log(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 77.0}\n')
    with MetricsLog(tmp_path, 0) as log:
        assert log.history.rows == []
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("name", ["s3:run", "gs:[run]"])
def test_a_folder_is_no_address(name, tmp_path, monkeypatch):
    """tensorboardX writes to S3 and Google Cloud."""
    monkeypatch.chdir(tmp_path)
    with MetricsLog(Path(name), 0):
        pass
    assert len(list((tmp_path / name / "tensorboard").iterdir())) == 1


def test_a_damaged_log(tmp_path):
    """Half a line, invalid JSON, a missing number: other lines are kept, and the gap is reported."""
    row = {"step": 1, "loss": 1.0, "tokens": 4, "fill": 1.0, "learning_rate": 0.1, "gradient_norm": 1.0}
    lines = [json.dumps(row | {"step": step}) for step in range(1, 7)]
    lines[1], lines[3], lines[5] = "{\x00\xff", json.dumps({"step": 4}), lines[5][:9]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    said = []
    with MetricsLog(tmp_path, 5, say=said.append) as log:
        assert [row["step"] for row in log.history.rows] == [1, 3, 5]
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 3, 5]
    (line,) = said
    assert line.startswith(f"{tmp_path / 'metrics.jsonl'} lacks 2 of the 5 steps")
    assert np.isnan(log.history.last_heldout)
    plot_report(log.history, "nats", tmp_path / "report.png")


def events_in(records: bytes):
    """TensorFlow's records: a length, its checksum, the event, its checksum."""
    while records:
        (length,) = struct.unpack("<Q", records[:8])
        yield Event.FromString(records[12 : 12 + length])
        records = records[16 + length :]


def scalars_in(folder) -> list[tuple[str, int, float]]:
    """What TensorBoard shows: a start in a later file takes back the steps from its own on."""
    found = []
    for event in itertools.chain(*(events_in(file.read_bytes()) for file in sorted(folder.iterdir()))):
        if event.session_log.status == SessionLog.START:
            found = [each for each in found if each[1] < event.step]
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_batches_come_in_order_and_a_failure_is_the_callers():
    def batches(step: int) -> np.ndarray:
        if step == 5:
            raise InterruptedError("no such step")
        return np.int32(step) * np.ones(2, np.int32)

    assert [int(batch[0]) for batch in prefetched(batches, 2, 5)] == [2, 3, 4]
    with pytest.raises(InterruptedError, match="no such step"):
        list(prefetched(batches, 3, 9))
