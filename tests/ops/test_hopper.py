"""Every Hopper kernel on small random problems: on a Hopper GPU, elsewhere in the simulator."""

import numpy as np
import pytest

from tests.ops.hopper_cases import KINDS


@pytest.mark.hopper
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    KINDS[kind](np.random.default_rng(0)).check()
