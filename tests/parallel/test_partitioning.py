"""Ops on arrays that are split over a mesh with Auto axes, outside of `jax.shard_map`: one device's values and
gradients, and the collectives of the compiled programs."""

import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops._lib.arrays import partitioning
from jaxops._lib.hlo import arrays, module_of
from tests.arrays import put
from tests.compare import assert_close
from tests.devices import needs_four

pytestmark = needs_four
OPCODES = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
M, D, F, G = 1024, 16, 32, 4  # more tokens than weights: XLA then splits the result like them
OFFSETS = np.array([3, 300, 300, 901, 1000], np.int32)  # unaligned, over all shards, one empty; rows outside
BOTH = P(("data", "fsdp"))
ROWS = {"x": BOTH, "h": BOTH, "logits": BOTH}


@pytest.fixture(autouse=True)
def _full_precision():
    """On a GPU, whose float32 products are else in TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def mesh_of() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def draw(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Normal numbers; weights [.., K, N] over the root of K."""
    rng = np.random.default_rng(0)
    scale = {name: shape[-2] ** -0.5 if len(shape) > 2 else 1.0 for name, shape in shapes.items()}
    return {name: put(scale[name] * rng.normal(size=shape), "float32") for name, shape in shapes.items()}


def results(op: Callable, operands: dict[str, jax.Array], places: dict[str, P]) -> tuple:
    """((y, gradients) of one device, the same of four, what those send: (opcode, sizes) of each array)."""

    def run(operands):
        y, vjp = jax.vjp(op, operands)
        return y, vjp(jax.tree.map(jnp.cos, y))[0]

    mesh = mesh_of()
    placed = {name: NamedSharding(mesh, places.get(name, P())) for name in operands}
    compiled = jax.jit(run, in_shardings=(placed,), out_shardings=(None, placed)).lower(operands).compile()
    instructions = module_of(compiled.runtime_executable()).instructions.values()
    named = [(line.opcode.removesuffix("-done"), line.type) for line in instructions]  # "-start" has operands, too
    sent = [(opcode, array.dims) for opcode, type_ in named if opcode in OPCODES for array in arrays(type_)]
    return jax.jit(run)(operands), compiled(jax.device_put(operands, placed)), sent


def check(op: Callable, operands: dict[str, jax.Array], places: dict[str, P], scale: float = 2) -> list[tuple]:
    alone, apart, sent = results(op, operands, places)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(apart), strict=True):
        assert_close(got, want, "float32", name=jax.tree_util.keystr(path), scale=scale)
    return sent


def count(sent: list[tuple], *opcodes: str, size: int | None = None) -> int:
    """size: of the arrays, at least."""
    return sum(opcode in opcodes and (size is None or np.prod(dims) >= size) for opcode, dims in sent)


def product(operands: dict[str, jax.Array], **how) -> jax.Array:
    return jaxops.grouped_matmul(operands["x"], operands["w"], put(OFFSETS), bias=operands["bias"], **how)


def product_operands() -> dict[str, jax.Array]:
    operands = draw(x=(M, D), w=(G, D, F), bias=(G, F))
    outside = (np.arange(M) < OFFSETS[0]) | (np.arange(M) >= OFFSETS[-1])
    return operands | {"x": jnp.where(outside[:, None], jnp.nan, operands["x"])}


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_rows_of_a_product(backend):
    """No token is gathered; each gradient is added once."""
    sent = check(functools.partial(product, backend=backend), product_operands(), ROWS)
    assert [opcode for opcode, _ in sent] == ["all-reduce"] * 2
    assert sorted(np.prod(dims) for _, dims in sent) == [G * F, G * D * F]


@pytest.mark.parametrize("w", [P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")], ids=["experts", "rows", "columns"])
def test_weights_over_the_tokens_axis(w):
    """They are gathered once, and their gradient is added once, to where it is wanted."""
    sent = check(product, product_operands(), ROWS | {"w": w})
    assert count(sent, "all-gather") == 1
    assert count(sent, "all-gather", size=M * D) == count(sent, "all-to-all", "collective-permute") == 0
    assert count(sent, "all-reduce", "reduce-scatter", size=G * D * F // 2) <= 2  # over one axis, then the other


def test_columns_and_contraction():
    """Tensor parallelism: columns are split, or the contraction is, whose products are added."""
    rows = {"x": P("data")}
    columns = check(product, product_operands(), rows | {"w": P(None, None, "fsdp"), "bias": P(None, "fsdp")})
    assert not count(columns, "all-gather", size=M * F // 4)
    contraction = check(product, product_operands(), {"x": P("data", "fsdp"), "w": P(None, "fsdp")})
    assert not count(contraction, "all-gather", size=M * F // 4)
    assert count(contraction, "all-reduce", size=M // 2 * F) == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_not_more_than_ragged_dot(axis):
    """Of arrays as large as the weights or the tokens, beside `jax.lax.ragged_dot`."""
    sizes, totals = jnp.diff(put(OFFSETS)), {}
    places = ROWS | {"w": P(*[None] * axis, "fsdp")}
    for module in (jaxops, jax.lax):
        op = lambda a, module=module: module.ragged_dot(a["x"], a["w"], sizes)
        sent = results(op, draw(x=(M, D), w=(G, D, F)), places)[2]
        totals[module] = count(sent, *OPCODES, size=G * D * F // 2)
    assert totals[jaxops] <= totals[jax.lax]


def adaln(a: dict[str, jax.Array], offsets, **how) -> jax.Array:
    return jaxops.adaln(a["x"], a["scale"], a["shift"], offsets, weight=a["weight"], **how)


def gated(a: dict[str, jax.Array], offsets, **how) -> tuple[jax.Array, jax.Array]:
    return jaxops.gated_residual_adaln(a["x"], a["h"], a["gate"], a["scale"], a["shift"], offsets, **how)


@pytest.mark.parametrize(
    ("op", "per", "backend"),
    [(adaln, "sequence", "xla"), (adaln, "sequence", "pallas"), (gated, "sequence", "pallas"), (gated, "row", "xla")],
)
def test_rows_of_adaln(op, per, backend):
    rows = M if per == "row" else G
    operands = draw(x=(M, D), scale=(rows, D), shift=(rows, D))
    operands |= draw(h=(M, D), gate=(rows, D)) if op is gated else draw(weight=(D,))
    modulations = [name for name in ("gate", "scale", "shift") if name in operands]
    places = ROWS | (dict.fromkeys(modulations, BOTH) if per == "row" else {})
    sent = check(functools.partial(op, offsets=put(OFFSETS), per=per, backend=backend), operands, places)
    summed = ("weight" in operands) + (per == "sequence") * len(modulations)
    assert [opcode for opcode, _ in sent] == ["all-reduce"] * summed


def layer(a: dict[str, jax.Array], **how) -> jax.Array:
    return jaxops.moe_mlp(a["x"], a["gate"], a["up"], a["down"], jaxops.route(a["logits"], 2, capacity=600), **how)


def layer_operands() -> dict[str, jax.Array]:
    return draw(x=(M, D), logits=(M, G), gate=(G, D, F), up=(G, D, F), down=(G, F, D))


@pytest.mark.parametrize(
    ("save", "backend"), [("preactivations", "xla"), ("nothing", "xla"), ("preactivations", "pallas")]
)
def test_tokens_of_a_layer(save, backend):
    """Each device runs the experts over its own tokens, in an order of its own."""
    sent = check(functools.partial(layer, save=save, backend=backend), layer_operands(), ROWS)
    assert not count(sent, "all-gather", "all-to-all", "collective-permute", size=M * D // 2)
    assert sorted(dims for opcode, dims in sent if len(dims) == 3) == [(G, D, F), (G, D, F), (G, F, D)]


@pytest.mark.parametrize("form", ["biases", "joined", "alone"])
def test_other_forms_of_a_layer(form):
    """Biases are added once, also where the hidden columns are split."""
    operands, places = layer_operands(), ROWS | {"up": P(None, None, "fsdp"), "down": P(None, "fsdp")}
    up_only = {name: x for name, x in operands.items() if name != "gate"}
    if form == "alone":
        op = lambda a: jaxops.moe_mlp(a["x"], None, a["up"], a["down"], jaxops.route(a["logits"], 2))
    elif form == "joined":
        op = lambda a: jaxops.moe_mlp(a["x"], a["up"], None, a["down"], jaxops.route(a["logits"], 2))
        up_only |= draw(up=(G, D, 2 * F))
    else:
        up_only, names = operands | draw(b_gate=(G, F), b_up=(G, F), b_down=(G, D)), ("b_gate", "b_up", "b_down")
        op = lambda a: layer(a, biases=tuple(a[name] for name in names))
    check(op, up_only, places)
    check(op, up_only, places | {"x": P("data"), "logits": P("data")})


def test_a_layer_whose_weights_are_split():
    weights = ("gate", "up", "down")
    sent = check(layer, layer_operands(), ROWS | dict.fromkeys(weights, P(None, "fsdp")))
    assert [len(dims) for opcode, dims in sent if opcode == "all-gather"].count(3) == 3
    assert count(sent, "reduce-scatter") == 3
    tensor = {"x": P("data"), "logits": P("data"), "gate": P(None, None, "fsdp"), "up": P(None, None, "fsdp")}
    sent = check(layer, layer_operands(), tensor | {"down": P(None, "fsdp")})
    assert not [dims for opcode, dims in sent if opcode == "all-gather" and len(dims) == 3]


def test_a_gated_unit():
    op = lambda a: jaxops.grouped_glu(a["x"], a["gate"], a["up"], put(OFFSETS), backend="pallas")
    operands = {name: x for name, x in layer_operands().items() if name in ("x", "gate", "up")}
    assert Counter(check(op, operands, ROWS)) == {("all-reduce", (G, D, F)): 2}


def test_within_other_transformations():
    """scan, checkpoint, and vmap of the backward alone, whose forward has saved nothing."""
    operands, mesh = draw(x=(64, D), logits=(64, G), gate=(2, G, D, F), up=(2, G, D, F), down=(2, G, F, D)), mesh_of()

    def loss(a, x):
        weights = {name: a[name] for name in ("gate", "up", "down")}
        block = jax.checkpoint(lambda x, w: (x + layer(w | {"x": x, "logits": a["logits"]}), None))
        return jnp.mean(jax.lax.scan(block, x, weights)[0] ** 2, axis=0)[:3]

    f = jax.jit(jax.jacrev(loss, argnums=1))
    x = jax.device_put(operands["x"], NamedSharding(mesh, BOTH))
    assert_close(f(operands, x), f(operands, operands["x"]), "float32", scale=2)
    one = {name: x[0] if x.ndim == 4 else x for name, x in operands.items()}
    f = jax.jit(jax.jacrev(lambda x: layer(one | {"x": x})[:2].ravel()[:5]))
    assert_close(f(x), f(operands["x"]), "float32", scale=2)


def test_second_derivatives():
    f = jax.jit(lambda a: jax.grad(lambda a: jnp.sum(jax.grad(lambda a: jnp.sum(layer(a) ** 2))(a)["x"]))(a))
    operands = layer_operands()
    x = jax.device_put(operands["x"], NamedSharding(mesh_of(), BOTH))
    for got, want in zip(*map(jax.tree.leaves, (f(operands | {"x": x}), f(operands))), strict=True):
        assert_close(got, want, "float32", scale=5)


def test_an_exported_program():
    """Whoever runs it has no rule of this process: XLA splits it as it can."""
    operands, placed = layer_operands(), NamedSharding(mesh_of(), BOTH)
    f = lambda x: layer(operands | {"x": x})
    exported = jax.export.export(jax.jit(f, in_shardings=placed))(operands["x"])
    assert exported.nr_devices == 4
    got = jax.jit(exported.call)(jax.device_put(operands["x"], placed))
    assert_close(got, jax.jit(f)(operands["x"]), "float32", scale=2)


@pytest.mark.parametrize("op", [product, layer])
def test_one_device_pays_nothing(op, monkeypatch):
    """Its compiled program has the same operations where JAX has several devices."""
    operands, found = product_operands() if op is product else layer_operands(), []
    for several in (lambda: False, partitioning.over_several_devices):
        monkeypatch.setattr(partitioning, "over_several_devices", several)
        jax.clear_caches()
        compiled = jax.jit(jax.grad(lambda a: jnp.nansum(op(a)))).lower(operands).compile()
        found.append(Counter(line.opcode for line in module_of(compiled.runtime_executable()).instructions.values()))
    assert found[0] == found[1]


def test_a_warning_for_the_rest():
    """An op whose kernel XLA cannot split says so once, where its rows are split."""
    operands = layer_operands()
    routing = jaxops.route(operands["logits"], 2)
    f = lambda x: jaxops.permute(x, routing, backend="pallas")
    x = jax.device_put(operands["x"], NamedSharding(mesh_of(), BOTH))
    with pytest.warns(RuntimeWarning, match=r"jaxops.permute: .* 'data' and 'fsdp', .* jax.shard_map"):
        assert_close(jax.jit(f)(x), jax.jit(f)(operands["x"]), "float32")
