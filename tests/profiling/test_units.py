"""Times and devices of a profile, from an XPlane file and events written by hand: nanoseconds, picoseconds and
milliseconds become microseconds, and a report has a step's of one device."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from jaxops.profiling import device_times, trace
from jaxops.profiling.building import Recording, build
from jaxops.profiling.machine import Ceilings
from jaxops.profiling.trace import Event, Launch

pytestmark = pytest.mark.versions


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A protocol buffer message of varints, and strings or messages."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + varint(value // 128)

    found = b""
    for number, value in fields:
        data = value.encode() if isinstance(value, str) else value
        found += varint(8 * number) + varint(data) if isinstance(data, int) else (
            varint(8 * number + 2) + varint(len(data)) + data
        )  # fmt: skip
    return found


def plane(name: str, *lines: tuple[str, int, list[tuple[str, int, int, dict[str, str]]]]) -> bytes:
    """An XPlane of lines: their name and start in nanoseconds, and of each event its name, its picoseconds from there,
    its length in picoseconds, and its texts."""
    names = sorted({event[0] for line in lines for event in line[2]})
    keys = sorted({key for line in lines for event in line[2] for key in event[3]})
    metadata = lambda known: [message((1, i), (2, message((1, i), (2, key)))) for i, key in enumerate(known, 1)]
    found = [(2, name)]
    for line, start_ns, events in lines:
        each = [
            message(
                (1, names.index(of) + 1), (2, offset_ps), (3, ps),
                *((4, message((1, keys.index(key) + 1), (5, text))) for key, text in texts.items()),
            )
            for of, offset_ps, ps, texts in events
        ]  # fmt: skip
        found.append((3, message((2, line), (3, start_ns), *((4, event) for event in each))))
    return message(*found, *((4, of) for of in metadata(names)), *((5, of) for of in metadata(keys)))


def test_a_file_of_two_devices(tmp_path):
    step = {"hlo_module": "jit_step", "hlo_op": "dot.1"}
    planes = (
        plane(
            "/device:GPU:12",
            ("Stream #7(Compute)", 5_000, [("gemm", 2_000_000, 3_500_000, step), ("gemm", 9_000_000, 250_000, step)]),
            ("XLA Ops", 5_000, [("dot.1", 2_000_000, 3_500_000, step)]),
        ),
        plane("/device:GPU:0", ("Stream #9(MemcpyH2D)", 0, [("MemcpyH2D", 1_000, 2_000, {})])),
        plane(
            "/host:CPU",
            (
                "python",
                0,
                [
                    ("train", 0, 9_000_000, {"step_num": "1"}),
                    ("PjitFunction(step)", 1_000_000, 3_000_000, {}),
                    ("PjitFunction(step)", 2_000_000, 1_000_000, {}),  # of the same call
                    ("call", 0, 9_000_000, {}),
                ],
            ),
        ),
    )
    file = tmp_path / "t.xplane.pb"
    file.write_bytes(message(*((1, of) for of in planes)))
    events, launches = trace.read(tmp_path)
    assert launches == [Launch("train", 0.0, True), Launch("step", 1.0, False)]
    assert {dataclasses.astuple(event) for event in events} == {
        ("gemm", 7.0, 3.5, 12, "Stream #7", "jit_step", "dot.1"),
        ("gemm", 14.0, 0.25, 12, "Stream #7", "jit_step", "dot.1"),
        ("MemcpyH2D", 0.001, 0.002, 0, "Stream #9", "", ""),
    }


def test_a_report_is_of_one_step_of_one_device():
    """Two steps on two devices, in microseconds; nothing of one device hides what is exposed on the other."""
    card = Ceilings("card", 1.0, {}, 1.0, 1.0, "pinned", "", None, "")
    event = lambda name, start, end, device: Event(name, start, end - start, device, "Stream #1", "jit_by_hand", name)
    events = [
        event("gemm", 0, 10, 0),
        event("nccl", 5, 20, 0),  # alone for 10
        event("MemcpyH2D", 30, 34, 0),  # alone for 4
        event("gemm", 0, 30, 1),
        event("nccl", 10, 20, 1),
        event("MemcpyH2D", 12, 22, 1),
    ]
    found = build(Recording(2, events, step_us=20.0, profiled_us=21.0, complete=True), card)
    assert (found.devices, found.steps, found.program) == (2, 2, "jit_by_hand")
    kernels = {kernel.name: (kernel.kind, kernel.calls, kernel.us) for kernel in found.kernels}
    assert kernels == {
        "gemm": ("kernel", 0.5, 10.0),
        "nccl": ("communication", 0.5, 6.25),
        "MemcpyH2D": ("copy to device", 0.5, 3.5),
    }
    assert found.busy_us == (20 + 4 + 30) / 4
    assert found.exposed_communication_us == 10 / 4
    assert found.exposed_copies_us == 4 / 4
    assert found.idle_us == 20 - 13.5
    assert found.kernels_us == 19.75


def test_milliseconds_of_calls_become_microseconds(monkeypatch):
    monkeypatch.setattr(trace, "has_recorded", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    measured = {True: [0.002, 0.5], False: [("gemm", 0.002), ("add", 0.001)]}
    monkeypatch.setattr(
        device_times.profiler, "measure", lambda fn, aggregate=True, **_: lambda *args: (fn(*args), measured[aggregate])
    )
    assert device_times.device_times_us(np.negative, 1.0) == [2.0, 500.0]
    assert device_times.kernel_times_us(np.negative, 1.0) == [("gemm", 2.0), ("add", 1.0)]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["gemm", "MemcpyH2D", "nccl", "gemm", "Memset", "nccl"], [1 + 4, 8 + 32]),  # of each call two kernels
        (["gemm", "MemcpyH2D", "nccl", "gemm", "Memset", "Memset"], 2 * [(1 + 4 + 8) / 2]),  # three of two calls
    ],
)
def test_recorded_times_are_those_of_each_calls_kernels(names, wanted, monkeypatch):
    """Events of 1, 2, 4, 8, 16 and 32 microseconds, of two calls."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    events = [Event(name, 100.0 * i, 2.0**i, 0, "Stream #1") for i, name in enumerate(names)]
    monkeypatch.setattr(trace, "has_recorded", lambda: True)
    monkeypatch.setattr(trace, "recorded", lambda: contextlib.nullcontext(events))
    assert device_times.device_times_us(np.negative, 1.0, iterations=2) == wanted
