"""The gradients of the rows in one pass over x and dy, and the sums over each sequence's rows, as a Pallas kernel lowered through Triton."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.adaln.plan import STATS, Arrays, Spec, Tiles
from jaxops.ops.adaln.rows_pallas import Chunks, Columns, activate, affine, find_tile, steps_of, tile_count, widen
from jaxops.ops.adaln.sums_pallas import finish_sums


def _bwd_kernel(*refs, names: tuple[str, ...], summed: tuple[str, ...], spec: Spec, tiles: Tiles):
    ref = dict(zip(names, refs, strict=True))
    T, D = ref["dx_in" if spec.norm is None else "x"].shape
    B = ref["offsets"].shape[0] - 1
    t = pl.program_id(0)
    tile = find_tile(ref["offsets"], t, T, tiles.rows)
    inside = (tile.sequence >= 0) & (tile.sequence < B)
    own = jnp.broadcast_to(jnp.clip(tile.sequence, 0, B - 1), (1, 1))
    columns = Columns(D, tiles.block)
    modulation = [name for name in ("gate", "scale") if name in ref]
    of_tile = {} if spec.per_row else {name: widen(columns.load(ref[name], own)) for name in modulation}
    weight, bias = (widen(columns.load_vector(ref[name])) if name in ref else None for name in ("weight", "bias"))

    def load(rows, rows_in):
        # Nothing of an outside row is read but the cotangent that it passes on: x, dy and h are zero there, and so is every term.
        found = {name: columns.load(ref[name], rows, rows_in & inside) for name in ("x", "dy", "h") if name in ref}
        passed = ("dx_in", *(modulation if spec.per_row else ()))
        return found | {name: columns.load(ref[name], rows, rows_in) for name in passed if name in ref}

    def body(rows, rows_in, loaded, sums):
        m = of_tile | {name: widen(chunks) for name, chunks in loaded.items()}
        terms: dict[str, Chunks] = {}
        dx = m.get("dx_in", [])
        if spec.norm is not None:
            saved = {
                name: plgpu.load(ref[name].at[rows], mask=rows_in & inside, other=0.0)
                for name in STATS[spec.norm]
                if name in ref
            }
            n, stats = columns.normalise(m["x"], spec, saved or None, rows_in & inside)
            dy = m["dy"]
            activated = [activate(u, spec.activation) for u in affine(n, weight, bias)]
            terms["shift"] = dy
            terms["scale"] = [d * a for d, (a, _) in zip(dy, activated, strict=True)]
            du = [d * (1 + scale) for d, scale in zip(dy, m["scale"], strict=True)]
            du = [d if slope is None else d * slope for d, (_, slope) in zip(du, activated, strict=True)]
            terms["weight"] = [d * a for d, a in zip(du, n, strict=True)]
            terms["bias"] = du
            dn = du if weight is None else [d * w for d, w in zip(du, weight, strict=True)]
            along = columns.mean([d * a for d, a in zip(dn, n, strict=True)])
            back = [d - a * along for d, a in zip(dn, n, strict=True)]
            if spec.norm == "layer":
                mean = columns.mean(dn)
                back = [d - mean for d in back]
            # 0 times a NaN in the modulation of an outside row (or of the last sequence, which stands in for it) is no zero.
            back = [jnp.where(inside, d * stats["rstd"], 0.0) for d in back]
            dx = [jnp.where(inside, d + p, p) for d, p in zip(back, dx, strict=True)] if dx else back
            columns.store(ref["dx"], rows, rows_in, dx)
        if "gate" in ref:
            dx = [jnp.where(inside, d, 0.0) for d in dx]
            terms["gate"] = [d * b for d, b in zip(dx, m["h"], strict=True)]
            columns.store(
                ref["dh"], rows, rows_in, [jnp.where(inside, d * g, 0.0) for d, g in zip(dx, m["gate"], strict=True)]
            )
        if spec.per_row:
            for name in ("gate", "scale", "shift"):
                if f"d{name}" in ref:
                    columns.store(ref[f"d{name}"], rows, rows_in, terms[name])
        return [
            [s + term for s, term in zip(chunks, terms[name], strict=True)]
            for name, chunks in zip(summed, sums, strict=True)
        ]

    zeros = [[jnp.zeros((tiles.step, tiles.block), jnp.float32) for _ in columns] for _ in summed]
    sums = steps_of(tile, tiles, load, body, zeros)
    if summed:
        whole = (tile.start == tile.lo) & (tile.end == tile.hi) & inside
        for name, chunks in zip(summed, sums, strict=True):
            value = [jnp.sum(chunk, axis=0, keepdims=True) for chunk in chunks]
            # A sequence of one tile is done; a longer one's parts are added up in order by a second kernel.
            columns.store(ref[f"d{name}"], own, jnp.broadcast_to(whole, (1, 1)), value)
            columns.store(
                ref[f"parts_{name}"],
                jnp.broadcast_to(t, (1, 1)),
                jnp.broadcast_to(jnp.logical_not(whole), (1, 1)),
                value,
            )
        starts = ref["sequences"].shape[0]
        at, in_starts = (jnp.broadcast_to(value, (1,)) for value in (jnp.minimum(t, starts - 1), t < starts))
        plgpu.store(ref["sequences"].at[at], jnp.broadcast_to(tile.sequence, (1,)), mask=in_starts)


@traced_once("spec", "tiles", "interpret")
def backward_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, dx_in, dy, stats: dict[str, jax.Array], *, interpret: bool
) -> dict[str, jax.Array]:
    """Gradients by name, as far as there are such inputs: x, h, gate, scale, shift, weight, bias. No size is 0.

    Args:
      arrays: the forward's, with x as it was normalised: the new residual, where there is a gate. Without norm x is not read.
      dx_in: [T, D], the cotangent of the new residual; None without gate.
      dy: [T, D]; None without norm.
      stats: {"mean": [T], "rstd": [T]} of the forward ("rms" has no mean), or {}: found again from x.
    """
    x, offsets = arrays.x, arrays.offsets
    (T, D), B = x.shape, offsets.shape[0] - 1
    modulation = {name: value for name in ("gate", "scale", "shift") if (value := getattr(arrays, name)) is not None}
    affines = {name: value for name in ("weight", "bias") if (value := getattr(arrays, name)) is not None}
    sums = ({} if spec.per_row else {name: value.dtype for name, value in modulation.items()}) | dict.fromkeys(
        affines, jnp.dtype("float32")
    )

    given = arrays._asdict() | {"dy": dy, "dx_in": dx_in} | stats
    unread = {"shift"} | ({"x"} if spec.norm is None else set())
    operands = {name: value for name, value in given.items() if value is not None and name not in unread}
    count = tile_count(T, B, tiles.rows)
    outs = {"dx": ((T, D), x.dtype)} if spec.norm is not None else {}
    outs |= {"dh": ((T, D), arrays.h.dtype)} if arrays.h is not None else {}
    outs |= {f"d{name}": ((T, D), value.dtype) for name, value in modulation.items()} if spec.per_row else {}
    outs |= {f"d{name}": ((B, D), dtype) for name, dtype in sums.items()}
    outs |= {f"parts_{name}": ((count, D), jnp.dtype("float32")) for name in sums}
    outs |= (
        {"sequences": ((pl.cdiv(T, tiles.rows),), jnp.dtype("int32"))} if sums else {}
    )  # of each multiple of tiles.rows
    found = launch(
        functools.partial(_bwd_kernel, names=(*operands, *outs), summed=tuple(sums), spec=spec, tiles=tiles),
        *operands.values(),
        out=[out_struct(shape, dtype, like=x) for shape, dtype in outs.values()],
        grid=(count,),
        warps=tiles.warps,
        interpret=interpret,
        name="adaln_bwd" if spec.norm is not None else "gated_residual_bwd",
    )
    results = dict(zip(outs, found, strict=True))
    if sums:
        parts, done = ([results[f"{kind}{name}"] for name in sums] for kind in ("parts_", "d"))
        finished = finish_sums(offsets, results["sequences"], parts, done, T=T, rows=tiles.rows, interpret=interpret)
        results |= {f"d{name}": value for name, value in zip(sums, finished, strict=True)}
    gradients = {name: results[f"d{name}"] for name in ("x", "h", *modulation) if f"d{name}" in results}
    return gradients | {
        name: jnp.sum(results[f"d{name}"], axis=0).astype(value.dtype) for name, value in affines.items()
    }
