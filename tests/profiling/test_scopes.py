import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxops.profiling.scopes import Scope, module_scopes, scope_of, scoped


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
        self.steps = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        for step in self.steps:
            x = jnp.tanh(step(x))
        return x


class Net(nnx.Module):
    def __init__(self, rngs):
        self.mlp, self.head = Mlp(rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.checkpoint(lambda x: self.mlp(x))(x))


@pytest.fixture
def all_on_disk():
    """Every program is stored in the cache on disk, which ignores names."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, key)
    jax.config.update(key, 0)
    yield
    jax.config.update(key, before)


def scopes_of(step, *args):
    text = step.lower(*args).compile().as_text()
    names = re.findall(r'op_name="(jit[^"]*)"', text)
    return {str(scope_of(name)) for name in names}


def test_modules_have_paths_inside_only(all_on_disk):
    net, x = Net(nnx.Rngs(0)), jnp.ones((4, 8))
    step = jax.jit(jax.grad(lambda state, x: nnx.merge(nnx.graphdef(net), state)(x).sum()))
    before = Net.__call__, nnx.Linear.__call__
    state = nnx.state(net)
    assert not any("mlp" in scope for scope in scopes_of(step, state, x))
    with module_scopes():
        found = scopes_of(step, state, x)
    assert {"Net/mlp/steps/0", "Net/mlp/steps/1", "Net/head"} <= found
    assert (Net.__call__, nnx.Linear.__call__) == before
    assert not any("mlp" in scope for scope in scopes_of(step, state, x)), "the program outside has no scopes"
    with scoped():
        assert scopes_of(step, state, x) == found, "the program of before, without a trace"


def test_classes_are_restored_after_an_error():
    before = Net.__call__
    with pytest.raises(ZeroDivisionError), module_scopes():
        1 / 0  # noqa: B018
    assert Net.__call__ is before
