"""The rows that plans use: the user's, a folder's or the package's; the same in all processes of a job."""

import functools
import json
import os
import pathlib
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops._lib.planning.device import Device, current_device, warn_once
from jaxops._lib.planning.recorded import Decision, watch
from jaxops._lib.planning.tuned import export_rows, read_rows, remove_rows, store_rows, user_files, user_folder
from jaxops.ops import grouped_matmul
from jaxops.tuning import tuned_rows, use_rows

H200 = Device("NVIDIA H200", "gpu")
OP = "quantize"
MINE, THEIRS = {"op": OP, "pass": "mine"}, {"op": OP, "pass": "theirs"}


@pytest.fixture(autouse=True)
def _own_rows(tmp_path, monkeypatch):
    """A row of the user's, in a cache directory of the test's own; in the process nothing read and nothing said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read_rows.cache_clear()
    store_rows(OP, H200, [MINE], same=lambda row, old: False)
    yield
    read_rows.cache_clear()


@pytest.fixture
def folder(tmp_path):
    file = tmp_path / "rows" / OP / "nvidia_h200.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(THEIRS))
    return tmp_path / "rows"


@pytest.fixture
def several_processes(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def shipped():
    with use_rows("shipped"):
        return tuned_rows(OP, H200)


def test_sources(folder, monkeypatch):
    assert len(shipped()) > 10
    assert MINE not in shipped()
    assert tuned_rows(OP, H200) == (MINE, *shipped())
    with use_rows(folder):
        assert tuned_rows(OP, H200) == (THEIRS, *shipped())
        with use_rows("user"):
            assert tuned_rows(OP, H200) == (MINE, *shipped())
        assert tuned_rows(OP, H200)[0] == THEIRS
        assert tuned_rows("packed_attention", H200) != ()  # not in the folder: the shipped ones
    monkeypatch.chdir(folder.parent)
    with use_rows("rows"):
        assert tuned_rows(OP, H200)[0] == THEIRS
    assert tuned_rows(OP, H200)[0] == MINE


def test_removed_rows_are_not_used_any_more():
    """Nor in a process that has read them."""
    assert MINE in tuned_rows(OP, H200)
    assert len(remove_rows(OP)) == 1
    assert MINE not in tuned_rows(OP, H200)


def test_what_is_compiled_is_traced_again():
    """As a plan is part of a program, so is where its rows come from."""
    read = []

    @jax.jit
    def f(x):
        read.append(tuned_rows(OP, H200)[0])
        return x

    for _ in range(2):
        f(jnp.ones(1))
        with use_rows("shipped"):
            f(jnp.ones(1))
    assert read == [MINE, shipped()[0]]


def test_several_processes_leave_the_users_rows_out(several_processes, folder):
    with pytest.warns(RuntimeWarning, match=r"ignores your own tuned rows .*2 processes.*use_rows\(folder\)") as said:
        read = [tuned_rows(op, H200) for op in (OP, OP, "packed_attention")]  # of which the user has none
    assert len(said) == 1
    assert read[0] == read[1] == shipped()
    assert read[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source, first in (("user", MINE), (folder, THEIRS), ("shipped", shipped()[0])):
            warn_once.cache_clear()
            with use_rows(source):
                assert tuned_rows(OP, H200)[0] == first


def test_one_process_is_not_counted(monkeypatch):
    """jax.process_count starts a backend, which a program that only traces has no use for."""

    def refuse():
        raise AssertionError("counted")

    monkeypatch.setattr(jax, "process_count", refuse)
    assert tuned_rows(OP, H200)[0] == MINE


@pytest.mark.parametrize(("source", "error", "message"), [
    ("nowhere", ValueError, "source='nowhere': no folder with rows"),
    ("", ValueError, "no folder with rows"),
    (None, TypeError, "source is None; write 'shipped', 'user' or the path"),
    (True, TypeError, "source is a bool"),
])  # fmt: skip
def test_bad_sources(source, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        use_rows(source)


def no_home(monkeypatch):
    """A user without an entry in /etc/passwd and without HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)

    def getpwuid(uid):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", getpwuid)


def permission_denied(monkeypatch):
    """As in another user's home, which root can look at."""
    folder = str(user_folder())

    def refused(looks):
        def look(path, *args, **options):
            if str(path).startswith(folder):
                raise PermissionError(13, "Permission denied", str(path))
            return looks(path, *args, **options)

        return look

    for name in ("stat", "lstat"):
        monkeypatch.setattr(f"os.{name}", refused(getattr(os, name)))


def relative(monkeypatch):
    """As older versions of platformdirs say for XDG_CACHE_HOME=some/where."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: pathlib.Path("some/where", name))


# What stands where the user's cache folder is, and what an op says of it: nothing where nothing can be seen.
UNSEEN = {
    "no home": no_home,
    "permission": permission_denied,
    "relative": relative,
    "a device": lambda monkeypatch: monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null"),
}
DAMAGED = {
    "a folder": (lambda file: file.mkdir(), "is no file"),
    "a dead link": (lambda file: file.symlink_to(file.with_name("nowhere")), "is no file"),
    "a pipe": (lambda file: os.mkfifo(file), "is no file"),
    "half a line": (lambda file: file.write_text('{"pass": "fwd"'), "is damaged"),
    "no object": (lambda file: file.write_text("[1]\n"), r"is damaged \(\[1\] is no row"),
    "brackets": (lambda file: file.write_text(100_000 * "["), "is damaged .*recursion"),
}


@pytest.mark.parametrize("where", UNSEEN)
def test_a_cache_folder_that_cannot_be_looked_at(where, monkeypatch):
    wanted = shipped()
    UNSEEN[where](monkeypatch)
    assert tuned_rows(OP, H200) == wanted
    with pytest.raises(OSError, match=r"no home folder: |ermission denied|no absolute path|Not a directory"):
        store_rows(OP, H200, [MINE], same=lambda row, old: False)


@pytest.mark.parametrize("what", DAMAGED)
def test_rows_that_cannot_be_read_are_said_once(what):
    file = user_folder() / OP / "nvidia_h200.jsonl"
    file.unlink()
    make, message = DAMAGED[what]
    make(file)
    with pytest.warns(RuntimeWarning, match=f"goes on without your own tuned rows of {OP}: {file} {message}") as said:
        assert tuned_rows(OP, H200) == tuned_rows(OP, H200) == shipped()
    assert len(said) == 1


@pytest.mark.parametrize("name", ["a[b]c", "**", "back\\slash"])
def test_a_cache_folder_is_a_path_and_no_pattern(name, tmp_path, monkeypatch):
    """It is listed, exported, read and cleared in a folder of any name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    assert user_files() == []
    file = store_rows(OP, H200, [MINE], same=lambda row, old: False)
    assert user_files() == user_files(OP) == [file]
    [copy] = export_rows(tmp_path / f"{name} of mine")
    assert copy.read_bytes() == file.read_bytes()
    assert remove_rows() == [file]
    assert tuned_rows(OP, H200) == shipped()
    with use_rows(tmp_path / f"{name} of mine"):
        assert tuned_rows(OP, H200) == (MINE, *shipped())


def tree(decisions) -> list[Decision]:
    """Decisions that have tiles, with those inside of others."""
    return [each for d in decisions for each in (*([d] if d.sources else []), *tree(d.parts))]


def glu(x, experts, routing):
    gate, up, _ = experts
    return jaxops.grouped_glu(x, gate, up, routing.group_offsets, backend="pallas")


def mlp(x, experts, routing, **how):
    gate, up, down = experts
    return jaxops.moe_mlp(x, gate, up, down, routing, backend="pallas", **how)


@pytest.mark.parametrize(
    ("call", "ops"),
    [
        (glu, {"grouped_glu", "grouped_matmul"}),
        (mlp, {"grouped_glu", "grouped_matmul", "permute"}),
        (functools.partial(mlp, recipe="blockwise"), {"fp8_matmul", "permute", "quantize"}),
    ],
    ids=["grouped_glu", "moe_mlp", "moe_mlp-fp8"],
)
def test_an_op_inside_another_finds_its_rows(call, ops, tmp_path):
    array = jax.ShapeDtypeStruct
    x, experts = array((64, 128), jnp.float32), [array((4, 128, 128), jnp.float32)] * 3
    routing = jax.eval_shape(lambda logits: jaxops.route(logits, 2), array((64, 4), jnp.float32))
    x = array((128, 128), jnp.float32) if call is glu else x
    with use_rows("shipped"), watch() as before:
        jax.eval_shape(call, x, experts, routing)
    for op in (found := {each.op: each for each in tree(before)}):
        rows = [
            {"op": op, "pass": name, **vars(each.problem), "tiles": vars(getattr(each.plan, name))}
            for each in tree(before) if each.op == op for name in each.sources
        ]  # fmt: skip
        file = tmp_path / "all" / op / f"{current_device().slug}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert set(found) == ops
    with use_rows(tmp_path / "all"), watch() as after:
        jax.eval_shape(call, x, experts, routing)
    # "explicit": in the plan that an op has made for one inside it.
    kinds = {(each.op, source.kind) for each in tree(after) for source in each.sources.values()}
    assert {(op, kind) for op, kind in kinds if kind != "explicit"} == {(op, "tuned") for op in ops}


@pytest.mark.parametrize("change", [
    {"tiles": None}, {"tiles": {"new": 1}}, {"tiles": {"bm": 17, "bn": 16, "bk": 16, "warps": 4, "stages": 1}},
    {"K": "3"}, {"pass": None},
])  # fmt: skip
def test_a_row_of_another_version_stops_no_op(change):
    problem = grouped_matmul.Problem(2, 5, 3, 4, "bfloat16")
    rows = [{"op": "grouped_matmul", "pass": "fwd", **vars(problem), "tiles": {}} | change]
    if change == {"pass": None}:
        del rows[0]["pass"]
    with pytest.warns(
        RuntimeWarning, match="goes on without a tuned row of grouped_matmul that it cannot read"
    ) as said:
        got = grouped_matmul.make_plan(problem, H200, rows, backend="pallas")
    assert len(said) == 1
    assert got == grouped_matmul.make_plan(problem, H200, [], backend="pallas")
