"""The card's ceilings: measured at tiny sizes, kept and read."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops._lib.planning.device import Device, current_device
from jaxops.profiling import Ceilings, ceilings, machine

pytestmark = pytest.mark.versions

TINY = machine.Sizes(1 << 12, ((16, 32, 8), (32, 8, 16)), 1 << 12)
RATES = {"bfloat16": 800.0, "float8_e4m3fn": 1500.0, "float32": 400.0}
CARD = Ceilings("cpu", 4000.0, RATES, 50.0, 40.0, "pinned", jax.__version__, "580.1", "2026-11-24")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The devices that were measured, by a fake, in a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = []

    def measure(device, sizes):
        devices.append(device)
        return dataclasses.replace(CARD, copy_gbps=float(len(devices)), device=device.device_kind)

    monkeypatch.setattr(machine, "measure", measure)
    return devices


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(machine, "_WORK_US", 0)


def the_file():
    return machine.ceilings_file(current_device())


def test_ceilings_are_measured_at_the_given_sizes(quick):
    device = jax.devices()[1]
    found = machine.measure(device, TINY)
    assert list(found.dense_tflops) == ["bfloat16", "float16", "float32"]
    assert (found.device, found.jax, found.host_memory) == (device.device_kind, jax.__version__, "pinned")
    assert Ceilings.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_rates_are_work_over_time(monkeypatch):
    """The better shape counts, a copy moves twice its bytes, and transfers once."""
    device, asked = jax.devices()[2], []

    def kernel_us(call, args, result_bytes, where):
        assert where == device
        assert {each for x in args for each in x.devices()} == {device}
        assert result_bytes == call(*args).nbytes
        asked.append([x.shape for x in args])
        return 2.0 if len(args) == 1 or args[0].shape == (16, 32) else 4.0

    monkeypatch.setattr(machine, "_kernel_us", kernel_us)
    monkeypatch.setattr(machine, "_wall_us", lambda call, x: 8.0 if x.sharding.memory_kind == "device" else 4.0)
    found = machine.measure(device, TINY)
    assert found.copy_gbps == machine._rounded(2 * 4096 / 2.0 / 1e3)
    assert set(found.dense_tflops.values()) == {machine._rounded(2 * 16 * 32 * 8 / 2.0 / 1e6)}
    assert (found.host_to_device_gbps, found.device_to_host_gbps) == (1.024, 0.512)
    assert asked == [[(1024,)], *([[(16, 32), (32, 8)], [(32, 8), (8, 16)]] * 3)]


def test_a_gpu_with_fp8_that_cublaslt_does_not_multiply_has_no_rate_of_it(quick, monkeypatch):
    """XLA on this CPU widens the operands, as it does on a GPU without cuBLASLt's FP8."""
    monkeypatch.setattr(machine, "_facts_of", lambda device: Device("NVIDIA H200", "gpu"))
    monkeypatch.setattr(machine, "_is_gpu", lambda device: False)
    assert "float8_e4m3fn" not in machine.measure(jax.devices()[0], TINY).dense_tflops
    monkeypatch.setattr(machine, "_CUBLASLT_FP8", "")  # in every program
    assert list(machine.measure(jax.devices()[0], TINY).dense_tflops)[-1] == "float8_e4m3fn"


def test_fp8_product_is_that_of_its_operands():
    x, w = machine._operands(machine._normal(1024), (16, 32, 8), "float8_e4m3fn")
    assert (x.shape, w.shape, x.dtype) == ((16, 32), (8, 32), jnp.float8_e4m3fn)
    want = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
    np.testing.assert_allclose(np.asarray(machine._fp8_product(x, w), np.float32), want, rtol=1e-2, atol=1e-2)


def test_ceilings_are_kept(measured):
    first = ceilings()
    assert ceilings() == first
    assert len(measured) == 1
    assert ceilings(again=True).copy_gbps == 2.0
    assert ceilings().copy_gbps == 2.0
    assert measured == [jax.devices()[0]] * 2
    assert Ceilings.from_dict(json.loads(the_file().read_text())) == ceilings()
    assert [file.name for file in the_file().parent.iterdir()] == ["cpu.json"]
    assert the_file().parent.name == "ceilings"


def test_a_shared_card_is_measured_and_not_kept(measured, monkeypatch):
    monkeypatch.setattr(machine, "disturbance", lambda: "2 processes run on GPU 0")
    with pytest.warns(RuntimeWarning, match="2 processes run on GPU 0: its ceilings may be too low and are not kept"):
        assert ceilings().copy_gbps == 1.0
    assert not the_file().exists()


def test_another_version_of_jax_measures_again(measured):
    ceilings()
    the_file().write_text(json.dumps(dataclasses.replace(CARD, jax="0.1").to_dict()))
    assert ceilings().jax == jax.__version__
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be used"),
        ("[]", "these are no ceilings"),
        (json.dumps(CARD.to_dict() | {"copy_gbps": 0}), "rates are positive"),
        (json.dumps(CARD.to_dict() | {"dense_tflops": {"float32": "fast"}}), "rates are positive"),
        (json.dumps(CARD.to_dict() | {"dense_tflops": 3}), "these are no ceilings"),
        (json.dumps({"device": "cpu"}), "these are no ceilings"),
        (json.dumps(CARD.to_dict() | {"device": "NVIDIA H100"}), "is of NVIDIA H100, this is cpu"),
    ],
)
def test_a_broken_or_foreign_file_is_measured_again(measured, text, message):
    the_file().parent.mkdir(parents=True)
    the_file().write_text(text)
    with pytest.warns(RuntimeWarning, match=f"{message}.*measured again"):
        found = ceilings()
    assert ceilings() == found
    assert len(measured) == 1


def test_ceilings_that_cannot_be_written_are_returned(measured, tmp_path):
    (tmp_path / "jaxops").write_text("no folder")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="are not kept") as caught:
            assert ceilings(again=True).dense_tflops == RATES
        assert caught[0].filename == __file__


def test_a_full_card_is_not_measured(measured, monkeypatch):
    monkeypatch.setattr(machine, "_free_bytes", lambda device: 3_000_000_000)
    with pytest.raises(MemoryError, match=r"has 3\.0 GB of free memory.*needs 6 GB\. Call.*cpu\.json"):
        ceilings()
    assert not measured


def test_product_tflops():
    assert CARD.product_tflops(jnp.bfloat16) == CARD.product_tflops("bfloat16") == 800.0
    assert CARD.product_tflops(jnp.float8_e5m2) == CARD.product_tflops(np.dtype(jnp.float8_e4m3fn)) == 1500.0
    assert CARD.product_tflops("int8") is None
    with pytest.raises(TypeError, match="dtype='fast'; it must be a dtype"):
        CARD.product_tflops("fast")


def test_least_us():
    assert CARD.least_us(8e8, 4e6, "bfloat16") == 1.0  # both ceilings
    assert CARD.least_us(16e8, 4e6, "bfloat16") == 2.0
    assert CARD.least_us(8e8, 12e6, "bfloat16") == 3.0
    assert CARD.least_us(8e8, 0, "float32") == 2.0
    assert CARD.least_us(0, 4e6, "int8") == 1.0
    with pytest.raises(ValueError, match="dtype=int8: its products were not measured, only bfloat16, float8"):
        CARD.least_us(1, 0, jnp.int8)
    with pytest.raises(ValueError, match="flops is -1"):
        CARD.least_us(-1, 0, "float32")
    with pytest.raises(TypeError, match="moved_bytes is a str"):
        CARD.least_us(0, "1", "float32")  # pyright: ignore[reportArgumentType]


def test_wrong_arguments(measured):
    with pytest.raises(TypeError, match=r"device is a str; write one of jax\.local_devices"):
        ceilings("cpu")
    with pytest.raises(TypeError, match="again='no'"):
        ceilings(again="no")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu(tmp_path, monkeypatch):
    """An H200 copies at about 4,300 GB/s; only what no sane card breaks is asserted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = time.perf_counter()
    found = ceilings()
    seconds = time.perf_counter() - start
    print(found, f"after {seconds:.1f} s")
    assert seconds < 20
    assert 100 < found.copy_gbps < 20_000
    assert found.dense_tflops["bfloat16"] > found.dense_tflops["float32"] > 1
    if current_device().is_hopper:
        assert found.dense_tflops["float8_e4m3fn"] > found.dense_tflops["bfloat16"]
    assert found.host_memory == "pinned"
    assert 1 < found.host_to_device_gbps < found.copy_gbps
    assert 1 < found.device_to_host_gbps < found.copy_gbps
    assert ceilings() == found
