"""Reports from recordings made by hand, comparisons, and what they print."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxops.profiling import Ceilings, Holder, Memory, Report, compare
from jaxops.profiling.building import Recording, build
from jaxops.profiling.report import Group, Kernel
from jaxops.profiling.trace import Event

pytestmark = pytest.mark.versions

CARD = Ceilings("card", 1000.0, {"bfloat16": 100.0, "float32": 50.0}, 1.0, 1.0, "", None, "")
KERNEL = Kernel(
    name="k", kind="kernel", program="jit_step", op="op", scope="Net/mlp", primitive="dot_general", stage="forward",
    calls=1.0, us=100.0, flops=1e9, bytes=1e6, dtype="bfloat16", least_us=80.0, needs="tensor cores",
)  # fmt: skip
UNKNOWN = {"flops": None, "bytes": None, "least_us": None, "dtype": None, "needs": None}


def kernel(name="k", us=100.0, **fields):
    return dataclasses.replace(KERNEL, name=name, us=us, **fields)


def report(*kernels, **fields):
    given = {
        "program": "jit_step", "device": "NVIDIA H200", "devices": 1, "steps": 3, "step_us": 400.0,
        "profiled_us": 500.0, "busy_us": 300.0, "exposed_communication_us": 0.0, "exposed_copies_us": 0.0,
        "ceilings": CARD,
    }  # fmt: skip
    return Report(kernels=kernels, **given | fields)


def test_a_report_is_of_one_step_of_one_device():
    """Two steps on two devices, in microseconds; nothing of one device hides what is exposed on the other."""
    event = lambda name, start, end, device: Event(name, start, end - start, device, "Stream #1", "jit_by_hand", name)
    events = [
        event("gemm", 0, 10, 0),
        event("nccl", 5, 20, 0),  # alone for 10
        event("MemcpyH2D", 30, 34, 0),  # alone for 4
        event("gemm", 0, 30, 1),
        event("nccl", 10, 20, 1),
        event("MemcpyH2D", 12, 22, 1),
    ]
    made = build(Recording(2, events, 20.0, 21.0, "jit_by_hand"), CARD)
    assert (made.devices, made.steps, made.program) == (2, 2, "jit_by_hand")
    kernels = {kernel.name: (kernel.kind, kernel.calls, kernel.us) for kernel in made.kernels}
    assert kernels == {
        "gemm": ("kernel", 0.5, 10.0),
        "nccl": ("communication", 0.5, 6.25),
        "MemcpyH2D": ("copy to device", 0.5, 3.5),
    }
    assert made.busy_us == (20 + 4 + 30) / 4
    assert made.exposed_communication_us == 10 / 4
    assert made.exposed_copies_us == 4 / 4
    assert made.idle_us == 20 - 13.5
    assert made.kernels_us == 19.75


def test_the_cost_of_an_instruction_is_its_longest_kernels_and_a_hidden_one_is_found_by_name():
    """Of a step that runs the instruction three times, in a CUDA graph, beside a kernel of cuBLAS."""
    executable = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((64, 64))).compile().runtime_executable()
    module = executable.hlo_modules()[0]
    op = next(each.name for part in module.computations() for each in part.instructions() if "sin" in each.name)
    hidden = lambda name, us: Event(name, 0.0, us, 0, "Stream #1", module.name, "")
    events = [hidden(op.replace(".", "_"), 5.0), hidden("cublas", 2.0)] * 3
    events += [dataclasses.replace(event, name="short", us=1.0, op=op) for event in events[:1]]
    made = build(Recording(1, events, 20.0, 21.0, module.name, {module.name: executable}), CARD)
    assert [(each.op, each.primitive, each.calls, each.bytes) for each in made.kernels] == [
        (op, "sin", 3.0, 3 * 2 * 64 * 64 * 4), ("", "", 3.0, None), (op, "sin", 1.0, 0),
    ]  # fmt: skip
    assert (made.kernels[0].least_us, made.kernels[0].needs) == (3 * 2 * 64 * 64 * 4 / 1e6, "memory")
    assert made.accounted == pytest.approx(16 / 22)
    assert any("CUDA graphs hide it" in note for note in made.notes)


def test_sums():
    made = report(
        kernel(us=200.0),
        kernel("MemcpyH2D", 50.0, **UNKNOWN | {"kind": "copy to device", "op": ""}),
        kernel("other", 50.0, **UNKNOWN | {"op": ""}),
    )
    assert made.accounted == pytest.approx(250 / 300)
    assert made.idle_us == 100
    assert made.floor_us == 80 + 50 + 50
    assert made.mfu == pytest.approx(1e9 / 100e6 / 400)
    assert [group.name for group in made.by_stage()] == ["forward"]
    assert [group.name for group in made.by_scope(1)] == ["Net"]
    assert made.by_kernel()[0].tflops == pytest.approx(1e9 / 200 / 1e6)
    assert dataclasses.replace(made, ceilings=None).mfu is None
    assert report(kernel(stage="recomputed")).mfu is None, "recomputed products are not model FLOPs"


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, "tensor cores"),
        ({"needs": "memory"}, "memory"),
        ({"us": 3.0, "least_us": 0.1}, "launch latency"),
        ({"us": 3.0, "least_us": 2.9, "needs": "memory"}, "memory"),
        ({"us": 30.0, "calls": 10.0, "least_us": 1.0}, "launch latency"),
        ({"kind": "communication"}, "communication"),
        ({"kind": "copy to host"}, "copy"),
        ({"needs": None, "least_us": None}, "unknown"),
    ],
)
def test_bounds(fields, bound):
    assert kernel(**fields).bound == bound
    assert Group("g", (kernel(us=1.0, kind="fill"), kernel(**fields))).bound == bound


MEMORY = Memory(2_000_000_000, 0, 0, 0, 0, 2 * (Holder(1_500_000_000, "temporary", "Net/mlp", "f32[8]", "forward"),))


def test_files(tmp_path):
    row = kernel("row", 30.0, flops=1e6, bytes=1e7, needs="memory", least_us=10.0, dtype=None)
    made = report(kernel("a_1", op="dot.1"), row, kernel("b", **UNKNOWN), memory=MEMORY, notes=("one",))
    files = made.save(tmp_path / "new")
    assert [file.name for file in files] == ["profile.json", "profile.txt"]
    assert Report.load(files[0]) == made
    text = files[1].read_text()
    for words in (
        "0.400 ms a step",
        "idle 0.100 ms (25.0%)",
        "Net/mlp",
        "2.00 GB at the peak",
        "2 x f32[8]",
        "3.00 GB",
        "tensor cores",
        "copy 1,000 GB/s; products bfloat16 100 TFLOP/s",
        "note: one",
        ">",  # FLOPs of a part of the scope's kernels are unknown
    ):
        assert words in text


def test_a_table_has_fifteen_rows_and_the_others():
    """Numbers are flush right."""
    lines = str(report(*(kernel(letter, 1000.0 - i) for i, letter in enumerate("abcdefghijklmnopq")))).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("kernel"))
    rows = [line.split() for line in lines[start + 2 : lines.index("", start)]]
    assert [row[0] for row in rows] == [*"abcdefghijklmno", "2"]
    assert rows[-1][1:5] == ["others", "2", "1.969", "ms"]
    ends = [lines[number].index(cell) + len(cell) for number, cell in ((start, "calls"), (start + 2, " 1 "))]
    assert ends[0] == ends[1] - 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": [{"us": 1}]}', '{"kernels": [], "notes": [], "x": 1}'])
def test_other_json_is_an_error(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json: this is no report"):
        Report.load(tmp_path / "r.json")


def test_compare():
    before = report(kernel("a_1", 100.0), kernel("gone", 10.0), kernel("same", 5.0))
    after = report(kernel("a_7", 150.0), kernel("new", 20.0), kernel("same", 5.0), step_us=420.0)
    found = compare(before, after)
    assert [(row.name, row.difference_us, row.change_text) for row in found.rows] == [
        ("a", 50.0, "+50.0%"), ("new", 20.0, "new"), ("gone", -10.0, "gone"), ("same", 0.0, "+0.0%"),
    ]  # fmt: skip
    assert found.ratio == pytest.approx(1.05)
    assert found.slower_by(0.04)
    assert not found.slower_by(0.06)
    assert "+5.0%" in str(found)
    with pytest.raises(ValueError, match="compare reports of the same devices"):
        compare(before, dataclasses.replace(after, devices=2))
    with pytest.raises(ValueError, match="took no time"):
        compare(before, dataclasses.replace(after, step_us=0.0))


def test_compare_tells_stages_and_modules_apart():
    """What a kernel of the forward loses hides nothing that the same one of the backward or another module gains."""
    others = ({}, {"stage": "backward"}, {"scope": "Net/head"})
    reports = [report(*(kernel("a", us, **each) for us, each in zip(times, others, strict=True)))
               for times in ((100.0, 50.0, 30.0), (80.0, 80.0, 20.0))]  # fmt: skip
    assert {(row.scope, row.before_us, row.after_us) for row in compare(*reports).rows} == {
        ("Net/mlp", 100.0, 80.0), ("Net/mlp (backward)", 50.0, 80.0), ("Net/head", 30.0, 20.0),
    }  # fmt: skip
