"""Which of the measured tiles are stored, by a clock that a test sets, and which passes count as untuned."""

import dataclasses

import numpy as np
import pytest

import jaxops.tuning
from jaxops._lib.planning.device import Device
from jaxops.described import tunings
from jaxops.ops.grouped_matmul import Problem, Tiles
from jaxops.ops.grouped_matmul.plan import PLANNER
from jaxops.tuning import store, tune
from jaxops.tuning.program import untuned

CARD = Device("NVIDIA Test", "gpu")
TINY = Problem(2, 32, 16, 16, "float32")
NOW = Tiles(32, 16, 16, stages=1)
# Microseconds of each candidate: first, then three times at the end, of which the middle one counts.
CLOCK = {
    Tiles(16, 16, 16, panel=1): (1.0, 5.0, 5.0, 5.0),  # the fastest at first
    Tiles(16, 16, 16, panel=2): (2.0, 3.0, 90.0, 3.0),  # the mean is 32
    Tiles(16, 16, 16, panel=3): (3.0, 1.0, 50.0, 60.0),  # the shortest of all
    Tiles(16, 16, 16, panel=4): (4.0, 4.0, 4.0, 4.0),
    Tiles(16, 16, 16, panel=5): (5.0, 6.0, 6.0, 6.0),
    Tiles(16, 16, 16, panel=6): (6.0, 0.1, 0.1, 0.1),  # the sixth: never measured again
    NOW: (9.0, 12.0, 10.0, 8.0),
}


def row(name: str = "fwd", kernel: str = "pallas", **change) -> dict:
    tiles = vars(NOW) | ({} if kernel == "pallas" else {"kernel": kernel})
    return {"op": "grouped_matmul", "pass": name, **vars(TINY), "tiles": tiles, **change}


@pytest.fixture
def clock(monkeypatch) -> list[tuple[Tiles, int]]:
    """What `tune` measures of CLOCK: (tiles, calls)."""
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
    op, portable, programs, measured = tunings()["grouped_matmul"], PLANNER.plan("xla"), [], []
    monkeypatch.setattr(op, "run", lambda name, problem, _, *given, run=op.run: run(name, problem, portable, *given))

    def device_times_us(program, *_, iterations):
        if program not in programs:
            programs.append(program)
        tiles = list(CLOCK)[programs.index(program)]
        us = CLOCK[tiles][[tiles for tiles, _ in measured].count(tiles)]
        measured.append((tiles, iterations))
        return [us] * (iterations - 1) + [1e6]  # a call was interrupted

    monkeypatch.setattr(jaxops.tuning, "device_times_us", device_times_us)
    return measured


def test_the_last_times_decide(clock):
    """Of the five that were fastest at first, and of the tiles of now, the middle one of three longer measurements."""
    store([row()])
    said = []
    (found,) = tune(TINY, ["fwd"], [np.array([20, 12])], list(CLOCK), said.append)
    assert found["tiles"] == vars(Tiles(16, 16, 16, panel=2))
    assert (found["us"], found["gain_percent"]) == (3.0, 70.0)
    again = [tiles for tiles in CLOCK if tiles.panel != 6]
    assert [tiles for tiles, _ in clock] == [*CLOCK, *again, *again, *again]
    assert [calls for _, calls in clock] == 7 * [3] + 18 * [20]
    assert [line.rsplit(": ", 1)[1] for line in said[:-1]] == [
        f"{us} us" for us in (5.0, 3.0, 50.0, 4.0, 6.0, 6.0, 10.0)
    ]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([], ["fwd", "dgrad", "wgrad"]),
        ([row()], ["dgrad", "wgrad"]),
        ([row(), row("wgrad"), row("dgrad")], []),
        ([row(M=17)], ["dgrad", "wgrad"]),  # up to the same power of two
        ([row(M=16), row("dgrad", M=33)], ["fwd", "dgrad", "wgrad"]),
        ([row(K=32), row(N=8), row(G=3), row(dtype="bfloat16")], ["fwd", "dgrad", "wgrad"]),
        ([row(kernel="triton")], ["fwd", "dgrad", "wgrad"]),
    ],
    ids=["none", "one", "all", "bucket", "lengths", "sizes", "kernel"],
)
def test_untuned_is_what_no_row_of_ones_own_serves(rows, wanted, monkeypatch):
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: CARD)
    store(rows)
    assert untuned(TINY, CARD) == wanted
    assert untuned(TINY, Device("NVIDIA Other", "gpu")) == ["fwd", "dgrad", "wgrad"]
    monkeypatch.setattr(tunings()["grouped_matmul"], "kernels", lambda *_: ("pallas", "triton"))
    assert untuned(TINY, CARD) == ["fwd", "dgrad", "wgrad"], "each kernel needs its row"


def test_shipped_rows_are_not_ones_own():
    card = Device("NVIDIA H200", "gpu")
    shipped = next(each for each in jaxops.tuning.tuned_rows("grouped_matmul", card) if each["pass"] == "fwd")
    problem = Problem(
        **{field.name: shipped[field.name] for field in dataclasses.fields(Problem) if field.name in shipped}
    )
    assert untuned(problem, card) == ["fwd", "dgrad", "wgrad"]
