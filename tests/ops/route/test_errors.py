"""Bad input is an error before anything is launched, and its message says what was passed and what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.route import Plan

LOGITS = np.zeros((5, 12), np.float32)
GOOD = {
    "logits": LOGITS,
    "k": 2,
    "selection_bias": np.zeros(12, np.float32),
    "expert_groups": 4,
    "top_expert_groups": 2,
    "capacity": 3,
    "score": "sigmoid",
}

# What differs from the arguments above, the error, and what its message must name.
ERRORS = {
    "logits-rank": ({"logits": LOGITS[None]}, ValueError, r"logits has shape \(1, 5, 12\).*\[T, E\]"),
    "logits-list": ({"logits": LOGITS.tolist()}, TypeError, r"logits is a list.*\[T, E\]"),
    "logits-int": ({"logits": LOGITS.astype(np.int32)}, TypeError,
     r"logits is int32.*bfloat16, float16, float32.*logits\.astype"),
    "logits-no-experts": (
        {"logits": LOGITS[:, :0], "selection_bias": None, "expert_groups": 1, "top_expert_groups": 1},
        ValueError,
        r"k=2 must be from 1 to E=0",
    ),
    "k-too-large": ({"k": 13}, ValueError, r"k=13 must be from 1 to E=12"),
    "k-of-groups": ({"k": 7}, ValueError, r"k=7 experts cannot come from top_expert_groups=2 groups of 3: at most 6"),
    "selection_bias-size": ({"selection_bias": np.zeros(5, np.float32)}, ValueError,
     r"selection_bias has shape \(5,\).*\(12,\).*column of logits"),
    "selection_bias-bfloat16": ({"selection_bias": jnp.zeros(12, jnp.bfloat16)}, TypeError,
     r"selection_bias is bfloat16; write selection_bias\.astype\(jnp\.float32\)"),
    "selection_bias-list": ({"selection_bias": [0.0] * 12}, TypeError,
     r"selection_bias is a list.*float32 array \[E\]"),
    "expert_groups-divides": ({"expert_groups": 5}, ValueError, r"expert_groups=5 must divide the E=12"),
    "top_expert_groups-too-large": ({"top_expert_groups": 5}, ValueError,
     r"top_expert_groups=5 must be from 1 to expert_groups=4"),
    "mask-shape": ({"mask": np.ones((5, 1), bool)}, ValueError, r"mask has shape \(5, 1\); it must be \[T\] = \(5,\)"),
    "mask-float": ({"mask": np.ones(5, np.float32)}, TypeError, r"mask is float32; it must be bool.*mask != 0"),
    "mask-list": ({"mask": [True] * 5}, TypeError, r"mask is a list.*bool array \[T\]"),
    "plan-and-backend": ({"backend": "pallas", "plan": Plan("xla")}, ValueError,
     r"backend='pallas' contradicts plan\.backend='xla'"),
}  # fmt: skip


def call(**arguments):
    return jaxops.route(arguments.pop("logits"), arguments.pop("k"), **arguments)


def test_what_the_errors_differ_from_is_right():
    """Otherwise a case below could fail for another reason than its own."""
    assert jax.eval_shape(lambda: call(**GOOD)).weights.shape == (5, 2)


@pytest.mark.parametrize(("change", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_error(change, error, match):
    with pytest.raises(error, match=match):
        call(**GOOD | change)
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: call(**GOOD | change))  # runs nothing: the error needs no device


def test_too_many_logits():
    """Shapes only: nothing is allocated."""
    with pytest.raises(ValueError, match=r"16777216 x 256 elements.*fewer than 2\*\*31.*in parts"):
        jax.eval_shape(lambda logits: jaxops.route(logits, 8), jax.ShapeDtypeStruct((1 << 24, 256), "bfloat16"))


@pytest.mark.parametrize(("selection_bias", "load"), [((4,), (5,)), ((2, 2), (2, 2)), ((), ())])
def test_bias_update(selection_bias, load):
    with pytest.raises(ValueError, match=r"selection_bias has shape .* and load .*both must be \[E\]"):
        jaxops.update_router_bias(jnp.zeros(selection_bias), jnp.zeros(load), 0.1)
