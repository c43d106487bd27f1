"""The card's ceilings: measured at tiny sizes, kept and read."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from jaxops._lib.planning.device import Device, current_device
from jaxops.profiling import Ceilings, ceilings, machine

pytestmark = pytest.mark.versions

TINY = machine.Sizes(1 << 12, ((16, 32, 8), (32, 8, 16)), 1 << 12)
RATES = {"bfloat16": 800.0, "float8_e4m3fn": 1500.0, "float32": 400.0}
CARD = Ceilings("cpu", 4000.0, RATES, 50.0, 40.0, jax.__version__, "580.1", "2026-11-24")


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


def the_file():
    return machine.ceilings_file(current_device())


def test_rates_are_work_over_time(monkeypatch):
    """The better shape counts, a copy moves twice its bytes, and transfers once."""
    device, asked = jax.devices()[2], []

    def median_us(call, *args, wall=False):
        assert {each for x in args for each in x.devices()} == {device}
        asked.append([x.shape for x in args])
        if wall:
            assert {x.sharding.memory_kind for x in (*args, call(*args))} == {"device", "pinned_host"}
            return 8.0 if args[0].sharding.memory_kind == "device" else 4.0
        return 2.0 if len(args) == 1 or args[0].shape == (16, 32) else 4.0

    monkeypatch.setattr(machine, "_median_us", median_us)
    with jax.transfer_guard("disallow"):  # as in the training loop
        card = machine.measure(device, TINY)
    assert (card.device, card.jax) == (device.device_kind, jax.__version__)
    assert card.copy_gbps == 4.096
    assert card.dense_tflops == dict.fromkeys(("bfloat16", "float16", "float32"), 0.004096)
    assert (card.host_to_device_gbps, card.device_to_host_gbps) == (1.024, 0.512)
    assert asked == [[(1024,)], *([[(16, 32), (32, 8)], [(32, 8), (8, 16)]] * 3), [(1024,)], [(1024,)]]


def test_a_gpu_with_fp8_that_cublaslt_does_not_multiply_has_no_rate_of_it(monkeypatch):
    """XLA on this CPU widens the operands, as it does on a GPU without cuBLASLt's FP8."""
    monkeypatch.setattr(machine, "_WORK_US", 0)
    monkeypatch.setattr(machine, "current_device", lambda: Device("NVIDIA H200", "gpu"))
    monkeypatch.setattr(machine, "device_times_us", machine.wall_times_us)
    assert "float8_e4m3fn" not in machine.measure(jax.devices()[0], TINY).dense_tflops
    monkeypatch.setattr(machine, "_CUBLASLT_FP8", "")  # in every program
    assert list(machine.measure(jax.devices()[0], TINY).dense_tflops)[-1] == "float8_e4m3fn"


def test_ceilings_are_kept(measured):
    first = ceilings()
    assert ceilings() == first
    assert len(measured) == 1
    assert ceilings(again=True).copy_gbps == 2.0
    assert ceilings().copy_gbps == 2.0
    assert measured == [jax.devices()[0]] * 2
    assert [file.name for file in the_file().parent.iterdir()] == ["cpu.json"]
    assert the_file().parent.name == "ceilings"
    for change in ({"jax": "0.1"}, {"device": "NVIDIA H100"}):  # another version, a foreign file
        the_file().write_text(json.dumps(json.loads(the_file().read_text()) | change))
        assert (ceilings().jax, ceilings().device) == (jax.__version__, "cpu")
    assert len(measured) == 4


def test_a_shared_card_is_measured_and_not_kept(measured, monkeypatch):
    monkeypatch.setattr(machine, "disturbance", lambda: "2 processes run on GPU 0")
    with pytest.warns(RuntimeWarning, match=r"2 processes run on GPU 0: .* too low\. The ceilings are not kept"):
        assert ceilings().copy_gbps == 1.0
    assert not the_file().exists()


@pytest.mark.parametrize("text", ["", "[]", '{"device": "cpu"}'])
def test_a_broken_file_is_measured_again(measured, text):
    the_file().parent.mkdir(parents=True)
    the_file().write_text(text)
    with pytest.warns(RuntimeWarning, match="cannot be used .*measured again") as caught:
        card = ceilings()
    assert caught[0].filename == __file__
    assert ceilings() == card
    assert len(measured) == 1


def test_ceilings_that_cannot_be_written_are_returned(measured, tmp_path):
    (tmp_path / "jaxops").write_text("no folder")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="are not kept") as caught:
            assert ceilings(again=True).dense_tflops == RATES
        assert caught[0].filename == __file__


def test_a_full_card_is_not_measured(measured, monkeypatch):
    monkeypatch.setattr(machine, "_free_bytes", lambda device: 3_000_000_000)
    with pytest.raises(MemoryError, match=r"has 3\.0 GB of free memory.*needs 8 GB\. Call.*process of its own"):
        ceilings()
    assert not measured


def test_the_ceiling_that_binds():
    assert CARD.floor(8e8, 4e6, "bfloat16") == (1.0, "memory")  # both
    assert CARD.floor(16e8, 4e6, jnp.bfloat16) == (2.0, "tensor cores")
    assert CARD.floor(8e8, 12e6, "bfloat16") == (3.0, "memory")
    assert CARD.floor(8e8, 0, "float32") == (2.0, "tensor cores")
    assert CARD.floor(15e8, 0, jnp.float8_e5m2) == (1.0, "tensor cores")
    assert CARD.floor(8e8, 4e6, "int8") == CARD.floor(8e8, 4e6) == (1.0, "memory")
    with pytest.raises(TypeError, match="dtype='fast'; it must be a dtype"):
        CARD.product_tflops("fast")


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
    card = ceilings()
    seconds = time.perf_counter() - start
    print(card, f"after {seconds:.1f} s")
    assert seconds < 20
    assert 100 < card.copy_gbps < 20_000
    assert card.dense_tflops["bfloat16"] > card.dense_tflops["float32"] > 1
    if current_device().is_hopper:
        assert card.dense_tflops["float8_e4m3fn"] > card.dense_tflops["bfloat16"]
    assert 1 < card.host_to_device_gbps < card.copy_gbps
    assert 1 < card.device_to_host_gbps < card.copy_gbps
    assert ceilings() == card
