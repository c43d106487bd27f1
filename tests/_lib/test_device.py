"""What is known of a device: from its name, from JAX's devices, from what a call's operands tell."""

import importlib.metadata
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxops._lib.planning import device as device_facts
from jaxops._lib.planning.device import Device, device_of

CAPABILITIES = {
    "Tesla V100-SXM2-16GB": (7, 0),
    "Tesla T4": (7, 5),
    "NVIDIA GeForce GTX 1080 Ti": (6, 0),
    "NVIDIA A100-SXM4-80GB": (8, 0),
    "NVIDIA A10G": (8, 6),
    "NVIDIA RTX A6000": (8, 6),
    "NVIDIA L4": (8, 9),
    "NVIDIA GeForce RTX 4090": (8, 9),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA H200": (9, 0),
    "NVIDIA GH200 480GB": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA B300": (10, 3),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "NVIDIA X900": (8, 9),  # newer than the table
    "AMD Instinct MI300X": None,
    "gfx942": None,
}


@pytest.mark.parametrize("kind", CAPABILITIES)
def test_by_name(kind):
    device = Device(kind, "gpu")
    assert device.capability == CAPABILITIES[kind]
    assert device == Device(kind, "cuda")
    assert device.is_hopper == (device.capability == (9, 0))
    assert device.has((8, 0)) == (device.capability is not None and device.capability[0] >= 8)


def test_shared_memory_and_multiprocessors():
    kinds = ("NVIDIA H200", "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    assert [Device(kind, "gpu").shared_bytes for kind in kinds] == [232_448, 232_448, 166_912, 101_376]
    assert [Device(kind, "gpu").cores for kind in ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H20")] == [132, 114, 78]
    assert Device("NVIDIA H200", "gpu", cores=16).cores == 16


def test_elsewhere_nothing_is_read_from_the_name():
    for platform in ("cpu", "tpu"):
        device = Device("NVIDIA H200", platform)
        assert (device.capability, device.cores, device.has((8, 0))) == (None, 132, False)
        assert device.interpret == (platform == "cpu")


def test_of_a_jax_device():
    """A device that is there says its compute capability itself, whatever its name."""
    fake = types.SimpleNamespace(device_kind="NVIDIA New", platform="gpu", compute_capability="9.0", core_count=7)
    assert device_facts._of_jax(fake) == Device("NVIDIA New", "gpu", (9, 0), 7)
    rocm = types.SimpleNamespace(
        device_kind="AMD Instinct MI300X", platform="gpu", compute_capability="gfx942", core_count=304
    )
    assert device_facts._of_jax(rocm).capability is None


def test_operands_tell(monkeypatch):
    """Concrete operands, under grad and vmap too; under jit it is the default device."""
    device = jax.devices()[1]
    x = jax.device_put(jnp.ones((2, 3)), device)
    asked = []
    monkeypatch.setattr(device_facts, "_of_jax", lambda found: asked.append(found) or Device("cpu", "cpu"))

    def f(x):
        device_of(None, np.ones(3), {"x": x})
        return x.sum()

    for call in (f, jax.grad(f), jax.vmap(f), jax.vmap(jax.grad(f))):
        asked.clear()
        call(x)
        assert asked == [device]
    asked.clear()
    jax.jit(f)(x)
    device_of(np.ones(3))
    assert asked == [jax.devices()[0]] * 2
    asked.clear()
    with jax.default_device(device):
        device_of(np.ones(3))
    assert asked == [device]


def test_the_mesh_tells():
    mesh = AbstractMesh(
        (1,),
        ("x",),
        axis_types=(AxisType.Auto,),
        abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
    )
    x = jnp.ones(2)
    with jax.sharding.use_abstract_mesh(mesh):
        assert device_of(x) == Device("NVIDIA H200", "gpu", (9, 0), 132)


@pytest.mark.parametrize(("devices", "shared"), [(1, False), (2, True)])
def test_collectives_share_a_device_of_several(devices, shared):
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    found = []
    inside = jax.shard_map(lambda x: found.append(device_of(x)) or x, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    jax.jit(inside).trace(jnp.ones(2))
    assert [device.shared for device in found] == [shared]


@pytest.mark.parametrize(
    ("python", "platform", "installed", "said"),
    [
        ((3, 12), "linux", {"jax-triton": "0.4.1", "triton": "3.9.0"}, ""),
        ((3, 13), "linux", {"jax-triton": "0.4.3", "triton": "3.10.1+git"}, ""),
        ((3, 11), "linux", {"jax-triton": "0.4.1", "triton": "3.9.0"}, "Python 3.12"),
        ((3, 12), "darwin", {}, "Linux"),
        ((3, 12), "linux", {"triton": "3.9.0"}, "jax-triton cannot be imported: pip install"),
        ((3, 12), "linux", {}, "jax-triton and triton cannot be imported"),
        ((3, 12), "linux", {"jax-triton": "0.5.0", "triton": "3.9.0"}, "this is jax-triton 0.5.0, triton 3.9.0"),
        ((3, 12), "linux", {"jax-triton": "0.3.1", "triton": "3.9.0"}, "need jax-triton 0.4"),
        ((3, 12), "linux", {"jax-triton": "0.4.1", "triton": "3.6.0"}, "triton 3.6.0"),
        ((3, 12), "linux", {"jax-triton": "0.4.1", "triton": None}, ""),  # of another wheel, with 3.10.0 in the module
    ],
)
def test_what_gluon_kernels_need(monkeypatch, python, platform, installed, said):
    """Looked for, not loaded."""
    monkeypatch.setattr(device_facts, "sys", types.SimpleNamespace(version_info=python, platform=platform))
    find_spec = lambda name: object() if name.replace("_", "-") in installed else None
    not_found = importlib.metadata.PackageNotFoundError

    def version(name: str) -> str:
        if installed[name] is None:
            raise not_found(name)
        return installed[name]

    fake = types.SimpleNamespace(
        util=types.SimpleNamespace(find_spec=find_spec),
        metadata=types.SimpleNamespace(version=version, PackageNotFoundError=not_found),
        import_module=lambda name: types.SimpleNamespace(__version__="3.10.0"),
    )
    monkeypatch.setattr(device_facts, "importlib", fake)
    missing = device_facts.gluon_missing.__wrapped__()
    assert said in missing
    assert bool(missing) == bool(said)


@pytest.mark.parametrize(
    ("kind", "mib", "gbps"),
    [
        ("NVIDIA H100 80GB HBM3", 50, 3350), ("NVIDIA H100 NVL", 50, 3900), ("NVIDIA H100 PCIe", 50, 2000),
        ("NVIDIA H200", 50, 4800), ("NVIDIA GH200 480GB", None, 4800), ("NVIDIA H20", None, 4000),
        ("NVIDIA A100-SXM4-80GB", 40, None), ("NVIDIA B200", 126, None), ("NVIDIA L4", None, None),
    ],
)  # fmt: skip
def test_l2_and_memory_bandwidth(kind, mib, gbps):
    device = Device(kind, "gpu")
    assert (device.l2_bytes, device.memory_gbps) == (mib and mib << 20, gbps)
    assert Device(kind, "cpu").l2_bytes is None
