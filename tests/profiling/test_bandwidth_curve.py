"""Bandwidth over size: what is measured, at tiny sizes; the table and the picture."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxops.profiling import Bandwidth, bandwidth, bandwidth_curve, measuring
from jaxops.profiling.bandwidth_curve import KINDS, Point, size_text


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "_WORK_US", 0)


def curve(*points: Point, **change) -> Bandwidth:
    return Bandwidth("NVIDIA H200", points, **{"host_memory": "pinned", "l2_bytes": 50 << 20, "jax": "0.12",
                                                "driver": None, "date": "2026-11-24"} | change)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([0], ValueError, "sizes is 0; it must be at least 4"),
        ([1024, -4], ValueError, "sizes is -4"),
        ([1.5], TypeError, "sizes is a float; it must be a Python integer"),
        (["1 MB"], TypeError, "sizes is a str"),
        ([True], TypeError, "sizes is a bool"),
        ([1022], ValueError, "sizes has 1022.*multiples of 4"),
        ([], ValueError, "sizes is empty"),
        (1024, TypeError, "sizes=1024: write a sequence"),
        ("1024", TypeError, "sizes='1024': write a sequence"),
    ],
)
def test_wrong_sizes(sizes, error, message):
    with pytest.raises(error, match=message):
        bandwidth(sizes)


def test_wrong_kinds():
    with pytest.raises(ValueError, match=r"kinds='nvlink': write 'copy', 'read', .*'peer_to_peer'"):
        bandwidth([4], kinds=["copy", "nvlink"])
    with pytest.raises(TypeError, match=r"kinds='copy' is a string; write \['copy'\]"):
        bandwidth([4], kinds="copy")
    with pytest.raises(ValueError, match="kinds is empty"):
        bandwidth([4], kinds=[])


def test_sizes_fit_in_the_memory(monkeypatch):
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 16 << 20)
    assert bandwidth_curve._checked_sizes(None, jax.devices()[0]) == [1 << 20, 2 << 20, 4 << 20]
    with pytest.raises(MemoryError, match=r"sizes has 8 MiB, of which 4 times as much is needed; cpu has 0\.0 GB"):
        bandwidth([8 << 20])
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 0)
    assert bandwidth_curve._checked_sizes(None, jax.devices()[0])[-1] == 64 << 20
    monkeypatch.setattr(measuring, "is_gpu", lambda device: True)
    assert bandwidth_curve._checked_sizes(None, jax.devices()[0])[-1] == 2 << 30


def test_bandwidth_has_all_kinds_sizes_and_pairs(quick):
    found = bandwidth([4096, 1024, 4096])
    pairs = [(a.id, b.id) for a in jax.local_devices() for b in jax.local_devices() if a != b]
    assert len(pairs) == 12
    want = [(kind, size, None) for kind in KINDS[:-1] for size in (1024, 4096)]
    want += [("peer_to_peer", size, pair) for pair in pairs for size in (1024, 4096)]
    assert [(point.kind, point.bytes, point.devices) for point in found.points] == want
    for point in found.points:
        moved = point.bytes * (2 if point.kind == "copy" else 1)
        assert point.gbps == pytest.approx(moved / point.us / 1e3, rel=0.01, abs=1e-3)
    assert (found.device, found.host_memory, found.l2_bytes) == ("cpu", "pinned", None)
    assert json.loads(found.to_json())["points"][0] == json.loads(json.dumps(vars(found.points[0])))
    assert "pinned" in str(found)
    assert "Slowest at 4 KiB" in str(found)


def test_memory_is_copied_read_and_written():
    x = measuring.normal(1000)
    programs = {kind: bandwidth_curve._memory_call(kind, x) for kind in ("copy", "read", "write")}
    results = {kind: call(*args) for kind, (call, args, _, _) in programs.items()}
    np.testing.assert_array_equal(results["copy"], -x)
    np.testing.assert_allclose(results["read"], np.asarray(x).sum(), rtol=1e-4)
    np.testing.assert_array_equal(results["write"], np.full(1000, 1.5))
    assert {kind: program[2:] for kind, program in programs.items()} == {
        "copy": (8000, 4000),
        "read": (4000, 4),
        "write": (4000, 4000),
    }


def test_operands_are_random_normal(monkeypatch):
    monkeypatch.setattr(measuring, "_CHUNK", 300)
    x = np.asarray(measuring.normal(1001))
    assert x.shape == (1001,)
    assert abs(x.std() - 1) < 0.1
    assert not np.array_equal(x[:300], x[300:600])


def test_one_device_has_no_pairs(quick, monkeypatch):
    class Alone:
        def local_devices(self):
            return jax.local_devices()[:1]

    device = type("Device", (), {"client": Alone()})()
    assert not [*bandwidth_curve._peer_points(device, jnp.ones(4))]  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(bandwidth_curve, "_peer_points", lambda device, x: ())
    assert bandwidth([1024], kinds=["peer_to_peer"]).points == ()


def test_a_backend_without_pinned_memory(monkeypatch):
    class Plain:
        def addressable_memories(self):
            return []

    monkeypatch.setattr(measuring, "to_other", lambda device: ("to", device))
    x = jnp.arange(4.0)
    kind, to_device, to_host = measuring.host_links(device := Plain(), x)  # pyright: ignore[reportArgumentType]
    assert (kind, to_device[0], to_host[0]) == ("pageable", ("to", device), ("to", jax.devices("cpu")[0]))
    np.testing.assert_array_equal(to_device[1], x)


def test_transfers_move_between_the_memories():
    x = jax.device_put(jnp.arange(8.0), jax.devices()[1])
    kind, (to_device, there), (to_host, here) = measuring.host_links(jax.devices()[1], x)
    assert (kind, there.sharding.memory_kind, here.sharding.memory_kind) == ("pinned", "pinned_host", "device")
    assert (to_device(there).sharding.memory_kind, to_host(here).sharding.memory_kind) == ("device", "pinned_host")
    assert measuring.to_other(jax.devices()[3])(x).devices() == {jax.devices()[3]}


def test_calls_are_repeated_within_the_memory(monkeypatch):
    """Results of all calls are alive at once: they take at most a quarter of what is free."""
    calls = []

    def wall_times(call, *args, iterations):
        calls.append(iterations)
        return [100.0] * iterations

    monkeypatch.setattr(measuring, "wall_times_us", wall_times)
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 4000)
    cpu = jax.devices()[0]
    for result_bytes, wanted in ((0, 50), (1, 50), (100, 9), (400, 1), (10_000, 1)):
        assert measuring.kernel_us(lambda: None, (), result_bytes, cpu) == 100.0
        assert calls[-1] == wanted, result_bytes
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 0)  # unknown
    measuring.kernel_us(lambda: None, (), 10**12, cpu)
    assert calls[-1] == 50
    monkeypatch.setattr(measuring, "_WORK_US", 50)
    measuring.wall_us(lambda: None)
    assert calls[-1] == 3


def test_table():
    many = curve(
        Point("copy", 1 << 20, 1.0, 2097.2), Point("copy", 1 << 30, 1.0, 4300.4), Point("read", 1 << 30, 1.0, 4444.4),
        Point("host_to_device", 1 << 30, 1.0, 54.321), Point("peer_to_peer", 1 << 30, 1.0, 380.0, (0, 1)),
        Point("peer_to_peer", 1 << 30, 1.0, 21.5, (1, 0)),
    )  # fmt: skip
    text = str(many)
    for part in ("NVIDIA H200: GB/s", "1 MiB", "2,097", "4,300", "54.3", "21.5 to 380", "L2 cache: 50 MiB",
                 "Slowest at 1 GiB: 1 to 0, 21.5 GB/s", "(pinned)"):  # fmt: skip
        assert part in text
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(many)
    assert "4,444" in console.export_text()
    assert "L2" not in str(curve(l2_bytes=None))


def test_sizes_have_names():
    sizes = (1, 1023, 1024, 1 << 20, 3 << 19, 1 << 30, 2 << 30, 2048 << 30)
    names = ["1 B", "1023 B", "1 KiB", "1 MiB", "1.5 MiB", "1 GiB", "2 GiB", "2048 GiB"]
    assert [size_text(size) for size in sizes] == names


def test_picture(tmp_path):
    points = [Point("copy", 1 << power, 1.0, 2000.0 + power) for power in range(20, 32)]
    points += [Point("peer_to_peer", 1 << 20, 1.0, float(a), (a, 1 - a)) for a in (0, 1)]
    for number, some in enumerate((points, points[-2:])):
        file = tmp_path / f"{number}.png"
        assert curve(*some).draw(str(file)) == file
        assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        curve().draw(tmp_path / "none.png")


def test_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxops\[bench\]'"):
        curve(Point("copy", 1024, 1.0, 1.0)).draw(tmp_path / "x.png")
