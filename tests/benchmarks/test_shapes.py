"""The one definition of group sizes and lengths, which rows of a result are checked, and how work is counted."""

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.ops import bench_router, fp8_products
from benchmarks.ops.bench_unseen_shapes import unseen
from benchmarks.ops.quantized_bytes import moved_bytes, reads_needed
from benchmarks.shapes import models as shapes_models
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.modality import MODALITIES
from jaxops.ops.fp8_matmul import RECIPES


@pytest.mark.parametrize("dist", shapes.DISTS)
@pytest.mark.parametrize(("G", "M"), [(1, 5), (2, 3), (64, 32768), (256, 100), (7, 997)])
def test_sizes_sum_to_m_and_are_the_same_each_time(dist, G, M):
    sizes = shapes.group_sizes(dist, G, M)
    assert (sizes.shape, sizes.dtype) == ((G,), np.int32)
    assert (sizes.min() >= 0, sizes.sum()) == (True, M)
    np.testing.assert_array_equal(sizes, shapes.group_sizes(dist, G, M))
    offsets = shapes.group_offsets(sizes)
    assert (offsets.dtype, offsets[0], offsets[-1]) == (np.int32, 0, M)


def test_sizes_by_hand():
    """zipf: 1, 2 ** -1.2 = 0.435 and 3 ** -1.2 = 0.268 of 1.703."""
    by_hand = {
        ("balanced", 4, 10): [2, 2, 3, 3],
        ("huge", 5, 100): [1, 1, 1, 1, 96],
        ("huge", 5, 3): [0, 0, 0, 0, 3],
        ("zipf", 3, 1703): [268, 435, 1000],
        ("one_group", 4, 9): [0, 0, 0, 9],
        ("half", 9, 100): [0, 0, 0, 10, 10, 10, 10, 10, 50],
    }
    assert {case: sorted(shapes.group_sizes(*case)) for case in by_hand} == by_hand
    with pytest.raises(ValueError, match="write one of balanced"):
        shapes.group_sizes("even", 2, 4)


@pytest.mark.parametrize("dist", shapes.PACKED_DISTS)
@pytest.mark.parametrize(("B", "T"), [(64, 65536), (5, 96), (3, 61), (1, 7)])
def test_lengths_sum_to_t_and_are_the_same_each_time(dist, B, T):
    lengths = shapes.sequence_lengths(dist, B, T)
    assert lengths.dtype == np.int32
    assert (lengths.min() >= 0, lengths.sum()) == (True, T)
    np.testing.assert_array_equal(lengths, shapes.sequence_lengths(dist, B, T))
    assert len(lengths) == {"many": -(-T // 16), "single": 1}.get(dist, B)


def test_lengths_are_as_they_are_called():
    B, T = 64, 65536
    of = lambda dist: shapes.sequence_lengths(dist, B, T)
    unequal = of("unequal")
    assert 0.24 * T / B < unequal.min() < 0.3 * T / B
    assert 1.7 * T / B < unequal.max() < 1.76 * T / B
    assert np.any(unequal % 8)
    assert set(np.sign(np.diff(unequal))) >= {-1, 1}, "in no order"
    assert np.count_nonzero(of("third_empty") == 0) == B // 3
    assert sorted(of("one"))[-2:] == [0, T]
    assert set(of("many")) == {16}
    with pytest.raises(ValueError, match="write one of unequal"):
        of("skewed")


def test_masks():
    """Of one sequence of text, an image, text, and the start of an image; and the pairs that count."""
    offsets = np.array([0, 2, 2, 2 + 3 * 256 + 5], np.int32)
    text, image = shapes.visible_until("causal", offsets), shapes.visible_until("text_and_images", offsets)
    np.testing.assert_array_equal(text, np.arange(len(text)) + 1)
    assert image[[0, 1, 2, 257, 258, 300, 513, 514, 769]].tolist() == [1, 2, 3, 258, 514, 514, 514, 515, 770]
    assert image[770:].tolist() == [775] * 5
    lengths = np.diff(offsets).astype(int)
    assert shapes.visible_pairs("whole", offsets) == sum(lengths**2)
    assert shapes.visible_pairs("causal", offsets) == sum(lengths * (lengths + 1) // 2)
    assert shapes.visible_pairs("window_1024", offsets) == sum(lengths * (lengths + 1) // 2)
    long = np.array([0, 2000], np.int32)
    assert shapes.visible_pairs("window_1024", long) == 1024 * 1025 // 2 + 976 * 1024
    more = sum(range(256)) + sum(range(5))  # pairs within images above the diagonal
    assert shapes.visible_pairs("text_and_images", offsets) == sum(lengths * (lengths + 1) // 2) + more


def test_held_out_shapes():
    """None of them is another benchmark's; half have groups of very unequal size."""
    found = shapes.held_out()
    assert found == shapes.held_out()
    others = [tuple(shape.dims.values()) for shape in (*shapes.GROUPED.values(), *unseen(40))]
    assert not {tuple(shape.dims.values()) for shape, _ in found} & set(others)
    dists = [dist for _, (dist,) in found]
    assert {dist: dists.count(dist) for dist in dists} == {"balanced": 5, "skewed": 5, "huge": 5, "zipf": 5}


def test_sampled_products_of_models():
    """Each model at each number of tokens; slices and directions as often as each other."""
    found, every = shapes_models.models(), shapes_models.all_models()
    assert found == shapes_models.models()
    assert len(found) == len(set(found) & set(every)) == 60
    assert len(every) == 470
    kinds = [shape.name.rsplit("_", 3) for shape in found]  # model, tokens, slice, direction
    assert {(model, T) for model, T, *_ in kinds} == {
        (m, f"t{T}") for m in shapes_models.LAYERS for T in (4096, 16384, 65536)
    }
    for place, names in ((2, shapes_models.SLICES), (3, shapes_models.DIRECTIONS)):
        counts = [sum(kind[place] == name for kind in kinds) for name in names]
        assert max(counts) - min(counts) <= 5
    few = shapes_models.models(12, seed=7)
    assert len({tuple(shape.name.rsplit("_", 3)[:2]) for shape in few}) == 12
    assert few != shapes_models.models(12, seed=8)


def test_products_of_a_model():
    """qwen15_moe_a27b: 60 experts, 4 a token, D 2048, F 1408. What does not fit: see `products`."""
    found = {
        shape.name.split("_t4096_")[1]: tuple(shape.dims.values())
        for shape in shapes_models.products("qwen15_moe_a27b", 4096)
    }
    assert found == {
        "whole_up": (60, 16384, 2048, 1408),
        "whole_down": (60, 16384, 1408, 2048),
        "e4_up": (15, 4096, 2048, 1408),
        "e4_down": (15, 4096, 1408, 2048),
        "f2_up": (60, 16384, 2048, 704),
        "f2_down": (60, 16384, 704, 2048),
        "f4_up": (60, 16384, 2048, 352),
        "f4_down": (60, 16384, 352, 2048),
    }
    left = {shape.name.split("_")[-2] for shape in shapes_models.products("dbrx", 65536)}
    assert left == {"e4", "f4"}


def test_a_router_s_groups():
    """Their sizes vary as those of independent draws do."""
    sizes = shapes.group_sizes("router", 128, 1 << 17)
    assert 0.8 < sizes.std() / np.sqrt(1024) < 1.2
    assert abs(int(sizes.max()) - 1024) < 5 * 32


@pytest.mark.parametrize("shape", shapes.GROUPED.values(), ids=lambda shape: shape.name)
def test_skewed_is_zipf_with_empty_groups_in_shuffled_order(shape):
    sizes = shapes.group_sizes("skewed", shape.G, shape.M)
    empty = max(1, shape.G // 16)
    assert np.count_nonzero(sizes == 0) == empty
    ranked = np.sort(sizes)[::-1][: shape.G - empty]
    exact = shape.M / np.arange(1, len(ranked) + 1) / np.sum(1 / np.arange(1, len(ranked) + 1))
    assert np.max(np.abs(ranked - exact)) < 1  # rounded to whole rows and no further
    assert np.any(sizes % 8)
    assert set(np.sign(np.diff(sizes))) >= {-1, 1}, "in no order"


@pytest.mark.parametrize("dist", shapes.DISTS)
@pytest.mark.parametrize("pass_name", shapes.PASSES)
def test_sampled_rows_lie_in_their_groups_and_at_their_ends(dist, pass_name):
    shape = shapes.GroupedShape("", 9, 120, 16, 24)
    sizes = shapes.group_sizes(dist, shape.G, shape.M)
    offsets = shapes.group_offsets(sizes)
    groups, rows = shapes.sampled_rows(pass_name, shape, offsets)
    assert len(groups) == len(rows) == shapes.SAMPLED_ROWS  # one compiled check for all distributions
    if pass_name == "wgrad":
        assert rows.max() < shape.K
        assert (sizes == 0).any() == (sizes[groups] == 0).any()
    else:
        assert np.all((offsets[groups] <= rows) & (rows < offsets[groups + 1]))
        largest = np.argmax(sizes)
        assert {offsets[largest], offsets[largest + 1] - 1} <= set(rows.tolist())


def test_bytes_are_those_of_every_input_and_output():
    shape = shapes.GroupedShape("", 4, 10, 3, 5)
    sizes = shapes.group_sizes("one_group", 4, 10)
    assert shape.moved_bytes("fwd", sizes) == 2 * (30 + 50 + 15)  # nobody reads an empty group's weights
    assert shape.moved_bytes("wgrad", sizes) == 2 * (30 + 50 + 4 * 15)
    packed = shapes.PACKED["t65536_d3072"]
    rows, vectors = 2 * 65536 * 3072, 2 * 64 * 3072
    assert packed.moved_bytes("adaln", "fwd") == 2 * rows + 2 * vectors
    assert packed.moved_bytes("adaln", "fwd+bwd") == 5 * rows + 4 * vectors
    assert packed.moved_bytes("gated_residual_adaln", "fwd") == 4 * rows + 3 * vectors
    assert packed.moved_bytes("gated_residual_adaln", "fwd+bwd") == 10 * rows + 6 * vectors
    assert packed.moved_bytes("adaln", "fwd", vector_itemsize=4) == 2 * rows + 2 * 2 * vectors
    assert packed.of_dist("many").moved_bytes("adaln", "fwd") == 2 * rows + 64 * 2 * vectors
    permuted, T, R, row = shapes_moe.PERMUTES["qwen3_30b_t4096"], 4096, 8 * 4096, 2 * 2048
    assert permuted.moved_bytes("permute", "fwd") == permuted.moved_bytes("permute", "bwd") == row * (T + R) + 4 * R
    assert permuted.moved_bytes("combine", "fwd") == row * (T + R) + 8 * R
    assert permuted.moved_bytes("combine", "bwd") == row * (T + 2 * R) + 12 * R
    once = 2 * T * 2048 + 4 * 2048 * 128 + 4 * T * 128
    assert [bench_router.moved_bytes(permuted, name) for name in bench_router.PASSES] == [once, 3 * once]
    routed = shapes_moe.ROUTES["dsv3_t4096"]
    assert routed.moved_bytes("fwd") == 4 * 4096 * (256 + 4 * 8)
    assert routed.moved_bytes("fwd+bwd") == 4 * 4096 * (3 * 256 + 6 * 8)


def test_bytes_of_a_quantisation():
    size = 256 * 384
    assert moved_bytes("block_1x128", 256, 384, "row") == 3 * size + 4 * 256 * 3
    assert moved_bytes("block_1x128", 256, 384, "both") == 4 * size + 4 * 256 * 3 + 4 * 2 * 384
    assert moved_bytes("block_128x128", 256, 384, "both") == 4 * size + 2 * 4 * 2 * 3
    assert moved_bytes("rowwise", 256, 384, "col") == 3 * size + 4 * 384
    assert moved_bytes("tensorwise", 256, 384, "row", reads=2) == 5 * size + 4
    assert reads_needed("tensorwise", "row") == reads_needed("rowwise", "both") == 2
    assert reads_needed("rowwise", "row") == reads_needed("block_1x128", "both") == 1
    assert reads_needed("tensorwise", "both", given_amax=True) == 1


def test_a_floor_counts_what_the_casts_must_move():
    M, K, N = 256, 384, 512
    mk, kn, mn = M * K, K * N, M * N
    of = lambda name, pass_name: fp8_products.cast_bytes(RECIPES[name], pass_name, M, K, N)
    assert of("tensorwise", "fwd") == 5 * (mk + kn) + 2 * 4
    assert of("delayed", "fwd") == 3 * (mk + kn) + 2 * 4
    assert of("tensorwise", "fwd+bwd") == 6 * (mk + kn + mn) + 6 * 4
    assert of("delayed", "fwd+bwd") == 4 * (mk + kn) + 6 * mn + 6 * 4
    assert of("blockwise", "fwd") == 3 * (mk + kn) + 4 * (mk // 128 + kn // 128**2)
    assert of("blockwise", "fwd+bwd") == 4 * (mk + kn + mn) + 2 * 4 * (mk // 128 + mn // 128 + kn // 128**2)
    scales = 4 * (mk // 128 + mn // 128 + 2 * kn // 128**2)
    assert of("blockwise_with_gw_hp", "fwd+bwd") == 3 * (mk + mn) + 4 * kn + scales


def test_operations():
    layer = shapes_moe.MOES["qwen3_30b_t4096"]
    assert layer.flops("fwd") == 3 * shapes.GROUPED["qwen3_30b"].flops
    assert layer.flops("fwd+bwd") == 3 * layer.flops("fwd")
    several = MODALITIES["vision_text"]
    assert several.dims == {"modalities": 2, "G": 72, "M": 32768, "K": 2048, "N": 4096}
    assert several.flops == 2 * (24576 * 2048 * 4096 + 8192 * 2048 * 1024)
    assert several.sizes("skewed")[:8].sum() == 24576
    np.testing.assert_array_equal(several.sizes("skewed")[8:], shapes.group_sizes("skewed", 64, 8192))
    attention = shapes.AttentionShape("", 128, 4, 16, 2)
    assert [attention.flops(name, 34) for name in ("fwd", "fwd+bwd")] == [4 * 4 * 16 * 34, 14 * 4 * 16 * 34]


@pytest.mark.parametrize("dist", ["balanced", "skewed", "half"])
@pytest.mark.parametrize(
    "shape", [shapes_moe.MoeShape("small", 24, 4, 2, 16, 32), *shapes_moe.MOES.values()], ids=lambda shape: shape.name
)
def test_preferences_fill_the_groups(dist, shape):
    """Each token has k experts. Groups have the sizes of `group_sizes`, except where a token would be in one twice."""
    chosen = shapes_moe.preferences(dist, shape) > 0
    np.testing.assert_array_equal(chosen.sum(axis=1), shape.k)
    got, want = chosen.sum(axis=0), shapes.group_sizes(dist, shape.E, shape.T * shape.k)
    if want.max() <= shape.T:
        np.testing.assert_array_equal(got, want)
    else:
        assert np.all(got[want >= shape.T] == shape.T)
        assert np.all((got >= want)[want < shape.T])
        assert not got[want == 0].any()
    assert not shapes_moe.preferences("router", shape).any()
