"""The model of the card that the heuristics of the grouped products compare tiles by."""

import pytest

from jaxops._lib.device import Device
from jaxops.ops.grouped_matmul import Problem, Tiles
from jaxops.ops.grouped_matmul.clocks import clocks


@pytest.mark.parametrize(
    ("G", "K", "N", "bound_by_memory"),
    [pytest.param(256, 7168, 2048, True, id="dsv3"), pytest.param(8, 4096, 14336, False, id="mixtral_up")],
)
def test_clocks_follow_the_bandwidth(G, K, N, bound_by_memory):
    """A Hopper card whose bandwidth is not known counts as an H200."""
    problem, tiles = Problem(G, 32768, K, N, "bfloat16"), Tiles(128, 256, 64, 8, 4, kernel="triton")
    kinds = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"
    h200, h100, other = (clocks("fwd", problem, tiles, Device(kind, "gpu")) for kind in kinds)
    assert h100 == pytest.approx((4.25 / 3.03 if bound_by_memory else 1) * h200)
    assert other == h200
