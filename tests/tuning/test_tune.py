"""Tuned rows in the user's cache directory, and the search that makes them, with faked times on a CPU."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxops.tuning
from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device
from jaxops._lib.planning.tuned import read_rows, store_rows, tuned_rows, user_file
from jaxops.described import tunings
from jaxops.ops import (
    adaln,
    cached_attention,
    fp8_matmul,
    grouped_glu,
    moe_mlp,
    packed_attention,
    permute,
    quantize,
    route,
)
from jaxops.ops.grouped_matmul import Problem, Tiles, make_plan
from jaxops.ops.grouped_matmul.plan import PLANNER
from jaxops.tuning import _LIMITS, _errors, tune
from jaxops.tuning.__main__ import app
from tests.jaxprs import equations

H200 = Device("NVIDIA H200", "gpu")
UNSHIPPED = Device("NVIDIA Test", "gpu")  # nothing is shipped for it


def row(panel: int, pass_name: str = "fwd", **change) -> dict:
    sizes = {"G": 8, "M": 1000, "K": 512, "N": 256, "dtype": "bfloat16"}
    return {"op": "grouped_matmul", "pass": pass_name, **sizes, "tiles": vars(Tiles(16, 16, 16, panel=panel)), **change}


def put(*rows: dict, device: Device = UNSHIPPED) -> pathlib.Path:
    return store_rows("grouped_matmul", device, list(rows), same=lambda a, b: PLANNER.row_key(a) == PLANNER.row_key(b))


def test_rows_are_stored_and_replaced(tmp_path):
    file = put(row(100), row(101, "dgrad"))
    assert file == user_file("grouped_matmul", UNSHIPPED)
    assert tmp_path in file.parents
    assert [json.loads(line) for line in file.read_text().splitlines()] == [row(100), row(101, "dgrad")]
    put(row(102, M=600))  # another length of the same bucket
    assert tuned_rows("grouped_matmul", UNSHIPPED) == (row(101, "dgrad"), row(102, M=600))
    put(row(103, M=2000))
    assert len(tuned_rows("grouped_matmul", UNSHIPPED)) == 3
    assert tuned_rows("grouped_matmul", Device("NVIDIA Other", "gpu")) == ()


def test_user_rows_win_over_shipped_ones():
    """The package's rows stay, behind."""
    shipped = tuned_rows("packed_attention", H200)
    first = next(r for r in shipped if r["pass"] == "fwd")
    mine = {**first, "tiles": {**first["tiles"], "stages": first["tiles"]["stages"] + 1}}
    store_rows("packed_attention", H200, [mine], same=lambda row, old: False)
    rows = tuned_rows("packed_attention", H200)
    assert rows[1:] == shipped
    fields = packed_attention.Problem.__dataclass_fields__
    problem = packed_attention.Problem(**{name: first[name] for name in fields if name in first})
    for served, wanted in ((shipped, first), (rows, mine)):
        assert vars(packed_attention.make_plan(problem, H200, served, backend="pallas").fwd) == wanted["tiles"]


def test_killed_write_leaves_the_old_file(monkeypatch):
    file = put(row(100))
    write = pathlib.Path.write_text

    def killed(self, text, *args, **kwargs):
        write(self, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            put(row(101), row(102, "wgrad"))
    assert [*file.parent.glob("*.part")]
    read_rows.cache_clear()  # as a new process
    assert tuned_rows("grouped_matmul", UNSHIPPED) == (row(100),)
    put(row(103))  # what the killed run left is no obstacle
    assert tuned_rows("grouped_matmul", UNSHIPPED) == (row(103),)
    assert not [*file.parent.glob("*.part")]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)  # colours where a CI forces them


GROUPED = "grouped-matmul", "--shape", "8,64,32,16"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("grouped-matmul",), "--shape"),
        (("grouped-matmul", "--shape", "8,64"), "'8,64': write numbers for G,M,K,N"),
        (("grouped-matmul", "--shape", "8,64,x,32"), "'8,64,x,32': write numbers for G,M,K,N"),
        (("grouped-matmul", "--shape", ""), "'': write numbers for G,M,K,N"),
        ((*GROUPED, "--dtype", "foo"), "'foo' is not one of bfloat16, float16, float32"),
        ((*GROUPED, "--passes", "fwd,bwd"), "'bwd' is not one of fwd, dgrad, wgrad"),
        ((*GROUPED, "--scaling", "rowwise"), "'--scaling rowwise': the op's own options are none"),
        (("quantize", "--shape", "8,64", "--scaling", "rows"), "'rows' is not one of tensorwise"),
        (("quantize", "--shape", "8,64", "--scaling=rowwise", "more"), "the op's own options are --scaling, --layouts"),
        (("fp8-matmul", "--shape", "0,64,64,64", "--recipe=fast"), "'fast' is not one of tensorwise"),
        (("list", "adaln,route"), "'adaln,route' is not one of"),
        (("--dry-run", *GROUPED), "write the options behind grouped-matmul"),
    ],
)
def test_a_command_with_a_wrong_option(words, says):
    code, output = run(*words)
    assert code == 2
    assert says in " ".join(re.sub("[│╭╰╮╯─]", " ", output).split())


def test_commands_of_all_ops_on_a_cpu():
    """One line, and no traceback."""
    with jax.default_device(jax.devices("cpu")[0]):
        for name, op in tunings().items():
            code, output = run(name.replace("_", "-"), "--shape", ",".join(["64"] * len(op.shape)))
            assert (code, output) == (1, "Error: tuning measures GPU kernels, but the default device is cpu.\n")


def test_command_stores_unless_dry(monkeypatch):
    seen = []

    def measured(problem, passes, **_):
        seen.append((problem, passes))
        return [row(100)]

    monkeypatch.setattr(jaxops.tuning, "tune", measured)
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: UNSHIPPED)
    code, _ = run(*GROUPED, "--dtype", "float32", "--passes", "fwd,wgrad", "--dry-run")
    assert code == 0
    assert seen == [(Problem(8, 64, 32, 16, "float32"), [name]) for name in ("fwd", "wgrad")]
    assert not user_file("grouped_matmul", UNSHIPPED).exists()
    code, output = run(*GROUPED, "--shape", "4,64,32,16")
    assert code == 0
    assert [problem.G for problem, _ in seen[2:]] == [8] * 3 + [4] * 3
    assert str(user_file("grouped_matmul", UNSHIPPED)) in output.replace("\n", "")
    del seen[:]
    assert run("quantize", "--shape", "8,64", "--layouts", "row,both", "--scaling=rowwise", "--dry-run")[0] == 0
    problems = dict.fromkeys(problem for problem, _ in seen)
    assert [(each.scaling, each.layouts) for each in problems] == [("rowwise", "row"), ("rowwise", "both")]
    del seen[:]
    assert run("adaln", "--shape", "8,64,2", "--gated", "True", "--dry-run")[0] == 0
    assert {problem.gated for problem, _ in seen} == {True}
    assert tuned_rows("grouped_matmul", UNSHIPPED) == (row(100),)


@pytest.mark.parametrize(("dtype", "shape"), [("bfloat16", (4, 37, 53)), ("float32", (512, 64))])
def test_errors_catch_one_wrong_row(dtype, shape):
    limits = _LIMITS[jnp.dtype(dtype).itemsize]
    want = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)

    def accepted(got):
        return all(float(error) < limit for error, limit in zip(_errors(got, want), limits, strict=True))

    assert accepted(want)
    ulp = jnp.finfo(dtype).eps
    assert accepted((want.astype(jnp.float32) * (1 + ulp / 2)).astype(dtype))
    at = (shape[0] - 1,) + (5,) * (len(shape) - 2)
    assert not accepted(want.at[at].set(0))
    assert not accepted(want.at[at].set(want[0, 0] if len(shape) == 3 else want[0]))  # another group's row
    assert not accepted(want.at[(*at, 7)].set(jnp.nan))
    assert not accepted(want * 1.05)


TINY = Problem(2, 32, 16, 16, "float32")
ROUTINGS = [np.array([20, 12]), np.array([0, 30])]
SLOW, FAST, BROKEN = Tiles(32, 16, 16), Tiles(16, 16, 16), Tiles(16, 16, 16, panel=2)


@pytest.fixture
def faked_gpu(monkeypatch):
    """`tune` runs the kernels in Pallas' interpreter; each candidate takes the next of its times, at last the same."""
    monkeypatch.setattr(jaxops.tuning, "current_device", lambda: H200)
    times, programs, measured = [], [], []

    def device_times_us(program, *_, iterations):
        if program not in programs:
            programs.append(program)
        number = programs.index(program)
        earlier = [each for each, _ in measured].count(number)
        measured.append((number, iterations))
        us = times[number][min(earlier, len(times[number]) - 1)]
        return [us] * (iterations - 1) + [1e6]  # a call was interrupted

    monkeypatch.setattr(jaxops.tuning, "device_times_us", device_times_us)
    op = tunings()["grouped_matmul"]
    run = op.run

    def run_with_one_wrong_row(name, problem, plan, *operands):
        out = run(name, problem, plan, *operands)
        return out.at[3].set(0) if plan.fwd == BROKEN else out

    monkeypatch.setattr(op, "run", run_with_one_wrong_row)
    return times, measured


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


def test_the_last_times_decide(faked_gpu, monkeypatch):
    """Of the five that were fastest at first, and of the tiles of now, the middle one of three longer measurements."""
    times, measured = faked_gpu
    times += CLOCK.values()
    op, portable = tunings()["grouped_matmul"], PLANNER.plan("xla")
    monkeypatch.setattr(op, "run", lambda name, problem, _, *given, run=op.run: run(name, problem, portable, *given))
    jaxops.tuning.store([row(1) | vars(TINY) | {"tiles": vars(NOW)}])
    said = []
    (found,) = tune(TINY, ["fwd"], ROUTINGS[:1], list(CLOCK), said.append)
    assert found["tiles"] == vars(Tiles(16, 16, 16, panel=2))
    assert (found["us"], found["gain_percent"]) == (3.0, 70.0)
    again = [0, 1, 2, 3, 4, 6]
    assert [number for number, _ in measured] == [*range(7), *again, *again, *again]
    assert [calls for _, calls in measured] == 7 * [3] + 18 * [20]
    assert [line.rsplit(": ", 1)[1] for line in said[:-1]] == [
        f"{us} us" for us in (5.0, 3.0, 50.0, 4.0, 6.0, 6.0, 10.0)
    ]


def test_tune_takes_the_fastest_that_is_right(faked_gpu):
    faked_gpu[0].extend([[0.5], [0.1]])  # microseconds, of those that are right, in their order
    said = []
    (found,) = tune(TINY, ["fwd"], ROUTINGS, [SLOW, BROKEN, FAST], said.append)
    assert Tiles(**found["tiles"]) == FAST
    wrong = [line for line in said if "WRONG" in line]
    assert len(wrong) == 1
    assert str(BROKEN) in wrong[0]
    assert not any(str(BROKEN) in line and " us" in line for line in said), "a wrong candidate was timed"
    assert {name: found[name] for name in ("pass", "G", "M", "K", "N", "dtype")} == {
        "pass": "fwd",
        "G": 2,
        "M": 32,
        "K": 16,
        "N": 16,
        "dtype": "float32",
    }
    # The mean over the routings, a call's: 31 rows of the 32.
    assert found["us"] == pytest.approx(0.1)
    assert found["tflops"] == pytest.approx(2 * 31 * 16 * 16 / 0.1e-6 / 1e12, abs=0.05)
    assert found["device"] == "NVIDIA H200"
    # What tune returns is what store takes and make_plan finds.
    jaxops.tuning.store([found])
    assert make_plan(TINY, H200, tuned_rows("grouped_matmul", H200)).fwd == FAST


TUNED = {
    "adaln": (adaln.Problem(40, 16, 3, "float32", gated=True), ["fwd", "bwd"], "gbps"),
    "quantize": (quantize.Problem(32, 48, "float32", "rowwise", "both"), ["amax", "cast"], "gbps"),
    "fp8_matmul": (fp8_matmul.Problem(24, 16, 32, "rowwise", "float32", 2), ["fwd", "dgrad", "wgrad"], "tflops"),
    "grouped_glu": (grouped_glu.Problem(2, 24, 16, 40, "float32"), ["fwd", "bwd"], "gbps"),
    "packed_attention": (
        packed_attention.Problem(40, 48, 4, 2, 16, "float32", "rows"),
        ["fwd", "dq", "dkv"],
        "tflops",
    ),
    "cached_attention": (cached_attention.Problem(2, 4, 2, 40, 16, "float32"), ["fwd"], "gbps"),
    "permute": (permute.Problem(24, 48, 2, "float32"), ["permute", "combine", "combine_bwd"], "gbps"),
    "route": (route.Problem(40, 32), ["fwd", "bwd"], "gbps"),
}


@pytest.mark.filterwarnings("ignore:jaxops takes its Pallas kernels")
@pytest.mark.parametrize("name", TUNED)
def test_other_ops_are_tuned_in_the_same_way(faked_gpu, monkeypatch, name):
    """The second of two candidates is the faster one in each pass; its row is stored, found and taken.

    Kernels are traced with each plan; what runs is XLA's program: tests/ops has the kernels' results.
    """
    monkeypatch.setattr(device_facts, "gluon_missing", lambda: "it is not installed")
    problem, passes, unit = TUNED[name]
    faked_gpu[0].extend([[0.5], [0.1]] * len(passes))
    op = tunings()[name]
    planner = op.planner
    fewer = dataclasses.replace(planner, search=lambda *g: [dataclasses.replace(planner.heuristic(*g), warps=2)])
    monkeypatch.setattr(op, "planner", fewer)
    said, traced, portable, run = [], [], planner.plan("xla"), op.run

    def trace(name, problem, plan, *operands):
        if (tiles := getattr(plan, name)) is not None:
            program = jax.make_jaxpr(functools.partial(run, name, problem, plan))(*operands)
            has_kernel = any(eqn.primitive.name == "pallas_call" for eqn in equations(program))
            traced.append((name, tiles.warps == 2, has_kernel))
        return run(name, problem, portable, *operands)

    monkeypatch.setattr(op, "run", trace)
    rows = tune(problem, say=said.append)
    assert sorted(traced) == sorted((name, is_second, True) for name in passes for is_second in (False, True))
    assert not [line for line in said if "WRONG" in line]
    assert [row["pass"] for row in rows] == passes
    assert all(row[unit] > 0 for row in rows)
    jaxops.tuning.store(rows)
    plan = op.planner.make_plan(problem, H200, tuned_rows(name, H200), backend="pallas")
    chosen = [op.planner.tiles(**row["tiles"]) for row in rows]
    assert chosen == [getattr(plan, each) for each in passes]
    assert [tiles.warps for tiles in chosen] == [2] * len(passes)


def test_a_transposed_problem_is_measured_transposed():
    """Rows of a transposed problem are looked up as such: what is measured must read rhs the same way."""
    problem, op = Problem(2, 32, 16, 24, "float32", transpose_rhs=True), tunings()["grouped_matmul"]
    tensors = op.tensors(problem)
    assert tensors["rhs"].shape == (2, 24, 16)
    for name, shape in {"fwd": (32, 24), "dgrad": (32, 16), "wgrad": (2, 24, 16)}.items():
        operands = op.operands(name, problem, tensors, jnp.array([0, 20, 32], jnp.int32))
        run = functools.partial(op.run, name, problem, PLANNER.plan("xla"))
        assert jax.eval_shape(run, *operands).shape == shape


def test_only_problems_of_ops_with_tuned_rows():
    with pytest.raises(TypeError, match=r"write a Problem of adaln, .*, grouped_matmul, .*, route"):
        tune(moe_mlp.Problem(8, 2, 4, 8, 8, 8, "float32"))


def test_tune_with_nothing_right(faked_gpu):
    with pytest.raises(RuntimeError, match="no candidate for fwd"):
        tune(TINY, ["fwd"], ROUTINGS, [BROKEN], lambda line: None)


def test_default_routings_use_every_row():
    for problem in (Problem(7, 1000, 8, 8, "bfloat16"), Problem(256, 4096, 8, 8, "bfloat16")):
        routings = tunings()["grouped_matmul"].splits(problem)
        assert [sizes.sum() for sizes in routings] == [problem.M] * 2
        assert all(len(sizes) == problem.G and sizes.min() >= 0 for sizes in routings)
        assert np.ptp(routings[0]) <= 1
