"""Every op and layer under JAX's transformations: all in one program, compiled once; and over several devices."""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.contracts.entry import Op
from tests.contracts.run import (
    EVERYTHING,
    cases,
    check,
    check_outside,
    cotangents_of,
    everything,
    is_float,
    parts,
    small,
    spoiled,
    stacked,
    wanted,
)
from tests.contracts.test_costs import WITH_GLUON
from tests.contracts.test_index_width import operands
from tests.hopper import H200

DEVICES, LAYERS, BATCH = min(2, jax.device_count()), 2, 2
# Their kernels' backward takes XLA a quarter of a minute to compile for Pallas' interpreter: it is run by itself in
# tests/ops/fp8_matmul/test_values.py, and on a GPU here.
FORWARD_ALONE = {("fp8_matmul", "interpret"), ("fp8_grouped_matmul", "interpret")}
# Axes of the nested program, from the outermost: devices, layers of a scan, a batch that maps all arguments, a batch
# that maps `local` ones only.
AXES = (DEVICES, LAYERS, BATCH, BATCH)


def entry(name: str, way: str) -> Op:
    op = EVERYTHING[name]
    return dataclasses.replace(op, wrt=()) if (name, way) in FORWARD_ALONE else op


def examples(op: Op) -> dict[tuple[int, ...], tuple]:
    """(arguments, cotangents) by index in AXES. Arguments that are not `local` are equal over its first and last."""
    found = {}
    for place in np.ndindex(*AXES):
        own = int(np.ravel_multi_index(place, AXES))
        shared = int(np.ravel_multi_index((0, *place[1:3], 0), AXES))
        mine, same = small(op, own), small(op, shared)
        found[place] = {name: (mine if name in op.local else same)[name] for name in mine}, cotangents_of(op, own)
    return found


def nest(op: Op, found: dict, which, name: str | None = None):
    """One tree with the leading axes AXES, the first and the last only for `local` arguments and cotangents."""
    local = name is None or name in op.local

    def at(*place):
        return which(found[place])

    def batch(d, s, b):
        return stacked([at(d, s, b, i) for i in range(BATCH)]) if local else at(d, s, b, 0)

    of_devices = [
        stacked([stacked([batch(d, s, b) for b in range(BATCH)]) for s in range(LAYERS)]) for d in range(DEVICES)
    ]
    return stacked(of_devices) if local else of_devices[0]


def of_place(op: Op, argument: str, place: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an argument, or of its gradient, in a tree of `nest`."""
    return place if argument in op.local else place[1:3]


def at_place(op: Op, place: tuple[int, ...], found: tuple) -> tuple:
    """Results and gradients of one example."""
    results, gradients = found
    at = functools.partial(of_place, op, place=place)
    of_one = {key: jax.tree.map(operator.itemgetter(at(key)), x) for key, x in gradients.items()}
    return jax.tree.map(operator.itemgetter(place), results), of_one


def nested(op: Op, way: str, held: dict, others: dict, cotangents: list):
    """grad of shard_map of scan of checkpoint of vmap of vmap."""
    mesh = jax.make_mesh((DEVICES,), ("d",), devices=jax.devices()[:DEVICES], axis_types=(AxisType.Auto,))
    how = op.ways[way]

    def first_only(arguments):
        return jax.vmap(
            functools.partial(op.call, **how), in_axes=({name: 0 if name in op.local else None for name in arguments},)
        )(arguments)

    @jax.checkpoint
    def layer(arguments, cotangents):
        results = jax.vmap(first_only)(arguments)
        floats = [x for x in jax.tree.leaves(results) if is_float(x)]
        total = (
            sum((jnp.sum(x * c) for x, c in zip(floats, cotangents, strict=True)), jnp.float32(0))
            if op.wrt
            else jnp.float32(0)
        )
        return total, results

    def device(local, replicated, cotangents):
        local, cotangents = jax.tree.map(lambda x: x[0], (local, cotangents))

        def body(total, given):
            of_layer, results = layer(*given)
            return total + of_layer, results

        start = jnp.float32(0)
        start = jax.lax.pcast(start, ("d",), to="varying") if op.wrt and way == "xla" else start
        total, results = jax.lax.scan(body, start, (local | replicated, cotangents))
        return total[None], jax.tree.map(lambda x: x[None], results)

    # Pallas' interpreter does not support check_vma; the kernels' types are checked by tracing, below.
    sharded = jax.shard_map(device, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"), check_vma=way == "xla")

    def loss(held):
        given = held | others
        local, replicated = (
            {name: x for name, x in given.items() if (name in op.local) == own} for own in (True, False)
        )
        totals, results = sharded(local, replicated, cotangents)
        return jnp.sum(totals), results

    if not op.wrt:
        return loss({})[1], {}
    gradients, results = jax.grad(loss, has_aux=True)(held)
    return results, gradients


@functools.cache
def program(name: str, way: str):
    """The memory of what has gradients may become theirs."""
    return jax.jit(functools.partial(nested, entry(name, way), way), donate_argnums=0)


def kernels_follow(op: Op, way: str) -> bool:
    """Whether the portable backend is only traced: it is plain jnp, in the same rules as the kernels, which are run."""
    return way == "xla" and "interpret" in op.ways


def nested_arguments(op: Op, found: dict) -> tuple[dict, dict, list]:
    arguments = {key: nest(op, found, lambda one, key=key: one[0][key], key) for key in small(op)}
    return *parts(op, arguments), nest(op, found, lambda one: one[1])


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "way"), cases(("xla",), where=lambda op, way: kernels_follow(op, way) and not op.sharded)
)
def test_is_traced(name, way):
    """With check_vma=True: results and gradients of the right types."""
    op = entry(name, way)
    with_axes = lambda x, local: jax.ShapeDtypeStruct((*(AXES if local else AXES[1:3]), *x.shape), x.dtype)
    given = {key: jax.tree.map(functools.partial(with_axes, local=key in op.local), x) for key, x in small(op).items()}
    (held, others), cotangents = parts(op, given), [with_axes(x, True) for x in cotangents_of(op)]
    results, gradients = jax.eval_shape(program(name, way), held, others, cotangents)
    same = lambda x, like: (x.shape, x.dtype) == (like.shape, like.dtype)
    assert all(jax.tree.leaves(jax.tree.map(same, gradients, held)))
    assert len(jax.tree.leaves(gradients)) == len(jax.tree.leaves(held))
    assert all(x.shape[:4] == AXES for x in jax.tree.leaves(results))


@pytest.mark.versions
@pytest.mark.parametrize(("name", "way"), cases(where=lambda op, way: not kernels_follow(op, way) and not op.sharded))
def test_in_one_program(name, way):
    """The reference's results of each example. The compiled program has no host callback, copy or transfer, writes
    gradients into donated arguments, and gives the same bits twice, with NaN in all that must not be read, too.
    tests/parallel has such a test for calls that are a shard_map.
    """
    op = entry(name, way)
    found = examples(op)
    held, others, cotangents = nested_arguments(op, found)
    step = program(name, way)
    compiled = step.lower(held, others, cotangents).compile()
    text = compiled.as_text()
    assert not re.search(r"callback|outfeed|infeed|send\(|recv\(|copy-start|S\(5\)", text)
    assert len(re.findall(r"(?:may|must)-alias", text)) == len(jax.tree.leaves(held))
    places = compiled.input_shardings[0]
    # Again with what must change no bit: NaN outside, where there is an outside.
    bad = nested_arguments(op, {place: spoiled(op, *given) for place, given in found.items()})
    twice = [jax.device_put(given, places) for given in ((held, others, cotangents), bad)]
    with jax.transfer_guard("disallow"):
        first, second = (compiled(*given) for given in twice)
    assert all(x.is_deleted() for given in twice for x in jax.tree.leaves(given[0]))
    results, gradients = first = jax.tree.map(np.asarray, first)
    second = jax.tree.map(np.asarray, second)
    for place, (arguments, _) in found.items():
        check_outside(op, arguments, *at_place(op, place, first), at_place(op, place, second))
    totals = {}
    for place, (arguments, cotangents) in found.items():
        whole = EVERYTHING[name]
        want, of_one = jax.tree.map(np.asarray, wanted(whole, arguments, cotangents or cotangents_of(whole)))
        check(op, way, jax.tree.map(lambda x, place=place: x[place], results), want)
        for argument in op.wrt:
            gradient, at = of_one[argument], of_place(op, argument, place)
            totals[argument, at] = (
                gradient if (argument, at) not in totals else jax.tree.map(np.add, totals[argument, at], gradient)
            )
    for (argument, at), want in totals.items():
        check(op, way, jax.tree.map(lambda x, at=at: x[at], gradients[argument]), want)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "pallas_call") for name, op in EVERYTHING.items() if not name.startswith("nn.") and op.pallas),
        *((op.name, "triton_kernel_call") for op in WITH_GLUON),
    ],
)
def test_the_kernels_axes(name, kernel):
    """Traced for an H200 with check_vma=True, tokens sharded and weights replicated: JAX adds the gradients' psum.
    Hopper's kernels at sizes for which "auto" takes them: jax-triton's primitive does not say what varies."""
    op = EVERYTHING[name]
    if kernel != "pallas_call":
        pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")
    given = small(op) if kernel == "pallas_call" else operands(op, op.large[0][0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
    local = {
        key: jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), x)
        for key, x in given.items()
        if key in op.local
    }
    replicated = {key: x for key, x in given.items() if key not in op.local}

    def shard(local, replicated):
        def loss(held):
            floats = [x for x in jax.tree.leaves(op.call(mine | held)) if is_float(x)]
            return functools.reduce(jnp.add, [jnp.sum(x) for x in floats], jnp.float32(0))

        mine = jax.tree.map(lambda x: x[0], local) | replicated
        if not op.wrt:
            return jax.tree.map(lambda x: x[None], op.call(mine)), {}
        gradients = jax.grad(loss)({key: mine[key] for key in op.wrt})
        own = {key: jax.tree.map(lambda x: x[None], x) for key, x in gradients.items() if key in op.local}
        return own, {key: x for key, x in gradients.items() if key not in op.local}

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()))
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(sharded)(local, replicated))
    assert kernel in text
    assert ("psum" in text) == bool(set(op.wrt) - set(op.local))


@pytest.mark.parametrize(
    ("name", "way"), cases(("xla",), where=lambda op, way: bool(op.wrt) and not op.name.startswith("nn."))
)
def test_gradients_of_some_arguments(name, way):
    """In any order: a cache entry for some arguments must not serve others. Forward mode raises JAX's own error.

    Layers are made of ops, and cache nothing.
    """
    op = EVERYTHING[name]
    arguments, cotangents = small(op), cotangents_of(op)

    def traced(wrt: tuple[str, ...]) -> str:
        some = dataclasses.replace(op, wrt=wrt)
        return str(jax.make_jaxpr(functools.partial(everything, some, way))(*parts(some, arguments), cotangents))

    first = traced(op.wrt)
    for argument in op.wrt:
        traced((argument,))
        held, others = parts(dataclasses.replace(op, wrt=(argument,)), arguments)
        with pytest.raises(TypeError, match=r"forward-mode.*custom_vjp"):
            jax.jit(
                lambda held, others: jax.jvp(lambda held: op.call(held | others, **op.ways[way]), (held,), (held,))
            ).lower(held, others)
    assert traced(op.wrt) == first


def has_second_order(op: Op, way: str) -> bool:
    """FP8 products are differentiated once; layers are made of ops."""
    return bool(op.wrt) and op.reference is not None and not op.name.startswith("nn.")


@pytest.mark.parametrize(("name", "way"), cases(where=has_second_order))
def test_second_order(name, way):
    """A gradient's gradient, through everything that has one. The kernels' has the same rules: where they are
    interpreted it is traced alone."""
    op = EVERYTHING[name]
    held, others = parts(op, small(op))
    held = jax.tree.map(lambda x: np.float32(0.3) * x, held)  # the sine of large results would be noise

    def curvature(f):
        def loss(held, others):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(held | others)) if is_float(x))

        return jax.jit(jax.grad(lambda *given: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(*given)))))

    ours = curvature(functools.partial(op.call, **op.ways[way]))
    if way == "interpret":
        assert jax.tree.map(jnp.shape, jax.eval_shape(ours, held, others)) == jax.tree.map(jnp.shape, held)
    else:
        check(op, way, ours(held, others), curvature(op.reference)(held, others), scale=20)
