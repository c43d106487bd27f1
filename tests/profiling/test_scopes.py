"""Paths of instructions, from JAX's names and from the stack that XLA keeps."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxops._lib.hlo import Module, module_of
from jaxops.profiling.scopes import Scope, own_metadata, scope_of, scopes_of
from tests.configured import configured

pytestmark = pytest.mark.versions


@pytest.mark.parametrize(
    ("op_name", "path", "primitive", "stage"),
    [
        ("", "", "", "other"),
        ("x", "", "x", "other"),
        ("jit(step)/mul", "", "mul", "other"),
        ("jit(step)/jvp(Net)/mlp/dot_general", "Net/mlp", "dot_general", "forward"),
        ("jit(step)/jvp()/while/body/closed_call/Block/add", "Block", "add", "forward"),
        ("jit(step)/transpose(jvp(Net))/mlp/transpose", "Net/mlp", "transpose", "backward"),
        ("jit(step)/transpose(jvp(Net))/jvp(Net)/checkpoint/mlp/dot_general", "Net/mlp", "dot_general", "backward"),
        ("jit(step)/transpose(jvp(N))/jvp(N)/checkpoint/rematted_computation/a/exp", "N/a", "exp", "recomputed"),
        ("jit(step)/transpose(jvp())/while/body/B/r/B/r/add_any", "B/r", "add_any", "backward"),
        ("jit(step)/jvp(jit(_f))/jit(_f)/jit(f)/route_choose/pallas_call", "route_choose", "pallas_call", "forward"),
        ("jit(f)/vmap(a/b)/add;jit(f)/c/mul", "a/b", "add", "other"),
        ("jit(f)/jvp(vmap(BTN->BNT))/transpose", "BTN->BNT", "transpose", "forward"),
    ],
)  # fmt: skip
def test_a_path_has_modules_and_scopes_only(op_name, path, primitive, stage):
    assert scope_of(op_name) == Scope(tuple(filter(None, path.split("/"))), primitive, stage)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


def test_without_named_scopes_the_classes_of_the_stack_are_the_path():
    with configured(jax_traceback_in_locations_limit=10), own_metadata():  # not those of an equal program on disk
        step = jax.jit(jax.grad(lambda model, x: model(x).sum()))
        module = module_of(step.lower(Mlp(nnx.Rngs(0)), jnp.ones((4, 8))).compile().runtime_executable())
    # pytest's own classes stand before them.
    scopes = {(scope.path[-2:], scope.stage) for scope in map(scopes_of(module), module.instructions.values())}
    assert (("Mlp", "Linear"), "forward") in scopes
    # The product's: jnp.tanh is jitted, and JAX keeps its gradient with the stack of the first call of that shape.
    assert (("Mlp", "Linear"), "backward") in scopes


FUSION = """HloModule jit_step

%inner (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %exp = f32[] exponential(f32[] %a), metadata={op_name="jit(step)/jvp(Net)/mlp/exp"}
}

%outer (b: f32[]) -> f32[] {
  %b = f32[] parameter(0), metadata={op_name="jit(step)/mul"}
  ROOT %called = f32[] fusion(f32[] %b), kind=kLoop, calls=%inner
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %fusion = f32[] fusion(f32[] %x), kind=kLoop, calls=%outer
}
"""


def test_a_fusion_without_a_scope_has_that_of_its_inside():
    module = Module(FUSION)
    assert scopes_of(module)(module.instructions["fusion"]) == Scope(("Net", "mlp"), "exp", "forward")
