"""What the simulator sees: each kind of race and of bad access, in small kernels; and its arithmetic."""

import dataclasses
import inspect
import pathlib
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.gluon_simulator import SimulationError, hopper, language, layouts, modules
from tests.gluon_simulator.launch import simulate
from tests.gluon_simulator.layouts import BlockedLayout, NVMMADistributedLayout, NVMMASharedLayout
from tests.gluon_simulator.modules import simulated_modules
from tests.gluon_simulator.tensors import INT32, INT64, TYPES, Tensor, binary

pytestmark = pytest.mark.versions

gl = simulated_modules()["triton.experimental.gluon.language"]
ROW = BlockedLayout([1], [32], [4], [0])
BOX = BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
MMA = NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
TILE = NVMMASharedLayout(128, 16)
BF16, F32 = TYPES["bfloat16"], TYPES["float32"]
SEEDS = range(6)
X = np.arange(64 * 64).reshape(64, 64).astype(ml_dtypes.bfloat16)


def tile(number: int = 1):
    return gl.allocate_shared_memory(BF16, [number, 64, 64], TILE)


def barriers(*counts: int):
    found = hopper.allocate_mbarrier(batch=len(counts))
    for i, count in enumerate(counts):
        hopper.init(found.index(i), count=count)
    return found


def desc(array, box=(64, 64)):
    width = X.shape[1]
    return hopper.Descriptor(array, (array.numbers.size // width, width), (width, 1), box, TILE)


def load(x, bars, buf, *, into=0, row=0):
    """A producer's load of a box, announced by mbarrier `into`."""
    hopper.expect(bars.index(into), 64 * 64 * 2)
    hopper.async_load(desc(x), [row, 0], bars.index(into), buf)


def fails(kernel, *arrays, says: str, seeds=SEEDS, **how) -> None:
    """In each order of events."""
    for seed in seeds:
        with pytest.raises(SimulationError, match=says):
            simulate(kernel, arrays, seed=seed, **how)


def passes(kernel, *arrays, seeds=SEEDS, **how):
    for seed in seeds:
        found = simulate(kernel, arrays, seed=seed, **how)
    return found


def copy_kernel(*, wait=True, fence=True, store_wait=True, arrive=True, release_first=False, used=True):
    """A producer loads two boxes through one stage; a consumer doubles each and stores it by TMA."""

    def produce(x, bars, stage):
        for i in range(2):
            hopper.wait(bars.index(1), 1 - i)
            load(x, bars, stage, row=64 * i)

    def consume(y, bars, stage, buf):
        for i in range(2):
            if wait:
                hopper.wait(bars.index(0), i)
            if release_first:
                hopper.arrive(bars.index(1), count=1)
            value = stage.load(BOX)
            if used:
                value = value + value
            if arrive and not release_first:
                hopper.arrive(bars.index(1), count=1)
            if not used:
                value = value + value
            if store_wait:
                hopper.store_wait(0)
            buf.store(value)
            if fence:
                hopper.fence_async_shared()
            hopper.async_store(desc(y), [64 * i, 0], buf)
        hopper.store_wait(0)

    def kernel(x, y):
        bars, stage, buf = barriers(1, 1), tile().index(0), tile().index(0)
        gl.warp_specialize([(consume, (y, bars, stage, buf)), (produce, (x, bars, stage))], [1], [24])

    return kernel


TWO = np.concatenate([X, X])


def test_a_pipeline():
    (found,) = passes(copy_kernel(), TWO, results=[TWO])
    np.testing.assert_array_equal(found.astype(np.float32), 2 * TWO.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"wait": False},
            "race .*(read by consume.*after the write by pro|write by pro.*after the read by cons)|deadlock",
        ),
        ({"fence": False}, "race .*read by consume.* in consume after the write .*: no fence_async_shared between"),
        ({"store_wait": False}, "race .*write by consume .* after the read by consume .*: nothing orders them"),
        ({"arrive": False}, r"deadlock: .*consume 0 .*test_simulator\.py:\d+ in consume; .*produce 1.* in produce"),
        (
            {"release_first": True},
            "race .*(write by produce.*after the read by cons|read by cons.*after the write by pro)",
        ),
        ({"used": False}, "race .*write by produce .* in load after the read by consume .* in consume"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_races(change, says):
    """used: a load whose value is used after the release may not have come back by then; TMA overwrites it."""
    fails(copy_kernel(**change), TWO, results=[TWO], says=says)


def product_kernel(*, wait=0, overwrite=False, fence=True, in_registers=False):
    def kernel(x, y):
        bars, a, buf = barriers(1), tile().index(0), tile().index(0)
        load(x, bars, a)
        hopper.wait(bars.index(0), 0)
        buf.store(gl.full([64, 64], 1.0, BF16, BOX))
        if fence:
            hopper.fence_async_shared()
        a = a.load(MMA) if in_registers else a
        acc = hopper.warpgroup_mma(a, buf, gl.zeros([64, 64], F32, MMA), is_async=True)
        if overwrite:
            buf.store(gl.full([64, 64], 2.0, BF16, BOX))
        acc = hopper.warpgroup_mma_wait(wait, deps=[acc])
        rows, cols = (gl.arange(0, 64, layout=layouts.SliceLayout(i, MMA)) for i in (1, 0))
        gl.store(y.pointer() + rows[:, None] * 64 + cols[None, :], acc)

    return kernel


@pytest.mark.parametrize("in_registers", [False, True])
def test_products(in_registers):
    (found,) = passes(product_kernel(in_registers=in_registers), X, results=[np.zeros((64, 64), np.float32)])
    np.testing.assert_array_equal(found, X.astype(np.float32) @ np.ones((64, 64), np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wait": 1}, r"a sum is read before the wait for its wgmma \(test_simulator.py:\d+ in kernel"),
        ({"overwrite": True}, "race .*write by kernel .* after the read by kernel"),
        ({"fence": False}, "race .*read by kernel .* after the write by kernel .*: no fence_async_shared"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_races_of_products(change, says):
    fails(product_kernel(**change), X, results=[np.zeros((64, 64), np.float32)], says=says)


def test_boxes():
    """Zeros outside the array, negative coordinates too; stores are cut off there."""

    def kernel(x, y):
        bars, buf = barriers(1), tile().index(0)
        load(x, bars, buf, row=-10)
        hopper.wait(bars.index(0), 0)
        hopper.async_store(desc(y), [40, 8], buf)
        hopper.store_wait(0)

    before = np.full((64, 64), 7, X.dtype)
    (found,) = passes(kernel, X, results=[before])
    want = before.copy()
    want[40:50, 8:], want[50:, 8:] = 0, X[:14, :-8]
    np.testing.assert_array_equal(found, want)


def endless(_pointer):
    bars = barriers(1)
    while True:
        hopper.wait(bars.index(0), 1)


def test_bad_accesses():
    box = dataclasses.replace(BOX)
    (at,) = (np.arange(8, dtype=np.int64),)
    x = np.zeros(100_000, np.float32)

    def of(access):
        return lambda x: access(x.pointer())

    numbers = Tensor(at, INT32)
    for access, says in (
        (lambda p: gl.load(p + numbers + 99_999), "out of bounds of .*: elements 99999 to 100006 of 100000"),
        (lambda p: gl.load(p + numbers - 1), "out of bounds of .*: elements -1 to 6"),
        (lambda p: gl.load(p + numbers * 10_000), "a pointer moves by 70000 elements, computed in 32 bits"),
        (lambda p: gl.load(p + gl.num_programs(0) * gl.num_programs(0)), "a place in a result by a product in 32 bits"),
        (lambda p: gl.store(p + numbers // 2, 1.0), "one store writes an element of .* twice"),
        (lambda p: [gl.store(p + numbers, 1.0) for _ in range(2)], "an element of .* is stored twice"),
        (lambda p: gl.to_tensor(5) // 0, "division by zero"),
        (lambda p: hopper.wait(hopper.allocate_mbarrier(), 0), "an mbarrier that was not initialized"),
        (lambda p: tile(2).index(2), "buffer 2 of 2"),
        (lambda p: tile(30), "245760 bytes of shared memory"),
        (endless, "a loop that does not end"),
        (lambda p: tile(2).index(0).store(gl.zeros([64, 32], BF16, box)), r"bfloat16\[64, 32\] stored in a buffer"),
        (lambda p: gl.allocate_shared_memory(INT32, [4], None).load(ROW), "read .* of what nobody has written"),
        (lambda p: hopper.arrive(barriers(1).index(0), count=2), "2 arrivals, where the phase waits for 1"),
        (lambda p: hopper.async_store(desc(p, (64, 62)), [0, 0], tile().index(0)), "no whole 16 bytes"),
        (lambda p: gl.static_assert(False, "no"), "static_assert: no"),
    ):
        call = (lambda x, access=access: access(x)) if "16 bytes" in says else of(access)
        fails(call, results=[x], says=says, seeds=[0])
    write = lambda x: gl.store(x.pointer() + numbers, 1.0)
    fails(write, x, says="array 0 is written, which is neither a result nor a Scratch", seeds=[0])
    gl_store = lambda x: gl.store(x.pointer() + gl.cast(numbers, INT64) * 10_000, 1.0)
    (found,) = passes(gl_store, results=[x])
    assert np.flatnonzero(found).tolist() == list(range(0, 80_000, 10_000))


def test_boxes_start_at_multiples_of_16_bytes():
    def kernel(x):
        load_ = hopper.Descriptor(x, (64, 64), (64, 1), (8, 64), TILE)
        bars = barriers(1)
        buf = gl.allocate_shared_memory(BF16, [8, 64], TILE)
        hopper.async_load(load_, [0, 4], bars.index(0), buf)

    fails(kernel, X, says="no multiple of 16 bytes")


def test_other_programs_stores():
    """Loads of what another program stores need an order by atomics, after all threads' stores, and L2."""

    def share(order: str, modifier: str, barrier: bool = True):
        def kernel(x, counter):
            at, program = gl.arange(0, 8, layout=ROW), gl.program_id(0)
            gl.store(x.pointer() + program * 8 + at, gl.cast(program, F32) + gl.zeros([8], F32, ROW))
            if barrier:
                gl.barrier()
            one = gl.inline_asm_elementwise(
                f"atom.{order}.gpu.global.add.u32 $0, [$1], $2;", "=r,l,r",
                [counter.pointer().to(INT64) + gl.zeros([1], INT64, ROW), gl.full([1], 1, INT32, ROW)],
                INT32, False, 1,
            )  # fmt: skip
            if one.item() == 2:  # the last one adds
                total = gl.zeros([8], F32, ROW)
                for i in range(3):
                    total = total + gl.load(x.pointer() + i * 8 + at, cache_modifier=modifier)
                gl.store(x.pointer() + 24 + at, total)

        return kernel

    given = {"results": [np.zeros(32, np.float32), np.zeros(1, np.int32)], "grid": 3}
    x, _ = passes(share("acq_rel", ".cg"), **given)
    np.testing.assert_array_equal(x[24:], 3)
    fails(share("relaxed", ".cg"), **given, says="a read of .*, which another partition writes in the same launch")
    fails(share("acq_rel", ".cg", False), **given, says="one thread releases what other threads stored")
    fails(share("acq_rel", ""), **given, says="a load through L1 of .*, which another program has stored")


def test_the_end_of_a_cluster():
    """A program's shared memory must not be gone while the other one still arrives at its mbarriers."""

    def kernel(wait: bool):
        def run():
            shared = hopper.allocate_mbarrier(batch=1, two_ctas=True)
            hopper.init(shared.index(0), count=1)
            gl.warp_specialize([(hopper.arrive, (shared.index(0),))], [], [])
            gl.barrier(cluster=wait)

        return run

    for seed in SEEDS:
        simulate(kernel(True), programs=2, seed=seed)
    fails(kernel(False), programs=2, says="a program that has ended|a program ends, and nothing says that")


def test_arithmetic():
    """As Triton's: division towards zero, 32 bits that overflow, constants that take a tensor's type."""
    number = lambda x: Tensor(x, INT32)

    def kernel(y):
        for left, right, name, want in (
            (-7, 2, "floordiv", -3),
            (-7, 2, "mod", -1),
            (2**31 - 1, 1, "add", -(2**31)),
            (-8, 1, "rshift", -4),
            (46341, 46341, "mul", 46341**2 - 2**32),
        ):
            found = binary(name, number(left), right)
            assert (found.data, found.type) == (want, INT32), name
            assert (binary(name, left, number(right)).data, found.type) == (want, INT32)
        assert [int(x.data) for x in simulated_modules()["triton"].jit(_in_a_kernel)(number(5))] == [1, 3, 5, 3, 5]
        half = Tensor(1.0, BF16)
        assert (half * 0.1).type is BF16
        assert (number(3) * 0.5).type is F32
        assert (number(3) / 2).type is F32
        assert gl.cdiv(number(7), 2).data == 4
        assert gl.maximum(Tensor(np.nan, F32), 1.0).data == 1
        assert np.isnan(gl.maximum(Tensor(np.nan, F32), 1.0, propagate_nan=modules.PropagateNan.ALL).data)

    passes(kernel, results=[np.zeros(1, np.float32)], seeds=[0])


def _in_a_kernel(n):
    return [*range(1, n + 1, 2), min(n, 3), max(3, n)]


def test_assembly():
    bf16 = lambda *numbers: Tensor(np.array(numbers), BF16)

    def kernel(y):
        run = lambda text, constraints, args, type, pack: gl.inline_asm_elementwise(
            text, constraints, args, type, True, pack
        )
        wide = run("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [bf16(1, 2, -3, 4)], F32, 2)
        assert wide.data.tolist() == [1, 2, -3, 4]
        pairs = run("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [wide], BF16, 2)
        assert pairs.data.tolist() == [1, 2, -3, 4]
        fp8 = run("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=r,f,f", [wide * 200.0], TYPES["float8e4nv"], 2)
        assert fp8.data.astype(np.float32).tolist() == [192, 384, -448, 448]
        lanes = run("mov.u32 $0, %laneid;", "=r,r", [Tensor(0, INT32)], INT32, 1)
        with pytest.raises(SimulationError, match="the threads hold different numbers"):
            lanes + 1
        shuffled = run("shfl.sync.idx.b32 $0, $1, 3, 31, 0xffffffff;", "=r,r", [lanes], INT32, 1)
        assert (shuffled + 1).data == 4
        with pytest.raises(SimulationError, match=r"the instruction popc\.b32 of inline assembly"):
            run("popc.b32 $0, $1;", "=r,r", [Tensor(0, INT32)], INT32, 1)

    passes(kernel, results=[np.zeros(1, np.float32)], seeds=[0])


def test_stand_ins_are_tritons():
    """Their functions have Triton's parameters, as far as they have them, and layouts its swizzling."""
    pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    from triton.experimental.gluon import language as real
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

    stand_ins = simulated_modules()
    hopper_module = stand_ins["triton.experimental.gluon.language.nvidia.hopper"]
    ampere = stand_ins["triton.experimental.gluon.language.nvidia.ampere"]
    assert [name for name in language.NAMES if not hasattr(real, name)] == []
    for ours, theirs in ((hopper_module.mbarrier, mbarrier), (hopper_module.tma, tma), (ampere.async_copy, async_copy)):
        for name, function in vars(ours).items():
            if inspect.isfunction(function):
                real_function = getattr(theirs, name)
                known = inspect.signature(inspect.unwrap(getattr(real_function, "fn", real_function))).parameters
                assert set(inspect.signature(function).parameters) <= set(known), name
    for shape in ([64, 64], [1, 128, 32], [256, 128], [8, 16]):
        for dtype in ("bfloat16", "float8e4nv", "float32"):
            swizzle = real.NVMMASharedLayout.get_default_for(shape, getattr(real, dtype)).swizzle_byte_width
            assert NVMMASharedLayout.get_default_for(shape, TYPES[dtype]).swizzle_byte_width == swizzle


def test_every_kernel_is_simulated():
    """The real modules stay as they are."""
    names = modules.kernel_modules()
    assert len(names) == len({*pathlib.Path("jaxops").rglob("*_triton.py")}) or not pathlib.Path("jaxops").exists()
    assert all(simulated_modules()[name] is not sys.modules.get(name) for name in names)
    assert jnp.dtype("bfloat16") == BF16.numpy
