"""The list holds every public name, and its cases are what they are for."""

import numpy as np
import pytest

import jaxops
import jaxops.nn
from jaxops.described import functions
from tests.contracts.layers import LAYERS, NO_LAYERS
from tests.contracts.ops import NO_OPS, OPS
from tests.contracts.run import EVERYTHING, small


def test_the_list_has_every_public_name():
    """A new op or layer goes into tests/contracts/ops.py or layers.py: then every rule is tested for it."""
    assert sorted(op.name for op in OPS) == sorted(set(jaxops.__all__) - NO_OPS)
    assert sorted(function.name for function in functions()) == sorted(op.name for op in OPS), "describe.py lacks one"
    layers = {layer.name.split("-")[0] for layer in LAYERS}  # some have several entries, as "GroupedLinear-fp8"
    assert layers == {f"nn.{name}" for name in set(jaxops.nn.__all__) - NO_LAYERS}


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_an_entry_says_is_so(name):
    op = EVERYTHING[name]
    arguments = small(op)
    assert set(op.wrt) <= set(arguments)
    assert set(op.local) <= set(arguments)
    assert (op.reference is None) != (op.expected is None)
    of_arguments, of_results = op.outside(arguments) if op.outside else ({"": True}, [])
    assert any(np.any(mask) for mask in (*of_arguments.values(), *of_results) if mask is not None), "none is outside"
    small_alone = "route", "route_choices", "dequantize", "update_router_bias"
    if name in small_alone or op.sharded or name.startswith("nn."):
        return
    assert op.module is not None
    assert op.large
    for argument, ends in arguments.items():
        if argument in ("group_offsets", "sequence_offsets") and len(ends) > 2:
            assert (np.diff(ends) == 0).any(), "no group is empty"
