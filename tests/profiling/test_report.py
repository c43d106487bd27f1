"""Reports from recordings made by hand, comparisons, and what they print."""

import dataclasses

import pytest

from jaxops.profiling import Report, compare, trace
from jaxops.profiling.origins import with_origins
from jaxops.profiling.report import Group, Kernel, bound_of
from jaxops.profiling.trace import Event

pytestmark = pytest.mark.versions


def event(name, start, us, op="", program="jit_step", device=0, stream="Stream #1"):
    return Event(name, start, us, device, stream, program, op)


def kernel(name="k", us=100.0, **fields):
    given = {
        "kind": "kernel", "program": "jit_step", "op": "op", "scope": "Net/mlp", "primitive": "dot_general",
        "stage": "forward", "calls": 1.0, "flops": 1e9, "bytes": 1e6, "dtype": "bfloat16", "least_us": 80.0,
        "needs": "tensor cores",
    }  # fmt: skip
    return Kernel(name=name, us=us, **given | fields)


CEILINGS = {"copy_gbps": 1000.0, "dense_tflops": {"bfloat16": 100.0, "float32": 50.0}}


def report(*kernels, **fields):
    given = {
        "program": "jit_step", "device": "NVIDIA H200", "devices": 1, "steps": 3, "step_us": 400.0,
        "profiled_us": 500.0, "busy_us": 300.0, "exposed_communication_us": 0.0, "exposed_copies_us": 0.0,
        "ceilings": CEILINGS,
    }  # fmt: skip
    return Report(kernels=kernels, **given | fields)


def test_times_that_overlap_count_once():
    one, two, apart = event("a", 0, 10), event("b", 5, 10), event("c", 20, 1)
    assert trace.union_us([one, two, apart]) == 16
    assert trace.exposed_us([two], [one, apart]) == 5
    assert trace.exposed_us([two], []) == 10
    assert trace.union_us([]) == 0


def test_kinds_by_name():
    names = {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication", "MemcpyD2H": "copy to host", "Memset": "fill",
        "MemcpyH2D": "copy to device", "MemcpyD2D": "copy on device", "memcpy128": "copy on device", "fusion": "kernel",
        "MemcpyP2P": "communication",
    }  # fmt: skip
    assert {name: event(name, 0, 1).kind for name in names} == names


class TestOrigins:
    PLAIN = (event("gemm", 0, 1, "dot.1"), event("add", 1, 1, "add.1"), event("gemm", 2, 1, "dot.2"))

    def found(self, events, steps, plain=PLAIN):
        return [each.op for each in with_origins(events, steps, plain, None, "jit_step")]

    def test_the_kth_launch_of_a_name_is_its_kth_instruction(self):
        events = [event("gemm", 0, 1), event("add", 1, 1), event("gemm", 2, 1)]
        assert self.found([*events, *events], 2) == ["dot.1", "add.1", "dot.2"] * 2

    def test_other_numbers_of_launches_are_not_guessed(self):
        assert self.found([event("gemm", 0, 1), event("add", 1, 1)], 1) == ["", "add.1"]
        assert self.found([event("add", i, 1) for i in range(3)], 1) == ["add.1"] * 3  # of one instruction alone

    def test_known_instructions_and_other_programs_stay(self):
        assert self.found([event("gemm", 0, 1, "mine"), event("add", 0, 1, program="jit_other")], 1) == ["mine", ""]


def test_sums():
    found = report(
        kernel(us=200.0),
        kernel("MemcpyH2D", 50.0, kind="copy to device", op="", flops=None, bytes=None, least_us=None),
        kernel("other", 50.0, op="", flops=None, bytes=None, least_us=None, dtype=None, needs=None),
    )  # fmt: skip
    assert found.accounted == pytest.approx(250 / 300)
    assert found.idle_us == 100
    assert found.floor_us == 80 + 50 + 50
    assert found.mfu == pytest.approx(1e9 / 100e6 / 400)
    assert [group.name for group in found.by_stage()] == ["forward"]
    assert [group.name for group in found.by_scope(1)] == ["Net"]
    assert found.by_kernel()[0].tflops == pytest.approx(1e9 / 200 / 1e6)
    assert dataclasses.replace(found, ceilings=None).mfu is None


def test_recomputed_products_are_not_model_flops():
    assert report(kernel(stage="recomputed")).mfu is None


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, "tensor cores"),
        ({"needs": "memory"}, "memory"),
        ({"us": 3.0, "least_us": 0.1}, "launch latency"),
        ({"us": 3.0, "least_us": 2.9, "needs": "memory"}, "memory"),
        ({"kind": "communication"}, "communication"),
        ({"kind": "copy to host"}, "copy"),
        ({"needs": None, "least_us": None}, "unknown"),
    ],
)
def test_bounds(fields, bound):
    assert bound_of(kernel(**fields)) == bound


def test_a_group_with_unknown_parts_says_so():
    group = Group("g", (kernel(), kernel(flops=None, bytes=None, least_us=None)))
    assert group.partial
    assert ">" in str(report(*group.kernels))


def test_json_comes_back(tmp_path):
    one = report(kernel("a_1"), kernel("b", 3.0), notes=("one",))
    (tmp_path / "r.json").write_text(one.to_json())
    assert Report.load(tmp_path / "r.json") == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": [{"us": 1}]}', '{"kernels": [], "notes": [], "x": 1}'])
def test_other_json_is_an_error(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json: this is no report"):
        Report.load(tmp_path / "r.json")


def test_files(tmp_path):
    held = {"kind": "temporary", "stage": "forward", "shape": "f32[8]", "scope": "Net/mlp", "bytes": 1_500_000_000}
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes", "host_bytes", "unexplained_bytes"), 0)
    memory = {"peak_bytes": 2_000_000_000, "holders": [held, held], "notes": [], **sizes}
    row = kernel("row", 30.0, flops=1e6, bytes=1e7, needs="memory", least_us=10.0, dtype=None)
    files = report(kernel("a_1", op="dot.1"), row, memory=memory).save(tmp_path / "new")
    assert [file.name for file in files] == ["profile.json", "profile.txt"]
    text = files[1].read_text()
    for words in (
        "0.400 ms a step",
        "idle 0.100 ms (25.0%)",
        "Net/mlp",
        "2.00 GB at the peak",
        "2 x f32[8]",
        "3.00 GB",
        "tensor cores",
    ):
        assert words in text


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
