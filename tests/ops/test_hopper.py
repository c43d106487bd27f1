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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_simulator_has_the_cards_bits(kind):
    problem = problem_of(kind, 1)
    card = problem.results()
    with simulated(1):
        compare(problem.results(), card, problem.close)
