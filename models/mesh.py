"""One training step over several devices: data, fully sharded, expert and tensor parallel, by one mesh of four axes.

The batch is split over the first three axes. The axes differ in what each device stores:

- `data`: all parameters, and a shard of the optimizer's state and of the averaged weights (ZeRO stage 1, Rajbhandari et
  al. 2019, arXiv:1910.02054). Gradients are summed block by block beside the backward, and after the update the new
  parameters are all-gathered.
- `fsdp`: a shard of each large parameter and of its optimizer state. A block's parameters are all-gathered where they
  are used, in the compute dtype, and its gradients reduce-scattered.
- `expert`: its own experts. It gathers the tokens of all devices of the axis, runs its experts over them, and
  reduce-scatters the sums to the tokens' devices.
- `tensor`: its own heads, hidden columns, experts and words of the vocabulary, and between the products its own rows of
  the same part of the batch (models/tensor_parallel.py).

XLA does not split a custom kernel: over sharded arrays it would gather all rows on each device. So the whole loss is in
`jax.shard_map` over all four axes, and each device's kernels see ordinary arrays: a part of the batch, and parameters
gathered by `gather`, whose transpose in JAX reduces the gradients. Gradient, accumulation, optimizer and the rest of a
step are outside, where XLA splits elementwise work itself: a step is written as for one device, except for
`split_objective` around its objective.
"""

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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = TypeVar("Tree")
BATCH = ("data", "fsdp", "expert")  # the axes over which a batch is split
TENSOR = "tensor"
AXES = (*BATCH, TENSOR)
EXPERTS = ("expert", TENSOR)  # the axes over which experts are split

_COLUMNS = r"\b(attention/(q|k|v|kv)|mixer/qkv|mlp/(shared/)?(gate|up)|mlp/wide|modulation|head)"
_ROWS = r"\b(attention/out|mixer/out|mlp/(shared/)?down|mlp/narrow)"

# The first pattern that matches a parameter's path gives the split of its last axes. Leading axes, such as layers, are
# not split, nor are arrays without a match: norms, most biases, histories, counts. The paths of an optimizer's moments
# and of the average end like their parameter's. `fsdp` splits the leading axis where it can: XLA would transpose what
# it gathers along another one.
RULES = (
    (r"\bmoe/((text|image)/)?(gate|up|down)\b", P(EXPERTS, "fsdp", None)),  # [experts, in, out]
    (r"\bmlp/bias/(gate|up|down)\b", P(EXPERTS, None)),  # [experts, out]
    (rf"{_COLUMNS}/kernel\b", P("fsdp", TENSOR)),  # [in, out]
    (rf"{_COLUMNS}/bias\b", P(TENSOR)),  # [out]
    (rf"{_ROWS}/kernel\b", P((TENSOR, "fsdp"), None)),  # [in, out]
    (r"\bsinks\b", P(TENSOR)),  # [heads]
    (r"\bembed/embedding\b", P(TENSOR, "fsdp")),  # [vocab, width]
    (
        r"\b(embedding|enter/kernel)\b",
        P(None, "fsdp"),
    ),  # of tokens, labels or an image's patch: of these there may be any number, so by the width
    (r"\bkernel\b", P("fsdp", None)),  # [in, out]
)
_WIDE = re.compile(r"\brouter\b")  # split parameters that are float32 in the computation, too
_UPDATED = re.compile(r"^(opt_state|average)\b")  # parts of a training state that only the update reads


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


def split_of(path: tuple, rank: int) -> P:
    """The sharding of an array of a training state, by its path."""
    split = next((split for pattern, split in RULES if re.search(pattern, name_of(path))), P())
    return P(*[None] * (rank - len(split)), *split)


def _over_data(path: tuple, shape: tuple[int, ...], split: P, mesh: Mesh) -> P:
    """With the axis `data` too, for what only the update reads, where it divides the leading axis (layers, if there are
    any). XLA would transpose arrays that it gathers along another axis.
    """
    if not any(split) or not _UPDATED.search(name_of(path)):
        return split
    axes = _axes(split[0])
    divides = shape[0] % math.prod(mesh.shape[axis] for axis in (*axes, "data")) == 0
    return P((*axes, "data"), *split[1:]) if divides else split


def shardings(state: Tree, mesh: Mesh) -> Tree:
    """A `NamedSharding` for each array (or shape) of a training state.

    Of the optimizer's state and the averaged weights, each device along `data` has a part, too.

    Raises:
      typer.BadParameter: an axis of the mesh does not divide the axis that it splits.
    """

    def sharding(path: tuple, x: Any) -> NamedSharding:
        split = split_of(path, x.ndim)
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
        used = [_used(axis, mesh) for axis in _over_data(path, x.shape, split, mesh)]
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


def create_sharded(create: Callable[[], tuple[Any, Tree]], mesh: Mesh | None) -> tuple[Any, Tree]:
    """create()'s graphdef and training state, with the state created sharded: no device ever holds all of it.

    Without a mesh, unsharded.
    """
    if mesh is None:
        return create()
    graphdef, shapes = jax.eval_shape(create)
    return graphdef, jax.jit(lambda: create()[1], out_shardings=shardings(shapes, mesh))()


def shard_state(state: Tree, mesh: Mesh | None) -> Tree:
    """Shards an existing training state, or a part of one. All processes pass the same. None for no mesh."""
    return state if mesh is None else jax.tree.map(_put, state, shardings(state, mesh))


def replicate(tree: Tree, mesh: Mesh | None) -> Tree:
    """Arrays replicated on each device, such as the key of a step. All processes pass the same. None for no mesh."""
    return tree if mesh is None else jax.tree.map(lambda x: _put(x, NamedSharding(mesh, P())), tree)


def collect(tree: Tree, mesh: Mesh | None) -> Tree:
    """The whole arrays on one device of each process, after a training. All processes call it; None for no mesh."""
    if mesh is None:
        return tree
    return jax.tree.map(
        lambda x: x.addressable_data(0), jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    )


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
    owned = _batch_split(mesh).addressable_devices_indices_map((batch,)).values()
    bounds = [index[0].indices(batch) for index in owned if index]
    return slice(min(first for first, _, _ in bounds), max(end for _, end, _ in bounds))


def _batch_split(mesh: Mesh, axis: int = 0) -> NamedSharding:
    return NamedSharding(mesh, P(*[None] * axis, BATCH))


def shard_batch(rows: Tree, mesh: Mesh, axis: int = 0) -> Tree:
    """The whole batch, split along `axis` over `BATCH`, from the numpy arrays of each process's `rows_of_process`."""
    split = _batch_split(mesh, axis)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(split, x), rows)


def gather(params: Tree, dtype: Any = jnp.float32, sums: Any = jnp.float32) -> Tree:
    """Inside `split_objective`: from a device's parts of the parameters to those it computes with.

    Shards along `fsdp` are all-gathered; those along `expert` and `tensor` stay split. The transpose sums the devices'
    gradients as soon as the backward has computed them: so call it block by block. With a `policy` a block's parameters
    are gathered again in the backward, so that one block's at most are whole; without it all gathered blocks are kept
    until the backward.

    Args:
      dtype: of the computation. Large parameters are gathered in it, except those of routers.
      sums: dtype in which the gradients of large parameters are summed over devices; dtype if that is wider. Below
        float32 the parameters are rounded to it, too.
    """
    sums = jnp.promote_types(sums, dtype)

    def whole(path: tuple, x: jax.Array) -> jax.Array:
        split = [_axes(entry) for entry in split_of(path, x.ndim)]
        own = sum(split, ())
        # Not the biases that only `tensor` splits.
        large = any(axis in own for axis in BATCH) and _WIDE.search(name_of(path)) is None
        x = lax.pcast(x.astype(sums) if large else x, tuple(axis for axis in AXES if axis not in own), to="varying")
        gathered = [number for number, axes in enumerate(split) if "fsdp" in axes]
        return _all_gather(x, gathered[0], dtype if large else x.dtype) if gathered else x

    return jax.tree.map_with_path(whole, params)


def gathered(model: nnx.Module, name: str, dtype: Any, sums: Any) -> Any:
    """The model's part of this name, with `gather`ed parameters: `RULES` look at names from the model on.

    Its other variables are the model's own: what a call writes to them, such as a history of FP8, the model has.
    """
    graphdef, params, others = nnx.split(getattr(model, name), nnx.Param, ...)
    return nnx.merge(graphdef, gather({name: params}, dtype, sums)[name], others)


def _all_gather(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Along `fsdp`, in dtype; the devices' gradients are summed in x's dtype."""
    if lax.axis_size("fsdp") == 1:
        return x

    @jax.custom_vjp
    def gathered(x: jax.Array) -> jax.Array:
        return lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)

    def bwd(_: None, d: jax.Array) -> tuple[jax.Array]:
        return (lax.psum_scatter(d.astype(x.dtype), "fsdp", scatter_dimension=axis, tiled=True),)

    gathered.defvjp(lambda x: (gathered(x), None), bwd)
    return gathered(x)


Objective = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, Any]]]


def split_objective(
    objective: Objective, mesh: Mesh, *, counted: Callable[[Any], jax.Array] | None = None, check_vma: bool = True
) -> Objective:
    """An objective over all devices, from one over a device's part of the batch; called and differentiated like it.

    Args:
      objective: (params, histories, batch, key) -> (loss, (measured, histories)). params are a device's shards, for
        `gather`; batch has its part of the arrays' first axes; key differs by part of the batch. The devices of an axis
        `tensor` have the same batch and key, and give the same loss and measured. Histories hold maxima: the largest
        over the devices is kept.
      counted: how many rows or tokens of a part of a batch its loss and measured are means over, as weights; None if
        all devices have the same number.
      check_vma: as of `jax.shard_map`. Only Pallas' interpreter, on a CPU, needs False.
    """

    def part(params: Any, histories: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Any, Any]]:
        own_key = jax.random.fold_in(key, lax.axis_index(BATCH))
        loss, (measured, histories) = objective(params, histories, batch, own_key)
        count = jnp.asarray(1 if counted is None else counted(batch), jnp.float32)
        share = varying(count / jnp.maximum(lax.psum(count, BATCH), 1)) / lax.axis_size(TENSOR)
        loss, measured = lax.psum(jax.tree.map(lambda x: share * x, (loss, measured)), AXES)
        return loss, (measured, lax.pmax(jax.tree.map(varying, lax.stop_gradient(histories)), AXES))

    def whole(params: Any, histories: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Any, Any]]:
        splits = jax.tree.map_with_path(lambda path, x: split_of(path, x.ndim), params)
        specs = (splits, P(), P(BATCH), P())
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(
            params, histories, batch, key
        )

    return whole


def varying(x: jax.Array) -> jax.Array:
    """x, marked as varying over all axes."""
    known = jax.typeof(x).manual_axis_type
    missing = tuple(axis for axis in AXES if known is None or axis not in known.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def micro_batches(accumulate: int, mesh: Mesh | None) -> int:
    """Packed batches of a step: over a mesh one for each part of the batch."""
    return accumulate * parts_of(mesh)


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
