"""Random logits for the router, with what ties and what drops rows, and the three ways to run it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import Routing
from jaxops.ops.route import Plan, Tiles
from jaxops.ops.route.plan import Spec
from jaxops.ops.route.reference import route_reference
from tests.arrays import put
from tests.compare import assert_close

# "interpret" runs the kernels in Pallas' interpreter on the CPU, "gpu" compiles the same kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
KERNELS = RUNS[1:]
SMOOTH = ("weights", "aux_loss", "z_loss")  # what has a gradient
CHOSEN = tuple(field.name for field in dataclasses.fields(Routing) if field.name not in SMOOTH)

FWD, BWD = Tiles(8, 2), Tiles(4, 4)  # smaller than the tests' sizes


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is static in a call: shape and dtype of the logits, options, and the kernels' tiles."""

    E: int
    k: int
    T: int = 37
    dtype: str = "float32"
    score: str = "softmax"
    normalize: bool = True
    weight_scale: float = 1.0
    selection_bias: bool = False
    expert_groups: int = 1
    top_expert_groups: int = 1
    capacity: int | None = None
    masked: bool = False
    fwd: Tiles = FWD
    bwd: Tiles = BWD

    @property
    def options(self) -> dict:
        names = ("score", "normalize", "weight_scale", "expert_groups", "top_expert_groups", "capacity")
        return {name: getattr(self, name) for name in names}

    def plan_for(self, run: str) -> Plan:
        return Plan("xla") if run == "xla" else Plan("pallas", self.fwd, self.bwd)

    def bias_of(self, case: dict):
        return case["selection_bias"] if self.selection_bias else None

    def mask_of(self, case: dict):
        return case["mask"] if self.masked else None


# Everything at once: what the contracts are tested with, too, so that it is compiled once.
DEEPSEEK = Variant(
    12, 3, score="sigmoid", weight_scale=2.5, selection_bias=True, expert_groups=4, top_expert_groups=2, capacity=7
)


def make_case(variant: Variant, seed: int = 0) -> dict:
    """logits, selection_bias, mask, and cotangents of weights, aux_loss and z_loss. What a mask leaves out is NaN."""
    rng = np.random.default_rng(seed)
    mask = rng.random((variant.T, 1)) < 0.7
    outside = ~mask if variant.masked else np.zeros_like(mask)
    shapes = {"logits": (variant.T, variant.E), "dweights": (variant.T, variant.k), "daux_loss": (), "dz_loss": ()}
    case = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    case |= {name: np.where(outside, np.nan, case[name]) for name in ("logits", "dweights")}
    case |= {"logits": 2 * case["logits"], "selection_bias": 0.3 * rng.normal(size=variant.E)}
    case = {name: put(x, variant.dtype if name == "logits" else jnp.float32) for name, x in case.items()}
    return case | {"mask": put(mask[:, 0], bool)}


def apply(variant: Variant, run: str, logits, selection_bias=None, mask=None) -> Routing:
    how = {"selection_bias": selection_bias, "mask": mask, "plan": variant.plan_for(run)}
    return jaxops.route(logits, variant.k, **variant.options, **how)


def apply_reference(variant: Variant, logits, selection_bias=None, mask=None) -> Routing:
    return route_reference(Spec(variant.k, **variant.options), logits, selection_bias, mask)


def _everything(function, variant: Variant, case: dict) -> tuple[Routing, jax.Array]:
    """(Routing, gradient of logits)"""

    def smooth(logits):
        routing = function(logits, variant.bias_of(case), variant.mask_of(case))
        return tuple(getattr(routing, name) for name in SMOOTH), routing

    _, vjp, routing = jax.vjp(smooth, case["logits"], has_aux=True)
    return routing, vjp(tuple(case[f"d{name}"] for name in SMOOTH))[0]


@functools.cache
def compiled(run: str, variant: Variant):
    """A jitted function from a case to its Routing and the gradient of its logits; "reference" is reference.py."""
    if run in ("reference", "xla") and variant != _of_shape(variant):
        return compiled(run, _of_shape(variant))
    if run == "reference":
        return jax.jit(lambda case: _everything(functools.partial(apply_reference, variant), variant, case))
    return jax.jit(lambda case: _everything(functools.partial(apply, variant, run), variant, case))


def check(case: dict, variant: Variant, run: str) -> tuple[Routing, jax.Array]:
    """Everything equals the reference's: what was chosen to the bit, the rest to the rounding."""
    (got, gradient), (want, wanted_gradient) = (compiled(run, variant)(case), compiled("reference", variant)(case))
    for name in CHOSEN:
        assert getattr(got, name).dtype == jnp.int32, name
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in SMOOTH:
        assert getattr(got, name).dtype == jnp.float32, name
        assert_close(getattr(got, name), getattr(want, name), "float32", name)
    assert gradient.dtype == case["logits"].dtype
    # The gradient is a difference of nearly equal numbers, so its relative error is larger than theirs.
    assert_close(gradient, wanted_gradient, case["logits"].dtype.name, "gradient", scale=2)
    return got, gradient


def _of_shape(variant: Variant) -> Variant:
    """The reference and the portable backend do not depend on the tiles."""
    return dataclasses.replace(variant, fwd=FWD, bwd=BWD)
