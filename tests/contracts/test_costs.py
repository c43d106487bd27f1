"""The estimates of FLOPs and bytes that kernels carry in compiled programs: every kernel has one, and by hand."""

import dataclasses
import functools
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops._lib.planning.costs import Cost, allocated
from jaxops.ops import adaln, cached_attention, grouped_glu, grouped_matmul, packed_attention
from tests.arrays import i32, shape
from tests.contracts.entry import Arguments, Op
from tests.contracts.ops import OPS
from tests.contracts.run import is_float
from tests.contracts.test_index_width import operands
from tests.hopper import costs_of, lower_for_h200, on_h200, pallas_costs
from tests.jaxprs import equations

pytestmark = pytest.mark.versions

Costs = list[tuple[str, int, int]]  # (name, FLOPs, bytes)


def triton_costs(fn, *shapes) -> list[tuple[int, int]]:
    """(FLOPs, bytes) of Hopper's kernels but work lists', in order. Compiles none of them: each would take seconds."""
    pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    from jaxops._lib.gluon.launch_triton import triton_lib
    from tests import gluon

    texts, nothing = [], gluon.Kernel("none", 4, 1, 0, "")
    described = {"elem_type": next(iter(triton_lib._TMA_DTYPE_DEVICE_TO_HOST)), "swizzle": 0, "block_size": ()}
    result = nothing, None, None, types.SimpleNamespace(tensordesc_meta=[described] * 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib.TritonFunction, "_compile_kernel", lambda *_: result)
        patch.setattr(gluon, "COMPILED", {})
        patch.setattr(gluon, "lower_for_h200", lambda *given: texts.append(lower_for_h200(*given)) or texts[0])
        gluon.compiled(fn, *shapes)
    assert "triton_kernel_call_ffi" in texts[0]
    return [(flops, moved) for name, flops, moved in costs_of(texts[0]) if flops and not name]


def gradients(f: Any) -> Any:
    """The gradients of a function of arrays in all that are floats."""

    def of(*operands):
        floats = [i for i, x in enumerate(operands) if is_float(x)]
        return jax.grad(lambda *given: jnp.sum(f(*given).astype(jnp.float32) ** 2), argnums=floats)(*operands)

    return of


# Every op


def both_passes(op: Op, how: dict[str, Any]) -> Callable[[Arguments], Any]:
    """The results, and with them the gradients of what has some."""

    def step(given: Arguments):
        results = op.call(given, **how)
        if not op.wrt or "out_dtype" in how:
            return results
        others = {name: x for name, x in given.items() if name not in op.wrt}

        def loss(held):
            floats = [x for x in jax.tree.leaves(op.call(held | others, **how)) if is_float(x)]
            return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in floats)

        return results, jax.grad(loss)({name: given[name] for name in op.wrt})

    return step


EVERY_OP = [op for op in OPS if not op.sharded]  # the others are made of XLA's products


@pytest.mark.parametrize("op", EVERY_OP, ids=str)
def test_every_pallas_kernel_has_a_cost(op):
    """Also with products of bfloat16, by jax_default_matmul_precision: they can be lowered."""
    has_kernels = "interpret" in op.ways
    how = {"backend": "pallas"} if has_kernels else {}
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert bool(pallas_costs(both_passes(op, how), op.shapes(op.sizes))) == has_kernels


WITH_GLUON = [op for op in EVERY_OP if op.multiplies and op.module not in (None, cached_attention, packed_attention)]


@pytest.mark.parametrize("op", WITH_GLUON, ids=str)
def test_every_gluon_kernel_has_a_cost(op):
    """At sizes for which "auto" takes them."""
    sizes, how = op.large[0]
    assert len(triton_costs(both_passes(op, dict(how)), operands(op, sizes))) >= 2


# Numbers by hand

TILES = grouped_matmul.Tiles(64, 32, 16)
PRODUCT = grouped_matmul.Plan("pallas", TILES, TILES, TILES)
HIGH = grouped_matmul.Plan("pallas", grouped_matmul.Tiles(128, 32, 16))
GLU = grouped_glu.Plan("pallas", grouped_glu.Tiles(8, 32), grouped_glu.Tiles(8, 32), PRODUCT)
matmul: Any = functools.partial(jaxops.grouped_matmul, plan=PRODUCT)
GROUPED = shape(96, 40), shape(3, 40, 24), i32(4)
MODALITIES = shape(98, 40), (shape(3, 40, 24), shape(2, 16, 8)), i32(6)
ADALN = adaln.Plan("pallas", *[adaln.Tiles(16, 1, 32, 1)] * 2, save_stats=False)
modulate: Any = functools.partial(jaxops.adaln, plan=ADALN)
MODULATED = shape(64, 32), shape(2, 32), shape(2, 32), i32(3)
ROUTING = jax.eval_shape(lambda x: jaxops.route(x, 2, backend="xla"), shape(8, 4, dtype="float32"))


def modalities(*plans):
    return lambda *given: jaxops.modality_grouped_matmul(*given, plan=plans if len(plans) > 1 else plans[0])


def unit(*given):
    return jaxops.grouped_glu(*given, plan=GLU)


def quantize(x, offsets=None, **how):
    return jaxops.quantize(x, group_offsets=offsets, backend="pallas", **how)


def combine(rows, weights, routing):
    def op(rows, weights):
        return jaxops.combine(rows, dataclasses.replace(routing, weights=weights), backend="pallas")

    return gradients(op)(rows, weights)


IN_ONE = 3 * 2**18
# The call, its operands, and each kernel's name, FLOPs, and bytes where these are not each operand and result once.
BY_HAND: dict[str, tuple[Callable, tuple, list[tuple]]] = {
    "grouped_matmul": (gradients(matmul), GROUPED, [
        ("grouped_matmul_fwd", 184_320), ("grouped_matmul_dgrad", 184_320), ("grouped_matmul_wgrad", 184_320),
    ]),
    # Every row as one of the larger weights, 40 * 24. lhs 98 * 40 * 2 bytes, the result 98 * 24 * 2, no work list.
    "modalities": (modalities(PRODUCT), MODALITIES, [
        ("modality_grouped_matmul_fwd", 2 * 98 * 960, 7_840 + 4_704 + 5_760 + 512),
    ]),
    # Two launches share the rows as 4 and 3 of 7 runs; the second does not read the memory that it writes to.
    "launches": (modalities(PRODUCT, HIGH), MODALITIES, [
        ("modality_grouped_matmul_fwd", 2 * 56 * 960, 4_480 + 2_688 + 5_760),
        ("modality_grouped_matmul_fwd", 2 * 42 * 128, 3_360 + 2_016 + 512),
    ]),
    # The activation, times up, of 96 * 24 elements. 5 operations backward.
    "grouped_glu": (gradients(unit), (*GROUPED[:2], *GROUPED[1:]), [
        ("grouped_glu_fwd", 4_608), ("grouped_glu_bwd", 11_520),
    ]),
    "fp8_matmul": (functools.partial(jaxops.fp8_matmul, backend="pallas"), (shape(128, 256), shape(256, 384)), [
        ("quantize_cast", 3 * 98_304), ("quantize_cast", 3 * 32_768), ("fp8_matmul_rows", 25_165_824),
    ]),
    # 3 groups could need 5 blocks of 128 rows, of which 2 count: (256 + 384) columns' values and their 2 scales each,
    # 3 * 256 * 384 results, and the work list's 24 numbers.
    "fp8 padding": (gradients(functools.partial(jaxops.fp8_grouped_matmul, backend="pallas")),
                    (shape(256, 256), shape(3, 256, 384), i32(4)), [
        ("fp8_matmul_contraction", 50_331_648, 163_840 + 5_120 + 589_824 + 96),
    ]),
    # A magnitude, a comparison, and a product in each layout; groups' padding does not count.
    "quantize": (functools.partial(quantize, layouts="both"), (shape(256, 128), i32(4)), [
        ("quantize_cast", 131_072, 65_536 + 2 * (32_768 + 1_024) + 192),
    ]),
    # Magnitudes of each element, compared with its row's and its column's largest one.
    "rowwise": (functools.partial(quantize, layouts="both", scaling="rowwise"), (shape(256, 128),), [
        ("quantize_amax", 98_304), ("quantize_cast", 65_536),
    ]),
    # 3 * 2^30 elements, to which the launch adds rows up to 2^32, count with their own size.
    "widened": (lambda x: quantize(x).values, (shape(IN_ONE, 4096),), [
        ("quantize_cast", 3 * IN_ONE * 4096, 3 * IN_ONE * 4096 + 4 * IN_ONE * 32),
    ]),
    # 4,096 bytes an array of rows, 128 a modulation, 12 the offsets; 4 programs may have two parts each of the sums of
    # scale and shift: 1,024 bytes of each. Forward: 8 operations an element, with a gate 10. Backward: three times as
    # many.
    "adaln": (gradients(modulate), MODULATED, [
        ("adaln_fwd", 8 * 2_048), ("adaln_bwd", 24 * 2_048),
        ("adaln_sums", 2 * 8 * 32, 12 + 2 * 1_024 + 2 * 128),
    ]),
    "combine": (combine, (shape(16, 16), ROUTING.weights, ROUTING), [("combine", 2 * 256), ("combine_bwd", 3 * 256)]),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "shapes", "want"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(fn, shapes, want):
    names = {name for name, *_ in want}
    stated = [cost for cost in pallas_costs(fn, *shapes) if cost[0] in names]
    with on_h200():
        launches = [x for x in equations(jax.make_jaxpr(fn)(*shapes).jaxpr) if x.primitive.name == "pallas_call"]
    launches = [x for x in launches if x.params["name"] in names]
    moved = [sum(v.aval.size * v.aval.dtype.itemsize for v in (*x.invars, *x.outvars)) for x in launches]
    assert len(stated) == len(launches) == len(want)
    assert stated == [(*one, *([each] if len(one) == 2 else [])) for one, each in zip(want, moved, strict=True)]


HOPPER = functools.partial(grouped_matmul.Tiles, 128, 128, 64, 8, 4, kernel="triton", ping_pong=True)


def test_gluon_kernels():
    """lhs has 65,536 bytes, rhs 49,152, the result 32,768; work lists have 6 columns of int32, of row tiles at most
    2 + 3 + 1 padded to 8 entries, of groups 3 padded to 4. The result's memory is not read. Split sums: two parts of
    one tile of 128x128 in float32; the list has 3 + 2 entries, and zeros, one for each part's tile. Under vmap a kernel
    runs once an example."""
    lhs, rhs, arrays = shape(256, 128), shape(3, 128, 64), 65_536 + 49_152 + 32_768
    plan = grouped_matmul.Plan("triton", HOPPER(), HOPPER(), HOPPER(split=2))
    call: Any = functools.partial(jaxops.grouped_matmul, plan=plan)
    assert triton_costs(call, lhs, rhs, i32(4)) == [(4_194_304, arrays + 192)]
    assert sorted(triton_costs(gradients(call), lhs, rhs, i32(4))) == [
        (4_194_304, arrays + 192), (4_194_304, arrays + 192), (4_194_304, arrays + 65_536 * 2 + 128),
    ]  # fmt: skip
    mapped = jax.vmap(call, in_axes=(0, None, None))
    assert triton_costs(mapped, shape(5, 256, 128), rhs, i32(4)) == [(4_194_304, arrays + 192)]


def test_under_vmap():
    """A Pallas launch runs the whole batch and says what one example costs; its CostEstimate is of the batch."""
    batched = jax.tree.map(lambda x: shape(3, *x.shape, dtype=x.dtype), MODULATED)
    assert pallas_costs(jax.vmap(modulate), *batched) == pallas_costs(modulate, *MODULATED)
    estimate = r"CostEstimate\(flops=49152, transcendentals=0, bytes_accessed=25380"
    assert re.search(estimate, str(jax.make_jaxpr(jax.vmap(modulate))(*batched)))


def test_nothing_is_said_of_interpreted_kernels():
    """Each of their many operations would carry the cost of the whole launch."""
    text = jax.jit(modulate).lower(*MODULATED).as_text()
    assert not re.search("jaxops_(flops|bytes)", text)


def test_nanoseconds():
    """What XLA's scheduler reads: of a product by its operations, of a copy by its bytes; of an allocation none."""
    assert Cost(600_000_000_000, 1).nanoseconds == 1_002_000
    assert Cost(0, 3_500_000).nanoseconds == 3_000
    assert 'latency_metadata = "0"' in jax.jit(lambda: allocated((3,), "float32")).lower().as_text()
