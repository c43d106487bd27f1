"""One training step over several devices: data, fully sharded, expert and tensor parallel, by one mesh of four axes.

The batch is split over the first three axes. The axes differ in what each device stores:

- `data`: a shard of each large parameter, of its optimizer state and of its average. A step all-gathers the parameters
  once, block by block and in the compute dtype, and sums each block's gradients to their shards beside the backward
  (ZeRO stage 1, Rajbhandari et al. 2019, arXiv:1910.02054; no device has all parameters in float32). A scan over layers
  gathers them as `fsdp` does.
- `fsdp`: the same, but a block's parameters are gathered where they are used, and under a `policy` again in the
  backward, so that one block's at most are whole (stage 3).
- `expert`: its own experts, and all else as over `data`. It gathers the tokens of all devices of the axis, runs its
  experts over them, and sends the results back to the tokens' devices, which add them.
- `tensor`: its own heads, hidden columns, experts and words of the vocabulary, and between the products its own rows of
  the same part of the batch (models/distributed/tensor_parallel.py).

XLA does not split a custom kernel: over sharded arrays it would gather all rows on each device. So the whole loss is in
`jax.shard_map` over all four axes, and each device's kernels see ordinary arrays: a part of the batch, and parameters
gathered by `gather`, whose transpose in JAX reduces the gradients. Gradient, accumulation, optimizer and the rest of a
step are outside, where XLA splits elementwise work itself: a step is written as for one device, except for
`split_objective` around its objective.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxops.parallel import gather_parts, sum_parts

Tree = TypeVar("Tree")
BATCH = ("data", "fsdp", "expert")  # the axes over which a batch is split
TENSOR = "tensor"
AXES = (*BATCH, TENSOR)
EXPERTS = ("expert", TENSOR)  # the axes over which experts are split

_COLUMNS = r"\b(attention/(q|k|v|kv)|mixer/qkv|mlp/(shared/)?(gate|up)|mlp/wide|modulation|head)"
_ROWS = r"\b(attention/out|mixer/out|mlp/(shared/)?down|mlp/narrow)"

# The first pattern that matches a parameter's path says how `expert` and `tensor` split its last axes, and along which
# of these, the best first, `SHARDS` may split it: XLA would transpose what it gathers along another than the leading
# one. Axes before these, such as layers, are not split, nor are arrays without a match: norms, most biases, histories,
# counts. The paths of an optimizer's moments and of the average end like their parameter's.
RULES = (
    (r"\bmoe/((text|image)/)?(gate|up|down)\b", P(EXPERTS, None, None), (0, 1)),  # [experts, in, out]
    (r"\bmoe/(gate|up|down)_bias\b", P(EXPERTS, None), ()),  # [experts, out]
    (rf"{_COLUMNS}/kernel\b", P(None, TENSOR), (0,)),  # [in, out]
    (rf"{_COLUMNS}/bias\b", P(TENSOR), ()),  # [out]
    (rf"{_ROWS}/kernel\b", P(TENSOR, None), (0,)),  # [in, out]
    (r"\bsinks\b", P(TENSOR), ()),  # [heads]
    (r"\bembed/embedding\b", P(TENSOR, None), (0, 1)),  # [vocab, width]
    (r"\b(embedding|enter/kernel)\b", P(None, None), (0, 1)),  # of labels or of an image's patch, any number
    (r"\bkernel\b", P(None, None), (0,)),  # [in, out]
)
SHARDS = ("fsdp", "data", "expert")  # the axes of a parameter's shards, where `expert` does not split experts
ONCE = ("data", "expert")  # those over which a step gathers once
_WIDE = re.compile(r"\brouter\b")  # split parameters that are float32 in the computation, too


def make_mesh(shape: str) -> Mesh:
    """From an option such as "data=2,fsdp=4" the mesh over all devices of all processes; other axes have size 1.

    Raises:
      typer.BadParameter: an unknown or repeated axis, an invalid number, or another number of devices than there are.
    """
    sizes, named = dict.fromkeys(AXES, 1), set()
    for part in shape.split(","):
        name, _, size = part.partition("=")
        if name in named:
            raise typer.BadParameter(f"{shape!r} names {name} twice.", param_hint="--mesh")
        named.add(name)
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise typer.BadParameter(
                f"{part!r} in {shape!r} is not one of {', '.join(f'{axis}=N' for axis in AXES)}, with N from 1.",
                param_hint="--mesh",
            )
        sizes[name] = int(size)
    wanted = math.prod(sizes.values())
    if wanted != jax.device_count():
        raise typer.BadParameter(
            f"{shape!r} is for {wanted} devices, and there are {jax.device_count()}: the axes' product must be that, "
            f"as in data={jax.device_count()}.",
            param_hint="--mesh",
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def name_of(path: tuple) -> str:
    """The name of an array by its path in a training state, such as "params/norm/scale/value"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parts_of(mesh: Mesh | None) -> int:
    """How many parts a batch has: one for all devices of an axis `tensor`. 1 for no mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a specification."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def split_of(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The sharding of an array of a training state, by its path: of all its axes.

    Of `SHARDS` the last ones are left out where they divide no axis that they may split; `fsdp` must.
    """
    _, split, places = next((rule for rule in RULES if re.search(rule[0], name_of(path))), ("", P(), ()))
    entries = [_axes(entry) for entry in split]
    shards = [axis for axis in SHARDS if axis not in sum(entries, ())]
    first, sizes = len(shape) - len(entries), mesh.shape
    for count in range(len(shards), 0, -1):
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            axes = (*entries[place], *shards[:count])
            if shape[first + place] % math.prod(sizes[axis] for axis in axes) == 0 or count == left == 1:
                entries[place] = axes
                return P(*[None] * first, *entries)
    return P(*[None] * first, *entries)


def shardings(state: Tree, mesh: Mesh) -> Tree:
    """A `NamedSharding` for each array (or shape) of a training state."""

    def sharding(path: tuple, x: Any) -> NamedSharding:
        split = split_of(path, x.shape, mesh)
        for number, entry in enumerate(split):
            axes = [axis for axis in _axes(entry) if mesh.shape[axis] > 1]
            if x.shape[number] % math.prod(mesh.shape[axis] for axis in axes):
                sizes = " times ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
                raise typer.BadParameter(
                    f"{sizes} does not divide axis {number} of {name_of(path)} {list(x.shape)}: "
                    f"write a number that divides {x.shape[number]}.",
                    param_hint="--mesh",
                )
        # In XLA's form of a step's result shardings: otherwise the second step, which gets the first one's results,
        # would compile again.
        used = [_used(axis, mesh) for axis in split]
        while used and used[-1] is None:
            used.pop()
        return NamedSharding(mesh, P(*used))

    return jax.tree.map_with_path(sharding, state)


def _used(axis: Any, mesh: Mesh) -> Any:
    """An axis' entry of a specification without mesh axes of one device."""
    names = [name for name in _axes(axis) if mesh.shape[name] > 1]
    return tuple(names) if len(names) > 1 else next(iter(names), None)


def constrained(state: Tree, mesh: Mesh | None) -> Tree:
    """Inside a step: its new state, sharded as `shardings` says and not as XLA would choose. None for no mesh."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, shardings(state, mesh))


def create_sharded(
    create: Callable[..., tuple[Any, Tree]], mesh: Mesh | None, *donated: Any
) -> tuple[Any, Tree, Callable[[], Tree]]:
    """create(*donated)'s graphdef, the shapes of its training state, and a function that makes the state in one
    program, sharded from the start: no device ever holds all of it.

    Without a mesh the state is committed to the first device, as one is that a checkpoint was read into: both take the
    same programs.
    """
    graphdef, shapes = jax.eval_shape(create, *donated)
    alone = SingleDeviceSharding(jax.devices()[0])
    split = jax.tree.map(lambda _: alone, shapes) if mesh is None else shardings(shapes, mesh)
    program = jax.jit(create, out_shardings=(graphdef, split), donate_argnums=tuple(range(len(donated))))
    shapes = jax.tree.map(lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of), shapes, split)
    return graphdef, shapes, lambda: program(*donated)[1]


def shard_state(state: Tree, mesh: Mesh | None) -> Tree:
    """Shards an existing training state, or a part of one. All processes pass the same. None for no mesh."""
    return state if mesh is None else jax.tree.map(_put, state, shardings(state, mesh))


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Arrays replicated on each device, such as the key of a step. All processes pass the same. None for no mesh."""
    return tree if mesh is None else jax.tree.map(lambda x: _put(x, NamedSharding(mesh, P())), tree)


def collect(tree: Tree, mesh: Mesh | None) -> Tree:
    """The whole arrays on one device of each process, after a training. All processes call it; None for no mesh.

    Arrays that take more than half of a device's memory are numpy arrays in each host's memory.
    """
    if mesh is None:
        return tree
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    if 2 * sum(x.nbytes for x in jax.tree.leaves(tree)) <= device_bytes():
        return jax.tree.map(lambda x: x.addressable_data(0), whole(tree))
    return jax.tree.map(lambda x: np.asarray(x if x.is_fully_addressable else whole(x).addressable_data(0)), tree)


def device_bytes() -> float:
    """Memory of a device of this process; of a CPU without a limit."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Through the host: `jax.device_put` cannot give this process's arrays to another one's devices."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def rows_of_process(batch: int, mesh: Mesh) -> slice:
    """The rows of a batch that this process makes for `shard_batch`: those of its devices.

    Raises:
      typer.BadParameter: a batch that cannot be split evenly over the axes `BATCH`.
    """
    parts = parts_of(mesh)
    if batch % parts:
        raise typer.BadParameter(
            f"a batch of {batch} cannot be split evenly over the {parts} {'devices' if parts == mesh.size else 'parts'}"
            f" of the mesh: take a multiple of {parts}.",
            param_hint="--mesh",
        )
    owned = NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((batch,)).values()
    bounds = [index[0].indices(batch) for index in owned if index]
    return slice(min(first for first, _, _ in bounds), max(end for _, end, _ in bounds))


def shard_batch(rows: Tree, mesh: Mesh, axis: int = 0) -> Tree:
    """The whole batch, split along `axis` over `BATCH`, from the numpy arrays of each process's `rows_of_process`."""
    split = NamedSharding(mesh, P(*[None] * axis, BATCH))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(split, x), rows)


@dataclasses.dataclass(frozen=True)
class Splits:
    """How the parameters of a model are split over a mesh: a part of the model's graphdef."""

    named: tuple[tuple[str, P], ...]  # each parameter's name in the model, and its specification

    @staticmethod
    def of(params: Any, mesh: Mesh) -> "Splits":
        """Of whole parameters, or their shapes."""
        found = jax.tree.leaves_with_path(params)
        return Splits(tuple((name_of(path), split_of(path, x.shape, mesh)) for path, x in found))


def over(model: Any, mesh: Mesh) -> nnx.GraphDef:
    """The graphdef of a model, or of its shapes, as `split_objective` calls it over a mesh."""
    model.splits = Splits.of(nnx.state(model, nnx.Param), mesh)
    return nnx.split(model)[0]


def gather(
    params: Tree, splits: Splits, within: str = "", *, dtype: Any = jnp.float32, sums: Any = jnp.float32,
    axes: tuple[str, ...] = SHARDS,
) -> Tree:  # fmt: skip
    """Inside `split_objective`: from a device's parts of the parameters to those it computes with.

    Shards are all-gathered; parts along `tensor`, and of experts along `expert`, stay split. The transpose sums the
    devices' gradients as soon as the backward has computed them: so call it block by block.

    Args:
      params: of the model, or those of a part of it, such as one layer of a stack.
      within: the name of that part in the model.
      dtype: of the computation. Large parameters are gathered in it, except those of routers.
      sums: dtype in which the gradients of large parameters are summed over devices; dtype if that is wider. Below
        float32 the parameters are rounded to it, too.
      axes: of `SHARDS`: all, or first `ONCE` and then the others.
    """
    sums, named = jnp.promote_types(sums, dtype), dict(splits.named)

    def whole(path: tuple, x: jax.Array) -> jax.Array:
        name = name_of(path)
        split = [_axes(entry) for entry in named[f"{within}/{name}" if within else name]]
        split = split[len(split) - x.ndim :] if split else []  # a layer lacks the stack's leading axis
        own = sum(split, ())
        # Not the biases that only `tensor` splits.
        large = any(axis in own for axis in BATCH) and _WIDE.search(name) is None
        if "data" in axes:
            x = lax.pcast(x.astype(sums) if large else x, tuple(axis for axis in AXES if axis not in own), to="varying")
        to, place = dtype if large else x.dtype, next((i for i, entry in enumerate(split) if "fsdp" in entry), None)
        if place is None:
            return x
        shards = [axis for axis in split[place][split[place].index("fsdp") :] if lax.axis_size(axis) > 1]
        once, again = (tuple(axis for axis in shards if (axis in ONCE) == now) for now in (True, False))
        if once and "data" in axes:
            x = _all_gather(x, once, place, to, x.dtype if again else to)
        return _all_gather(x, again, place, to, to) if again and "fsdp" in axes else x

    return jax.tree.map_with_path(whole, params)


def _all_gather(x: jax.Array, over: tuple[str, ...], axis: int, dtype: Any, out_dtype: Any) -> jax.Array:
    """Sent in dtype; the devices' gradients are sent in out_dtype and summed in x's dtype."""

    @jax.custom_vjp
    def gathered(x: jax.Array) -> jax.Array:
        return gather_parts(x.astype(dtype), over, axis).astype(out_dtype)

    gathered.defvjp(lambda x: (gathered(x), None), lambda _, d: (sum_parts(d, over, axis, dtype=x.dtype),))
    return gathered(x)


def whole_part(model: Any, name: str) -> Any:
    """The model's part of this name, with `gather`ed parameters; without a mesh as it is.

    Its other variables are the model's own: what a call writes to them, such as a history of FP8, the model has.
    """
    part, c = getattr(model, name), model.config
    if model.splits is None:
        return part
    graphdef, params, others = nnx.split(part, nnx.Param, ...)
    return nnx.merge(graphdef, gather(params, model.splits, name, dtype=c.dtype, sums=c.sums), others)


def whole_layers(model: Any, *names: str) -> list[Callable[..., Any]] | None:
    """For `models.layers.apply_layers`, of each stack of layers: `gather` of a layer's parameters, with `axes`."""
    splits, c = model.splits, model.config
    if splits is None:
        return None
    return [functools.partial(gather, splits=splits, within=name, dtype=c.dtype, sums=c.sums) for name in names]


Objective = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, Any]]]


def split_objective(
    objective: Objective, mesh: Mesh, *, counted: Callable[[Any], jax.Array] | None = None
) -> Objective:
    """An objective over all devices, from one over a device's part of the batch; called and differentiated like it.

    Args:
      objective: (params, histories, batch, key) -> (loss, (measured, histories)). params are a device's shards, for
        `gather`; batch has its part of the arrays' first axes; key differs by part of the batch. The devices of an axis
        `tensor` have the same batch and key, and give the same loss and measured. Histories hold maxima: the largest
        over the devices is kept.
      counted: how many rows or tokens of a part of a batch its loss and measured are means over, as weights; None if
        all devices have the same number.
    """

    def part(params: Any, histories: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Any, Any]]:
        own_key = jax.random.fold_in(key, lax.axis_index(BATCH))
        loss, (measured, histories) = objective(params, histories, batch, own_key)
        count = jnp.asarray(1 if counted is None else counted(batch), jnp.float32)
        share = varying(count / jnp.maximum(lax.psum(count, BATCH), 1)) / lax.axis_size(TENSOR)
        loss, measured = lax.psum(jax.tree.map(lambda x: share * x, (loss, measured)), AXES)
        return loss, (measured, lax.pmax(jax.tree.map(varying, lax.stop_gradient(histories)), AXES))

    def whole(params: Any, histories: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Any, Any]]:
        splits = jax.tree.map_with_path(lambda path, x: split_of(path, x.shape, mesh), params)
        specs = (splits, P(), P(BATCH), P())
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(params, histories, batch, key)

    return whole


def varying(x: jax.Array) -> jax.Array:
    """x, marked as varying over all axes."""
    known = jax.typeof(x).manual_axis_type
    missing = tuple(axis for axis in AXES if known is None or axis not in known.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def micro_batches(accumulate: int, mesh: Mesh | None) -> int:
    """Packed batches of a step: over a mesh one for each part of the batch."""
    return accumulate * parts_of(mesh)


def check_shares(sizes: dict[str, int], by_rows: tuple[str, ...], accumulate: int, mesh: Mesh | None) -> None:
    """Checks whether all micro-batches of a step get the same share of its sizes, and the devices of the axis `tensor`
    of those that `by_rows` names, too."""
    parts, tensor = micro_batches(accumulate, mesh), 1 if mesh is None else mesh.shape[TENSOR]
    uneven = [name for name in sizes if sizes[name] % (parts * tensor if name in by_rows else parts)]
    if wrong := ", ".join(f"{name} is {sizes[name]}" for name in uneven):
        split = f", each over tensor={tensor}," if tensor > 1 else ""
        raise ValueError(f"{wrong}; with {parts} micro-batches and devices{split} write multiples of {parts * tensor}.")


def by_device(batch: Tree, mesh: Mesh | None) -> Tree:
    """Packed batches [N * parts, ...] -> [N, parts, ...], over a mesh."""
    return batch if mesh is None else jax.tree.map(lambda x: x.reshape(-1, parts_of(mesh), *x.shape[1:]), batch)


def of_own_batch(
    objective: Callable[[Any, Any, jax.Array], Any], mesh: Mesh | None
) -> Callable[[Any, Any, jax.Array], Any]:
    """An objective of (model, packed batch, key); over a mesh of a device's own batch [1, ...], for `by_device`."""

    def own(model: nnx.Module, batch: Any, key: jax.Array) -> Any:
        return objective(model, jax.tree.map(lambda x: x[0], batch), key)

    return objective if mesh is None else own
