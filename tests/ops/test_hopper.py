"""Every Hopper kernel on small random problems: on a Hopper GPU, elsewhere in the simulator."""

import pytest

from tests.gluon_simulator import simulated
from tests.ops.hopper_cases import compare, problem_of
from tests.ops.hopper_fp8_cases import KINDS


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    problem = problem_of(kind, 0)
    compare(problem.results(), problem.want(), problem.close)


# One of each op, of every way to share a tile.
FAITHFUL = (
    *("grouped_matmul-ping-pong-halves", "grouped_matmul-cluster", "grouped_wgrad-256x128"),
    *("grouped_wgrad-cluster-halves", "grouped_wgrad_added-cluster", "grouped_matmul_sum-cluster"),
    "modality_grouped_matmul-128x256",
    *("grouped_glu-silu-gathered", "moe_mlp_bwd-gelu", "linear_cross_entropy-cluster:bias"),
    *("fp8_dense-blocks", "fp8_rows-rowwise", "fp8_contraction-outer", "fp8_unit-silu-gathered"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAITHFUL)
def test_the_simulator_has_the_cards_bits(kind):
    problem = problem_of(kind, 1)
    card = problem.results()
    with simulated(1):
        compare(problem.results(), card, problem.close)
