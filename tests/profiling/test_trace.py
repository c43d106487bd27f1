"""Events of a profile: read from an XPlane file written by hand, their times, and those of calls."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.profiling import device_times, trace
from jaxops.profiling.trace import Event, Launch

pytestmark = pytest.mark.versions

STEP = 'stats { metadata_id: 1 str_value: "jit_step" } stats { metadata_id: 2 str_value: "dot.1" }'
SPACE = f"""
planes {{
  name: "/device:GPU:12"
  lines {{
    name: "Stream #7(Compute)" timestamp_ns: 5000
    events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 3500000 {STEP} }}
    events {{ metadata_id: 1 offset_ps: 9000000 duration_ps: 250000 {STEP} stats {{ metadata_id: 3 uint64_value: 4 }} }}
  }}
  lines {{ name: "XLA Ops" timestamp_ns: 5000 events {{ metadata_id: 1 duration_ps: 3500000 {STEP} }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "gemm" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_module" }} }}
  stat_metadata {{ key: 2 value {{ id: 2 name: "hlo_op" }} }}
  stat_metadata {{ key: 3 value {{ id: 3 name: "cuda_graph_id" }} }}
}}
planes {{
  name: "/device:GPU:0"
  lines {{ name: "Stream #9(MemcpyH2D)" events {{ metadata_id: 1 offset_ps: 1000 duration_ps: 2000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "MemcpyH2D" }} }}
}}
planes {{
  name: "/host:CPU"
  lines {{
    name: "python"
    events {{ metadata_id: 1 duration_ps: 9000000 stats {{ metadata_id: 1 str_value: "1" }} }}
    events {{ metadata_id: 2 offset_ps: 1000000 duration_ps: 3000000 }}
    events {{ metadata_id: 2 offset_ps: 2000000 duration_ps: 1000000 }}  # of the same call
    events {{ metadata_id: 3 duration_ps: 9000000 }}
  }}
  event_metadata {{ key: 1 value {{ id: 1 name: "train" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "PjitFunction(step)" }} }}
  event_metadata {{ key: 3 value {{ id: 3 name: "call" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "step_num" }} }}
}}
"""


def test_a_file_of_two_devices(tmp_path):
    """Nanoseconds and picoseconds become microseconds; a CUDA graph's kernels have no instruction."""
    (tmp_path / "t.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(SPACE))
    events, launches = trace.read(tmp_path)
    assert launches == [Launch("train", 0.0, True), Launch("step", 1.0, False)]
    assert [dataclasses.astuple(event) for event in events] == [
        ("MemcpyH2D", 0.001, 0.002, 0, "Stream #9", "", ""),
        ("gemm", 7.0, 3.5, 12, "Stream #7", "jit_step", "dot.1"),
        ("gemm", 14.0, 0.25, 12, "Stream #7", "jit_step", ""),
    ]


def test_times_that_overlap_count_once():
    one, two, apart = (Event("k", start, us, 0, "") for start, us in ((0, 10), (5, 10), (20, 1)))
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
    assert {name: trace.kind_of(name) for name in names} == names


def test_times_of_calls_on_the_host():
    calls = []
    times = device_times.wall_times_us(lambda x: calls.append(x) or jnp.ones(3), 7, iterations=4)
    assert len(times) == 4
    assert min(times) > 0
    assert calls == [7] * 5  # one to warm up


def test_milliseconds_of_calls_become_microseconds(monkeypatch):
    monkeypatch.setattr(trace, "has_recorded", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    measured = {True: [0.002, 0.5], False: [("gemm", 0.002), ("add", 0.001)]}
    measure = lambda fn, aggregate=True, **_: lambda *args: (fn(*args), measured[aggregate])
    monkeypatch.setattr(device_times, "_measured", measure)
    assert device_times.device_times_us(np.negative, 1.0) == [2.0, 500.0]
    assert device_times.kernel_times_us(np.negative, 1.0) == [("gemm", 2.0), ("add", 1.0)]
    measured[True] = None
    with pytest.raises(RuntimeError, match="no kernel ran on a GPU"):
        device_times.device_times_us(np.negative, 1.0)


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
