"""Every Hopper kernel on small random problems: on a Hopper GPU, elsewhere in the simulator."""

import numpy as np
import pytest

from tests.gluon_simulator import simulated
from tests.ops.hopper_cases import KINDS, compare


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    problem = KINDS[kind](np.random.default_rng(0))
    compare(problem.results(), problem.want(), problem.close)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_the_simulator_has_the_cards_bits(kind, seed):
    problem = KINDS[kind](np.random.default_rng(seed))
    card = problem.results()
    with simulated(seed):
        compare(problem.results(), card, problem.close)
