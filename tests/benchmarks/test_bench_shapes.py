"""The one definition of group sizes, and which rows of a result are checked."""

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.ops.bench_unseen_shapes import unseen
from benchmarks.shapes import moe as shapes_moe


@pytest.mark.parametrize("dist", shapes.DISTS)
@pytest.mark.parametrize(
    ("G", "M"), [(1, 5), (2, 3), (8, 32768), (64, 32768), (128, 32768), (256, 4096), (256, 100), (7, 997)]
)
def test_sizes_sum_to_m_and_are_the_same_each_time(dist, G, M):
    sizes = shapes.group_sizes(dist, G, M)
    assert sizes.shape == (G,)
    assert sizes.dtype == np.int32
    assert sizes.min() >= 0
    assert sizes.sum() == M
    np.testing.assert_array_equal(sizes, shapes.group_sizes(dist, G, M))
    offsets = shapes.group_offsets(sizes)
    assert offsets.dtype == np.int32
    assert (offsets[0], offsets[-1]) == (0, M)


def test_balanced_spreads_the_remainder():
    np.testing.assert_array_equal(shapes.group_sizes("balanced", 4, 10), [3, 3, 2, 2])


def test_huge_leaves_a_row_to_each_other_group():
    assert sorted(shapes.group_sizes("huge", 5, 100)) == [1, 1, 1, 1, 96]
    assert sorted(shapes.group_sizes("huge", 5, 3)) == [0, 0, 0, 0, 3]


def test_zipf_by_hand():
    """1, 2 ** -1.2 = 0.435 and 3 ** -1.2 = 0.268 of 1.703."""
    assert sorted(shapes.group_sizes("zipf", 3, 1703)) == [268, 435, 1000]


def test_held_out_shapes():
    """None of them is another benchmark's; half have groups of very unequal size."""
    found = shapes.held_out()
    assert found == shapes.held_out()
    others = [tuple(shape.dims.values()) for shape in (*shapes.GROUPED.values(), *unseen(40))]
    assert not {tuple(shape.dims.values()) for shape, _ in found} & set(others)
    dists = [dist for _, dist in found]
    assert {dist: dists.count(dist) for dist in dists} == {"balanced": 5, "skewed": 5, "huge": 5, "zipf": 5}


@pytest.mark.parametrize("shape", shapes.GROUPED.values(), ids=lambda shape: shape.name)
def test_skewed_is_zipf_with_empty_groups_in_shuffled_order(shape):
    sizes = shapes.group_sizes("skewed", shape.G, shape.M)
    empty = max(1, shape.G // 16)
    assert np.count_nonzero(sizes == 0) == empty
    ranked = np.sort(sizes)[::-1][: shape.G - empty]
    exact = shape.M / np.arange(1, len(ranked) + 1) / np.sum(1 / np.arange(1, len(ranked) + 1))
    assert np.max(np.abs(ranked - exact)) < 1  # rounded to whole rows and no further
    assert np.any(sizes % 8)
    assert np.any(np.diff(sizes) > 0)
    assert np.any(np.diff(sizes) < 0)


def test_one_group_and_half():
    np.testing.assert_array_equal(shapes.group_sizes("one_group", 4, 9), [0, 0, 9, 0])
    sizes = shapes.group_sizes("half", 9, 100)
    assert sizes.max() == 50
    assert np.count_nonzero(sizes == 0) == 3
    np.testing.assert_array_equal(np.sort(sizes)[3:8], [10] * 5)


def test_an_unknown_distribution_is_named():
    with pytest.raises(ValueError, match="write one of balanced"):
        shapes.group_sizes("even", 2, 4)


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


def test_moved_bytes_leave_out_the_weights_that_nobody_reads():
    shape = shapes.GroupedShape("", 4, 10, 3, 5)
    sizes = shapes.group_sizes("one_group", 4, 10)
    assert shape.moved_bytes("fwd", sizes) == 2 * (30 + 50 + 15)
    assert shape.moved_bytes("wgrad", sizes) == 2 * (30 + 50 + 4 * 15)


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


def test_router_logits_are_unchanged():
    assert not shapes_moe.preferences("router", shapes_moe.MOES["mixtral_t16384"]).any()
