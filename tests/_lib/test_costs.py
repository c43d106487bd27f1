"""The estimates of FLOPs and bytes that kernels carry in compiled programs."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.ops import adaln, cached_attention, grouped_glu, grouped_matmul, packed_attention, route
from tests.contracts.entry import Arguments, Op
from tests.contracts.ops import OPS
from tests.contracts.run import is_float
from tests.contracts.test_index_width import half
from tests.hopper import H200, costs_of, lower_for_h200, pallas_costs
from tests.ops.moe_mlp.cases import plan_of as mlp_plan

pytestmark = pytest.mark.versions


def without_lists(found: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return [cost for cost in found if not cost[0].startswith("schedule_")]


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


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def i32(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype="int32")


def gradients(f: Any) -> Any:
    """Of a function of arrays, in all that are floats."""

    def of(*operands):
        floats = [i for i, x in enumerate(operands) if is_float(x)]
        return jax.grad(lambda *given: jnp.sum(f(*given).astype(jnp.float32) ** 2), argnums=floats)(*operands)

    return of


# Every op


def both_passes(op: Op, how: dict[str, Any]):
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
    has_kernels = "interpret" in op.ways
    how = {"backend": "pallas"} if has_kernels else {}
    given = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), op.shapes(op.sizes))
    found = pallas_costs(both_passes(op, how), given)
    assert bool(found) == has_kernels


WITH_GLUON = [op for op in EVERY_OP if op.multiplies and op.module not in (None, cached_attention, packed_attention)]


@pytest.mark.parametrize("op", WITH_GLUON, ids=str)
def test_every_gluon_kernel_has_a_cost(op):
    """At sizes for which "auto" takes them."""
    sizes, how = op.large[0]
    given = {name: jax.tree.map(functools.partial(half, name), x) for name, x in op.shapes(sizes).items()}
    found = triton_costs(both_passes(op, dict(how)), given)
    assert len(found) >= 2


# Numbers by hand

TILES = grouped_matmul.Tiles(64, 32, 16)
PRODUCT = grouped_matmul.Plan("pallas", TILES, TILES, TILES)


def test_grouped_matmul():
    """lhs has 96 * 40 * 2 = 7,680 bytes, rhs 3 * 40 * 24 * 2 = 5,760, the result 96 * 24 * 2 = 4,608. Few rows have
    no list of their tiles: the offsets' 16 bytes are read. The list of groups has 6 columns of int32, of 3 entries
    padded to 4."""
    operands = shape(96, 40), shape(3, 40, 24), i32(4)
    call = functools.partial(jaxops.grouped_matmul, plan=PRODUCT)
    assert pallas_costs(call, *operands) == [
        ("grouped_matmul_fwd", 184_320, 18_064),  # 2 * 96 * 40 * 24
    ]
    assert set(pallas_costs(gradients(call), *operands)) == {
        ("schedule_groups", 0, 16 + 96),
        ("grouped_matmul_fwd", 184_320, 18_064),
        ("grouped_matmul_dgrad", 184_320, 18_064),
        ("grouped_matmul_wgrad", 184_320, 18_144),
    }


def test_a_bias_is_read_and_an_accumulator_read_and_written():
    call = functools.partial(jaxops.grouped_matmul, plan=PRODUCT)
    with_bias = pallas_costs(
        lambda lhs, rhs, offsets, bias: call(lhs, rhs, offsets, bias=bias),
        shape(96, 40), shape(3, 40, 24), i32(4), shape(3, 24),
    )  # fmt: skip
    assert with_bias[-1] == ("grouped_matmul_fwd", 184_320, 18_064 + 144)
    wgrad = pallas_costs(
        lambda lhs, dout, offsets, sums: jaxops.grouped_wgrad(lhs, dout, offsets, accumulate_into=sums, plan=PRODUCT),
        shape(96, 40), shape(96, 24), i32(4), shape(3, 40, 24, dtype="float32"),
    )  # fmt: skip
    assert wgrad[-1] == ("grouped_matmul_wgrad", 184_320, 7_680 + 4_608 + 96 + 2 * 11_520)


def test_modalities():
    """One launch: every row as one of the larger weights, 40 * 24. Two launches share the rows as 4 and 3 of 7
    runs, and the second one does not read the memory that it writes to."""
    operands = shape(98, 40), (shape(3, 40, 24), shape(2, 16, 8)), i32(6)

    def costs(plans):
        found = pallas_costs(lambda *given: jaxops.modality_grouped_matmul(*given, plan=plans), *operands)
        return [(flops, moved) for name, flops, moved in found if name == "modality_grouped_matmul_fwd"]

    # lhs 98 * 40 * 2 = 7,840 bytes, the result 98 * 24 * 2 = 4,704, the weights 5,760 and 512
    assert costs(PRODUCT) == [(2 * 98 * 960, 7_840 + 4_704 + 5_760 + 512)]
    high = grouped_matmul.Plan("pallas", grouped_matmul.Tiles(128, 32, 16))
    assert costs((PRODUCT, high)) == [
        (2 * 56 * 960, 4_480 + 2_688 + 5_760),
        (2 * 42 * 128, 3_360 + 2_016 + 512),
    ]


def test_grouped_glu():
    """Two products and the unit over 96 * 24 elements, of 2 bytes: 4,608 an array."""
    operands = shape(96, 40), shape(3, 40, 24), shape(3, 40, 24), i32(4)
    plan = grouped_glu.Plan("pallas", tiles := grouped_glu.Tiles(8, 32), tiles, PRODUCT)
    call = functools.partial(jaxops.grouped_glu, plan=plan)
    fwd, bwd = without_lists(pallas_costs(call, *operands)), pallas_costs(gradients(call), *operands)
    # The activation, times up; gate, up, h, and 4 offsets.
    assert fwd == [("grouped_matmul_fwd", 184_320, 18_064)] * 2 + [("grouped_glu_fwd", 4_608, 3 * 4_608 + 16)]
    # 5 operations; dh, gate, up, and two gradients.
    assert ("grouped_glu_bwd", 11_520, 5 * 4_608 + 16) in bwd
    assert sum(flops for name, flops, _ in bwd if name.startswith("grouped_matmul")) == 6 * 184_320


def test_moe_mlp():
    """13 tokens in 39 rows, D 16, F 24, N 8: products of 2 * 39 * 16 * 24 = 29,952 and 2 * 39 * 24 * 8 = 14,976."""
    routing = routing_of(13, 3, 4)
    operands = shape(13, 16), shape(4, 16, 24), shape(4, 16, 24), shape(4, 24, 8)
    call: Any = functools.partial(jaxops.moe_mlp, plan=mlp_plan("gpu"))
    fwd = pallas_costs(lambda routing, *given: call(*given, routing), routing, *operands)
    bwd = pallas_costs(lambda routing, *given: gradients(lambda *x: call(*x, routing))(*given), routing, *operands)
    assert [flops for name, flops, _ in fwd if name == "grouped_matmul_fwd"] == [29_952, 29_952, 14_976]
    for name in ("fwd", "dgrad", "wgrad"):
        products = sorted(flops for each, flops, _ in bwd if each == f"grouped_matmul_{name}")
        assert products == [14_976, 29_952, 29_952]


def test_fp8_matmul():
    """Values 128 * 256 and 384 * 256, scales of 1x128 blocks 2 * 128 * 4, of 128x128 blocks 3 * 2 * 4 bytes, the result
    98,304."""
    found = pallas_costs(functools.partial(jaxops.fp8_matmul, backend="pallas"), shape(128, 256), shape(256, 384))
    assert found == [
        ("quantize_cast", 3 * 98_304, 196_608 + 98_304 + 24),  # rhs, for its columns
        ("quantize_cast", 3 * 32_768, 65_536 + 32_768 + 1_024),
        ("fp8_matmul_rows", 25_165_824, 32_768 + 1_024 + 98_304 + 24 + 98_304),
    ]


def test_fp8_wgrad_of_groups_does_not_count_the_padding():
    """256 rows; 3 groups could need 5 blocks of 128, of which 2 count: (256 + 384) columns' values and their 2
    scales each, 3 * 256 * 384 results of 2 bytes, and the work list's 24 numbers."""
    call = gradients(functools.partial(jaxops.fp8_grouped_matmul, backend="pallas"))
    found = pallas_costs(call, shape(256, 256), shape(3, 256, 384), i32(4))
    assert found[-1] == ("fp8_matmul_contraction", 50_331_648, 163_840 + 5_120 + 589_824 + 96)


@pytest.mark.parametrize(("groups", "work_list"), [(None, 0), (3, 192)])
def test_quantize(groups, work_list):
    """256 * 128 elements of 2 bytes to 32,768 in each layout, with 256 scales of 4 bytes in each; groups' padding does
    not count. An element has a magnitude, a comparison, and a product in each layout."""
    given = (shape(256, 128),) if groups is None else (shape(256, 128), i32(groups + 1))
    found = pallas_costs(
        lambda x, offsets=None: jaxops.quantize(x, layouts="both", group_offsets=offsets, backend="pallas"), *given
    )
    assert without_lists(found) == [("quantize_cast", 131_072, 65_536 + 2 * (32_768 + 1_024) + work_list)]


def test_quantize_in_two_passes():
    """The second one reads the elements again. A row's magnitudes are of the whole row here: [1, 256] and [2, 128]. XLA
    finds a tensor's largest magnitude."""
    x = shape(256, 128)
    tensor, lines = (
        pallas_costs(lambda x, how=how: jaxops.quantize(x, layouts="both", backend="pallas", **how), x)
        for how in ({"scaling": "tensorwise"}, {"scaling": "rowwise"})
    )
    assert [(name, flops) for name, flops, _ in tensor] == [("quantize_cast", 65_536)]
    assert [(name, flops) for name, flops, _ in lines] == [("quantize_amax", 98_304), ("quantize_cast", 65_536)]
    assert lines[1][2] == 65_536 + 2 * 32_768 + 4 * (256 + 128)


def test_an_fp8_array_that_launch_widens_counts_with_its_own_size():
    """3 * 2^30 elements, to which the launch adds rows up to 2^32."""
    rows = 3 * 2**18
    found = pallas_costs(lambda x: jaxops.quantize(x, backend="pallas").values, shape(rows, 4096))
    assert found == [("quantize_cast", 3 * rows * 4096, 3 * rows * 4096 + 4 * rows * 32)]


ADALN = adaln.Plan("pallas", *[adaln.Tiles(16, 1, 32, 1)] * 2, save_stats=False)
MODULATED = shape(64, 32), shape(2, 32), shape(2, 32), i32(3)


def test_adaln():
    """64 * 32 elements of 2 bytes: 4,096 an array of rows, 128 a modulation, 12 the offsets. 7 tiles may have parts of
    the sums of scale and shift: 7 * 32 * 4 = 896 bytes of each."""
    call = functools.partial(jaxops.adaln, plan=ADALN)
    fwd = ("adaln_fwd", 7 * 2_048, 2 * 4_096 + 2 * 128 + 12)  # 5 for the norm, 2 for the modulation
    assert pallas_costs(call, *MODULATED) == [fwd]
    assert pallas_costs(gradients(call), *MODULATED) == [
        fwd,
        # 5 for the norm again, 2 for dy, 7 for the norm's gradient, 2 sums; x, dy, dx; scale; both sums and their
        # parts; the sequence of each multiple of 16 rows
        ("adaln_bwd", 16 * 2_048, 3 * 4_096 + 128 + 12 + 2 * 128 + 2 * 896 + 16),
        ("adaln_sums", 2 * 7 * 32, 12 + 16 + 2 * 896 + 2 * 128),
    ]


def test_adaln_with_everything():
    """4,096 bytes an array of rows; gate, scale, shift 128; weight and bias 64."""
    operands = shape(64, 32), shape(64, 32), shape(2, 32), *MODULATED[1:], shape(32), shape(32)

    def call(x, h, gate, scale, shift, offsets, weight, bias):
        how = {"weight": weight, "bias": bias, "activation": "silu", "plan": ADALN}
        return sum(jaxops.gated_residual_adaln(x, h, gate, scale, shift, offsets, **how))

    fwd, *bwd = pallas_costs(gradients(call), *operands)
    # Forward: residual 2, norm 5, weight, bias, activation, modulation 2. Backward: norm, weight, bias again 7, the
    # activation 3, dy 2, weight 2, norm's gradient 7, the residual 1, the gate 2, and 5 sums.
    assert fwd == ("adaln_fwd", 12 * 2_048, 4 * 4_096 + 3 * 128 + 2 * 64 + 12)
    assert [flops for _, flops, _ in bwd] == [29 * 2_048, 5 * 7 * 32]


def routing_of(T: int, k: int, E: int) -> jaxops.Routing:
    return jax.eval_shape(lambda x: jaxops.route(x, k, backend="xla"), shape(T, E, dtype="float32"))


def test_permute_and_combine():
    """8 tokens of 16 elements in 16 rows: 256 and 512 bytes; 16 positions and weights of 4 bytes, 5 offsets."""
    routing = routing_of(8, 2, 4)
    there: Any = functools.partial(jaxops.permute, backend="pallas")
    found = pallas_costs(lambda x, routing: gradients(lambda x: there(x, routing))(x), shape(8, 16), routing)
    assert found == [("permute", 0, 256 + 512 + 64 + 20), ("permute_bwd", 256, 512 + 256 + 64 + 20)]

    def back(rows, weights, routing):
        return jaxops.combine(rows, dataclasses.replace(routing, weights=weights), backend="pallas")

    both = lambda rows, weights, routing: gradients(lambda x, w: back(x, w, routing))(rows, weights)
    found = pallas_costs(both, shape(16, 16), routing.weights, routing)
    assert found == [
        ("combine", 2 * 256, 512 + 64 + 256 + 64 + 20),
        ("combine_bwd", 3 * 256, 64 + 256 + 512 + 512 + 64 + 64 + 20),
    ]


def test_route():
    """20 tokens in two tiles, then in one. With a capacity the weights are written, not read."""
    call = lambda x, tile, c: jaxops.route(x, 2, capacity=c, plan=route.Plan("pallas", tile))
    costs = lambda *how: pallas_costs(lambda x: call(x, *how), shape(20, 4, dtype="float32"))
    plain, dropping, one = costs(route.Tiles(16, 16), None), costs(route.Tiles(16, 16), 3), costs(None, None)
    assert [flops for _, flops, _ in plain] == [80 * (8 + 4), 3 * 2 * 4, 80 * 5]
    assert plain[0][2] == 320 + 160 + 160 + 2 * (16 + 20)  # logits, experts, weights, each tile's 4 counts and 5 sums
    assert dropping[2][2] == plain[2][2] + 160
    # logits; experts, weights, positions and tokens; load, offsets, losses
    assert one == [("route_fwd", 80 * (8 + 4) + 80 * 5, 320 + 4 * 160 + 16 + 20 + 8)]


# Hopper's kernels, by hand


def test_gluon_grouped_matmul():
    """lhs has 256 * 128 * 2 = 65,536 bytes, rhs 3 * 128 * 64 * 2 = 49,152, the result 32,768; work lists have 6 columns
    of int32, of row tiles at most 2 + 3 + 1 padded to 8 entries, of groups 3 padded to 4. The result's memory is not
    read."""
    tiles = grouped_matmul.Tiles(128, 128, 64, 8, 4, kernel="triton")
    call = functools.partial(jaxops.grouped_matmul, plan=grouped_matmul.Plan("triton", tiles, tiles, tiles))
    operands = shape(256, 128), shape(3, 128, 64), i32(4)
    arrays = 65_536 + 49_152 + 32_768
    assert triton_costs(call, *operands) == [(4_194_304, arrays + 192)]
    assert sorted(triton_costs(gradients(call), *operands)) == [
        (4_194_304, arrays + 96),
        (4_194_304, arrays + 192),
        (4_194_304, arrays + 192),
    ]


def test_gluon_split_sums():
    """Two parts of 128 rows, of one tile of 128x128 in float32. The list: 6 columns of 3 + 2 entries, and zeros, one
    for each part's tile."""
    tiles = grouped_matmul.Tiles(128, 128, 64, 8, 4, kernel="triton", split=2)
    call = functools.partial(jaxops.grouped_wgrad, plan=grouped_matmul.Plan("triton", wgrad=tiles))
    found = triton_costs(call, shape(256, 128), shape(256, 64), i32(4))
    assert found == [(4_194_304, 65_536 + 32_768 + 49_152 + 65_536 * 2 + 128)]


def test_gluon_moe_mlp():
    """256 tokens in 512 rows, D 128, F 64, N 128: each product 2 * 512 * 128 * 64 = 8,388,608. Gate and up are one
    kernel, so are both products of x's gradient."""
    routing, operands = routing_of(256, 2, 4), (shape(256, 128), *[shape(4, 128, 64)] * 2, shape(4, 64, 128))
    call: Any = functools.partial(jaxops.moe_mlp, backend="triton")
    bwd = triton_costs(lambda routing, *given: gradients(lambda *x: call(*x, routing))(*given), routing, *operands)
    product = 8_388_608
    assert sorted(flops for flops, _ in bwd) == [*[product] * 5, 2 * product, 2 * product]
    # The down projection's gradient reads gate and up and writes two gradients to their memory; dy 512 * 128 * 2, the
    # weights, the rows of the unit, router weights, its sums of 64 columns, and the work list: 4 + 4 + 1 tiles.
    rows, unit, weights = 131_072, 65_536, 65_536
    assert (product, rows + weights + 2 * unit + 3 * unit + 2_048 + 2_048 + 6 * 16 * 4) in bwd


def test_gluon_fp8_matmul():
    """As on other GPUs, without a work list."""
    operands, rhs = (shape(128, 256), shape(256, 384)), 98_304 + 24
    found = triton_costs(functools.partial(jaxops.fp8_matmul, backend="triton"), *operands)
    assert found[-1] == (25_165_824, 32_768 + 1_024 + rhs + 98_304)
    grouped = gradients(functools.partial(jaxops.fp8_grouped_matmul, backend="triton"))
    found = triton_costs(grouped, shape(256, 256), shape(3, 256, 384), i32(4))
    assert found[-1] == (50_331_648, 163_840 + 5_120 + 589_824 + 96)


# JAX's transformations


def test_under_transformations():
    """grad of shard_map of scan of checkpoint: forward, recomputed forward, dgrad and wgrad."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, w, offsets):
        return jnp.sin(jaxops.grouped_matmul(x, w, offsets, plan=PRODUCT))

    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)

    def loss(x, weights, offsets):
        def device(x, weights, offsets):
            out = jax.lax.scan(lambda x, w: (layer(x, w, offsets[0]), None), x, weights)[0]
            return jnp.sum(out.astype(jnp.float32))[None]

        return jnp.sum(jax.shard_map(device, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"))(
            x, weights, offsets
        ))  # fmt: skip

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(shape(192, 40), shape(2, 3, 40, 40), i32(2, 4))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = without_lists(costs_of(text))
    assert {name for name, _, _ in found} == {f"grouped_matmul_{name}" for name in ("fwd", "dgrad", "wgrad")}
    # A shard's 96 rows; 96 * 40 * 2 bytes twice, 3 * 40 * 40 * 2, and the offsets, or the list of groups.
    assert {cost[1:] for cost in found} == {(307_200, 24_960 + 16), (307_200, 24_960 + 96)}


def test_under_vmap():
    """A Pallas launch runs the whole batch and says what one example costs; its CostEstimate is of the batch."""
    call = functools.partial(jaxops.adaln, plan=ADALN)
    batched = jax.tree.map(lambda x: shape(3, *x.shape, dtype=x.dtype), MODULATED)
    assert pallas_costs(jax.vmap(call), *batched) == pallas_costs(call, *MODULATED)
    estimate = r"CostEstimate\(flops=43008, transcendentals=0, bytes_accessed=25380"
    assert re.search(estimate, str(jax.make_jaxpr(jax.vmap(call))(*batched)))


def test_a_gluon_kernel_under_vmap_runs_once_an_example():
    tiles = grouped_matmul.Tiles(128, 128, 64, 8, 4, kernel="triton")
    call = functools.partial(jaxops.grouped_matmul, plan=grouped_matmul.Plan("triton", tiles))
    mapped = jax.vmap(call, in_axes=(0, None, None))
    assert triton_costs(mapped, shape(5, 256, 128), shape(3, 128, 64), i32(4)) == [(4_194_304, 147_456 + 192)]


def test_nothing_is_said_of_interpreted_kernels():
    """Each of their many operations would carry the cost of the whole launch."""
    given = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), MODULATED)
    text = jax.jit(functools.partial(jaxops.adaln, plan=ADALN)).lower(*given).as_text()
    assert not re.search("jaxops_(flops|bytes)", text)
