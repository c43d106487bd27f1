"""What takes the kernel, what XLA, and why; and that the kernel lowers for a Hopper GPU."""

import dataclasses
from unittest import mock

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._lib.planning.device import Device
from jaxops.parallel import products
from jaxops.parallel.plan import OLDEST, Problem, Reach, make_exchange_plan, make_plan
from tests.parallel.cases import AXIS, PRODUCTS, mesh_of, over

H200 = Device("NVIDIA H200", "gpu")
PROBLEM = Problem(Reach(devices=2), m=2048, n=7168, depths=(4096,), dtype="bfloat16", sent=4096)

UNREACHABLE = (
    (Reach(1), "one device"),
    (Reach(9), "at most 8 devices"),
    (Reach(2, manual=False), "all axes of the mesh"),
    (Reach(2, missing="NCCL is too old"), "NCCL is too old"),
)


@pytest.fixture
def new_enough():
    with mock.patch.object(jax, "__version_info__", OLDEST):
        yield


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"dtype": "float16", "m": 9003, "depths": (8, 72), "n": 64}, ""),
        ({"transposed": True, "m": 9003, "n": 8, "depths": (320, 72)}, ""),
        *(({"reach": reach}, why) for reach, why in UNREACHABLE),
        ({"dtype": "float32"}, "bfloat16 and float16"),
        ({"exact": False}, "bfloat16 and float16"),
        ({"m": 0}, "a size is 0"),
        ({"depths": (4096, 0)}, "a size is 0"),
        ({"depths": (4100,)}, "multiples of 8"),
        ({"n": 7156}, "multiples of 8"),
        ({"sent": 4100}, "multiples of 8"),
        ({"m": 7, "sent": 56}, "too few"),
    ],
)
def test_what_the_kernel_takes(changes, why, new_enough):
    problem = dataclasses.replace(PROBLEM, **changes)
    plan = make_plan(problem, H200)
    assert plan.backend == ("xla" if why else "mosaic")
    assert why in plan.why
    assert (plan.tiles is None) == bool(why)
    assert make_plan(problem, H200, backend="xla").backend == "xla"
    if why:
        with pytest.raises(NotImplementedError, match=r"backend='mosaic': .*Write backend='auto' or 'xla'"):
            make_plan(problem, H200, backend="mosaic")


def test_ways_of_rows(new_enough):
    assert (make_exchange_plan(Reach(2), H200).backend, make_exchange_plan(Reach(8), H200).why) == ("mosaic", "")
    for reach, why in UNREACHABLE:
        plan = make_exchange_plan(reach, H200)
        assert plan.backend == "padded"
        assert why in plan.why
        with pytest.raises(NotImplementedError, match=r"backend='mosaic': .*Write backend='auto' or 'padded'"):
            make_exchange_plan(reach, H200, backend="mosaic")
    assert "needs a Hopper GPU" in make_exchange_plan(Reach(2), Device("cpu", "cpu")).why
    assert make_exchange_plan(Reach(2), H200, backend="padded").why == "backend='padded'"
    assert (
        "holds rows of 220000 bytes, and these have 240000" in make_exchange_plan(Reach(2), H200, row_bytes=240_000).why
    )


def test_few_tiles(new_enough):
    """ "auto" gathers by XLA where tiles fill less than four fifths of the programs; an explicit backend is obeyed."""
    few = dataclasses.replace(PROBLEM, reach=Reach(4), m=256, n=2048)
    assert make_plan(few, H200).why == "88 tiles are too few for 132 multiprocessors: XLA is faster"
    assert make_plan(few, H200, backend="mosaic").backend == "mosaic"
    for more in ({"m": 512}, {"n": 4096}, {"sent": 0}, {"reach": Reach(5)}):
        assert make_plan(dataclasses.replace(few, **more), H200).backend == "mosaic"
    assert make_plan(dataclasses.replace(few, reach=Reach(2), m=512), H200).backend == "xla"


def test_copies_of_w(new_enough):
    """ "auto" takes XLA for few rows where w's columns are no multiple of 64; an explicit backend is obeyed."""
    for changes in ({"n": 7160}, {"transposed": True, "depths": (320, 7160)}):
        many = dataclasses.replace(PROBLEM, **changes)
        few = dataclasses.replace(many, m=2040)
        assert "7160 columns, no multiple of 64" in make_plan(few, H200).why
        assert {make_plan(p, H200, backend=how).backend for p, how in ((many, "auto"), (few, "mosaic"))} == {"mosaic"}


def test_where_the_kernel_runs(new_enough):
    for kind, platform in (("NVIDIA A100", "gpu"), ("NVIDIA B200", "gpu"), ("cpu", "cpu")):
        assert "needs a Hopper GPU" in make_plan(PROBLEM, Device(kind, platform)).why
    assert "needs NVLink" in make_plan(PROBLEM, Device("NVIDIA H100 PCIe", "gpu")).why
    with mock.patch.object(jax, "__version_info__", (0, 10, 2)):
        assert "needs JAX 0.11.2" in make_plan(PROBLEM, H200).why


def test_tiles(new_enough):
    """256 columns unless 192 fill the waves better."""
    wide = lambda **changes: make_plan(dataclasses.replace(PROBLEM, **changes), H200).tiles.wide
    assert (wide(), wide(m=1024), wide(m=8192, n=2880, depths=(2880,))) == (256, 192, 192)


ROWS = 4 * 8500  # so many that "auto" takes the kernels


def lowered(name: str, order: int, backend: str, columns: int = 64, **how) -> str:
    """Forward and gradients on four devices, for an H200. columns: of a device's w."""
    f = over(mesh_of(4, order=order), name, bias=True, rows=True, backend=backend, **how)

    def step(x, w, bias, rows):
        y, vjp = jax.vjp(lambda *operands: f(*operands, rows), x, w, bias)
        return y, *vjp(y)

    k, n = (128, 4 * columns) if name == "all_gather_matmul" else (512, columns)
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((ROWS, k), (k, n), (n,))]
    with mock.patch.object(products, "current_device", return_value=H200):
        traced = jax.jit(step).trace(*arguments, jax.ShapeDtypeStruct((), "int32"))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


COLLECTIVES = ("stablehlo.all_gather", "stablehlo.reduce_scatter")
NEWER = pytest.mark.skipif(jax.__version_info__ < OLDEST, reason="the kernels need a newer JAX")


def newer(test):
    """On the second interpreter, whose JAX has what the kernels need."""
    return pytest.mark.versions(NEWER(test))


@newer
@pytest.mark.parametrize(
    ("backend", "columns", "x64"), [("auto", 64, False), ("auto", 200, True), ("mosaic", 200, False)]
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_lowering(name, backend, columns, x64):
    """Forward and gradients are one kernel each, which states its cost, and no collective of XLA."""
    with jax.enable_x64(x64):
        text = lowered(name, 1, backend, columns)
    kernels = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    flops = 2 * ROWS * 128 * columns
    assert [f'jaxops_flops = "{flops}"' in line for line in kernels] == [True, True]
    assert not [op for op in COLLECTIVES if op in text]


@newer
def test_lowering_with_kept_rows():
    """The kernel of the backward gathers none."""

    def results(text: str) -> list[int]:
        return [line.rpartition("->")[2].count("tensor<") for line in text.splitlines() if "@mosaic_gpu_v2" in line]

    own, kept = (lowered("all_gather_matmul", 1, "auto", save=save) for save in ("own", "gathered"))
    forward, backward = results(own)
    assert results(kept) == [forward, backward - 1]
    assert not [op for op in COLLECTIVES if op in kept]


@newer
@pytest.mark.parametrize("name", PRODUCTS)
def test_devices_out_of_order(name):
    """Mosaic's kernels know no such meshes."""
    text = lowered(name, -1, "auto")
    assert "@mosaic_gpu_v2" not in text
    assert [op for op in COLLECTIVES if op in text]
    with pytest.raises(NotImplementedError, match="row-major device ids"):
        lowered(name, -1, "mosaic")


@newer
@pytest.mark.parametrize("kind", ["partly manual", "abstract"])
def test_meshes_that_take_xla(kind):
    mesh, columns = mesh_of(2, 2, names=("data", AXIS)), P(None, AXIS)
    how: dict = {"mesh": mesh, "axis_names": {AXIS}} if kind == "partly manual" else {"mesh": mesh.abstract_mesh}
    f = jax.shard_map(
        lambda x, w: jaxops.all_gather_matmul(x, w, AXIS), in_specs=(P(AXIS), columns), out_specs=columns, **how
    )
    operands = jax.ShapeDtypeStruct((ROWS, 128), "bfloat16"), jax.ShapeDtypeStruct((128, 256), "bfloat16")
    with mock.patch.object(products, "current_device", return_value=H200):
        text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" not in text
    assert COLLECTIVES[0] in text
