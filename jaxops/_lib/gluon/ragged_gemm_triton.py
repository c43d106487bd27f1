"""The kernel around the mainloop of gemm_triton.py, and its launch: one for every product over ragged groups on
Hopper."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.gluon.epilogue_triton import consume
from jaxops._lib.gluon.gemm_triton import BK, GATHER_WARPS, make_pipeline, produce
from jaxops._lib.gluon.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.gluon.layouts_triton import over_cluster
from jaxops._lib.gluon.schedule_triton import schedule_groups, schedule_parts, schedule_rows
from jaxops._lib.gluon.stores_triton import result_buffers, tile_layout
from jaxops._lib.gluon.tile_scheduler_triton import CONTRACTION, RING, ROWS, count_tiles, locate
from jaxops._lib.ragged.tiling import tile_bound
from jaxops._lib.ragged.work_list import least_rows_of_part

MOST_RESULTS = 4  # jax-triton takes results' pointers as parameters of their own, not in tuples


def _name(specialization) -> str:
    """What profilers show: the op's name for its epilogue."""
    return f"{specialization.constants['EPILOGUE'].__name__}_kernel"


@gluon.jit(repr=_name)
def ragged_gemm_kernel(
    a_descs, b_descs, gather, schedule, args, desc_0, desc_1, desc_2, desc_3, ptr_0, ptr_1, ptr_2, ptr_3,
    entries, sizes, places, widths, tiles, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    PANEL: gl.constexpr, SPLIT: gl.constexpr, KIND: gl.constexpr, TRANSPOSED: gl.constexpr,
    OPERANDS: gl.constexpr, BUFFERS: gl.constexpr, CUT: gl.constexpr, COUNT: gl.constexpr, LOCATE: gl.constexpr,
    PIECE: gl.constexpr, LOADED: gl.constexpr, ACCUMULATE: gl.constexpr, KINDS: gl.constexpr, EPILOGUE: gl.constexpr,
    VARIANT: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    GATHERED: gl.constexpr = gather is not None
    PAIRED: gl.constexpr = OPERANDS == "pairs"
    pipe = make_pipeline(b_descs[0].dtype, BM, BN, STAGES, KIND, TRANSPOSED, SPLIT, GATHERED)
    bufs = result_buffers(ptr_0, 2 * BUFFERS, desc_0.block_shape[1], desc_0.block_shape[2], ADDED=ACCUMULATE)
    # One of each value of the epilogue: a result in halves has two.
    descs = (desc_0, desc_1, desc_2, desc_3)
    ptrs = (ptr_0, ptr_1, ptr_2, ptr_3)
    if HALVES[0] == 0:
        descs = (desc_0, desc_0, desc_1, desc_2)
        ptrs = (ptr_0, ptr_0, ptr_1, ptr_2)
    elif HALVES[1] == 0:
        descs = (desc_0, desc_1, desc_1, desc_2)
        ptrs = (ptr_0, ptr_1, ptr_1, ptr_2)
    out = (descs, ptrs, bufs, widths, HALVES)
    work = (schedule, entries)
    # Registers of a thread: the producer has few, unless it computes addresses or chooses among pairs of operands.
    WARPS: gl.constexpr = GATHER_WARPS if GATHERED else 1
    CONSUMER: gl.constexpr = 208 if GATHERED else 216 if PAIRED else 224
    PRODUCER: gl.constexpr = 80 if GATHERED else 72 if PAIRED else 56
    gl.warp_specialize([
        (consume, (
            pipe, out, args, sizes, work, 0, PIECE, LOADED, ACCUMULATE, CUT, PAIRED, KINDS, EPILOGUE, VARIANT,
        )),
        (consume, (
            pipe, out, args, sizes, work, 1, PIECE, LOADED, ACCUMULATE, CUT, PAIRED, KINDS, EPILOGUE, VARIANT,
        )),
        (produce, (
            pipe, a_descs, b_descs, gather, work, sizes, places, tiles, COUNT, LOCATE, OPERANDS, PANEL,
            CUT,
        )),
    ], [4, WARPS], [CONSUMER, PRODUCER])  # fmt: skip
    if gl.num_ctas() > 1:
        gl.barrier(cluster=True)  # a program must not end while the other one still arrives at its mbarriers


def step_windows(x: jax.Array, columns: int, over: list[list[int]]) -> TensorDescriptor:
    """A TMA descriptor of x[rows, ...] as windows of a step's rows: [first row, row in the window, column].

    A window starts at each row. The box of a group's last rows starts before its window, where TMA fills in zeros, and
    ends with the group: it reads no row behind it. The last windows reach past the array; no box does.
    """
    (rows, width), block = x.shape, (1, BK.value, columns)
    return TensorDescriptor(x, (rows, BK.value, width), (width, width, 1), block, tile_layout(x.dtype, block, over))


@dataclasses.dataclass(frozen=True)
class Gemm:
    """What is static in a launch.

    Attributes:
      name: of the launch, for compiled programs' texts.
      epilogue: see epilogue_triton.py.
      bm, bn: rows and columns of a tile, as the two consumers multiply it.
      stages: of the pipeline.
      panel: tile rows of a panel, about: see `place_in_panel_of_group` and, of a contraction, `swizzle`.
      stored: rows and columns of a store.
      flops: see `jaxops._lib.planning.costs.Cost`.
      bytes_accessed: where each operand and each result once is not the least traffic: see `triton_call`.
      ping_pong: each consumer has a tile of its own, not half of one's rows.
      contraction: the groups divide the rows that are summed over (a weight gradient), not A's and C's rows.
      transposed: B is [G, N, K].
      programs: 2: a cluster computes a tile, and shares B. Not with ping_pong or gathered rows.
      operands: "one" product; the "sum" of two of equal shapes; "beside": A times two arrays of weights [G, K, N], or
        one [G, K, 2 N], whose columns (halves) lie beside each other in a tile; "pairs": a tile multiplies one of
        several pairs, which `order` chooses.
      order: functions as `count_tiles` and `locate`.
      buffers: for stores, a consumer.
      split: contraction with operands="one": the most parts of a sum over all rows, see `schedule_parts`.
      piece: rows and columns of a consumer's sums that the epilogue gets at a time; as `stored` by default.
      variant: a constant for the epilogue.
    """

    name: str
    epilogue: Any
    bm: int
    bn: int
    stages: int
    panel: int
    stored: tuple[int, int]
    _: dataclasses.KW_ONLY
    flops: int
    bytes_accessed: int | None = None
    ping_pong: bool = False
    contraction: bool = False
    transposed: bool = False
    programs: int = 1
    operands: Literal["one", "sum", "beside", "pairs"] = "one"
    order: tuple[Any, Any] = (count_tiles, locate)
    buffers: int = 1
    split: int = 1
    piece: tuple[int, int] | None = None
    variant: Any = None

    @property
    def part(self) -> int:
        """Rows of a tile that one consumer multiplies."""
        return self.bm if self.ping_pong else self.bm // 2

    def slots(self, rows: int) -> int:
        """The most parts of all sums over so many rows together; 1 if all sums are whole."""
        return max(1, rows // least_rows_of_part(rows, self.split)) if rows else 1

    def parts(self, sizes: tuple[int, int, int, int], like: jax.Array) -> list["Result"]:
        """The result that holds the parts of sums: a second one; empty where none is split."""
        _, M, rows, N = sizes
        slots, tile = self.slots(rows), self.bm * self.bn
        shape = (slots * -(-M // self.bm) * -(-N // self.bn) * tile,)
        return [] if slots == 1 else [Result(out_struct(shape, jnp.float32, like=like), tma=False)]

    def rows(self, x: jax.Array) -> TensorDescriptor:
        """A of [M, K]; CONTRACTION: of [rows, K]."""
        if self.contraction:
            return step_windows(x, self.part, over_cluster(self.programs, 0, 0, 1))
        block = (self.part, BK.value)
        layout = tile_layout(x.dtype, block, over_cluster(self.programs, 1, 0))
        return TensorDescriptor.from_array(x, block, layout=layout)

    def weights(self, w: jax.Array) -> TensorDescriptor:
        """B of [G, K, N], or [G, N, K]; CONTRACTION: of [rows, N]. Three dimensions: TMA fills zeros past K, not the
        next group's rows."""
        columns = self.bn // 2 if self.operands == "beside" else self.bn
        if self.contraction:
            return step_windows(w, columns, over_cluster(self.programs, 0, 0, 0))
        block = (1, columns, BK.value) if self.transposed else (1, BK.value, columns)
        layout = tile_layout(w.dtype, block, over_cluster(self.programs, 0, 0, 0))
        return TensorDescriptor.from_array(w, block, layout=layout)


def gemm_of(name: str, epilogue, tiles, **named) -> Gemm:
    """That of grouped_matmul's `Tiles`."""
    return Gemm(
        name, epilogue, tiles.bm, tiles.bn, tiles.stages, tiles.panel, (tiles.part, tiles.stored),
        programs=tiles.programs, ping_pong=tiles.ping_pong, **named,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a launch.

    Attributes:
      type: `out_struct`.
      before: an array that gives its memory and contents to the result; None: uninitialised memory.
      contents: what becomes of them: "kept" where the launch stores nothing; "added" to the products, in float32
        without an epilogue; "loaded" for the epilogue, tile by tile, before it overwrites them.
      tma: stored by TMA; else through its pointer only.
      halves: 2: the array has twice as many columns, for two values of the epilogue; of one of the first two results.
    """

    type: jax.ShapeDtypeStruct
    before: jax.Array | None = None
    contents: Literal["kept", "added", "loaded"] = "kept"
    tma: bool = True
    halves: int = 1


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Several pairs of operands in one launch.

    Attributes:
      places: numbers for `Gemm.order`.
      spans: of runs (`schedule_rows`); a contraction's: the first groups of all pairs but the first
        (`schedule_groups`).
      tiles: how many, at most.
      widths: of results, if each pair has its own.
    """

    places: tuple
    spans: tuple
    tiles: int
    widths: tuple[int, ...] | None = None


def ragged_gemm(
    gemm: Gemm, a: tuple, b: tuple, offsets: jax.Array, sizes: tuple[int, int, int, int], results: Sequence[Result], *,
    args: Sequence[tuple[str, Any]] = (), gather: tuple | None = None, pairs: Pairs | None = None, cores: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Launches a product.

    Args:
      gemm: what is static.
      a, b: descriptors, by `Gemm.rows` and `Gemm.weights`.
      offsets: [G + 1] int32.
      sizes: G, and M, K, N as the tile scheduler counts them: C is [M, N]; CONTRACTION: a group's C is [M, N], and K is
        how many rows the offsets count.
      results: up to four.
      args: the epilogue's operands and their kinds, see epilogue_triton.py.
      gather: A's rows as (array, int32 row indices, the array's number of rows), instead of a.
      pairs: with operands="pairs".
      cores: multiprocessors.
    """
    G, M, K, N = sizes
    width = gemm.bn // 2 if gemm.operands == "beside" else gemm.bn
    spans = pairs.spans if pairs else ()
    slots, tiles, wanted = 1, -(-M // gemm.bm) * -(-N // width), len(results)
    if gemm.contraction:
        sizes, slots, results = (G, M, 0, N), gemm.slots(K), [*results, *gemm.parts(sizes, offsets)]
        count = (G + slots - 1) * tiles
    else:
        count = tile_bound(M, G, gemm.bm) * -(-N // width)
    count = pairs.tiles if pairs else count
    grid = min(cores // gemm.programs, count)
    exact = gemm.contraction and slots == 1  # else there may be fewer tiles: see `first_tile`
    if not exact and gemm.programs == 1 and 2 * count > cores:
        grid = cores
    zeros = RING.value * grid if gemm.programs > 1 else 0
    if slots > 1:
        zeros += slots * tiles * gemm.programs
        schedule, entries = schedule_parts(offsets, K, gemm.split, zeros=zeros)
    elif gemm.contraction:
        schedule, entries = schedule_groups(offsets, K, spans, zeros=zeros)
    else:
        schedule, entries = schedule_rows(offsets, M, gemm.bm, spans, panel=gemm.panel, zeros=zeros)
    stored, added = gemm.stored, results[0].contents == "added"
    if added and results[0].type.dtype == jnp.float32:  # buffers of as many bytes as 16-bit results have
        stored = stored[0], stored[1] // 2
    layout = tile_layout(results[0].type.dtype, (1, *stored), over_cluster(gemm.programs, 0, 1, 0))
    descs = [OutTile(stored, layout, x.before, i, x.halves) if x.tma else None for i, x in enumerate(results)]
    halves = [half for x in results for half in ((-1,) if x.halves == 1 else (0, 1))]
    named = {f"desc_{i}": desc for i, desc in enumerate([*descs, *[None] * MOST_RESULTS][:MOST_RESULTS])}
    named |= {f"ptr_{i}": None for i in range(len(results), MOST_RESULTS)}
    kinds, values = zip(*args, strict=True) if args else ((), ())
    return triton_call(
        kernel=ragged_gemm_kernel, out_type=tuple(x.type for x in results), grid=grid,
        programs=gemm.programs, name=gemm.name, flops=gemm.flops, bytes_accessed=gemm.bytes_accessed,
        a_descs=a, b_descs=b, gather=gather, schedule=Scratch(schedule),
        args=values, **named, entries=entries, sizes=sizes, places=pairs.places if pairs else None,
        widths=pairs.widths if pairs else None, tiles=count, BM=gemm.bm, BN=gemm.bn, STAGES=gemm.stages,
        PANEL=gemm.panel, SPLIT=1 if gemm.ping_pong else 2,
        KIND=(CONTRACTION if gemm.contraction else ROWS).value, TRANSPOSED=gemm.transposed, OPERANDS=gemm.operands,
        BUFFERS=gemm.buffers, CUT=slots > 1, COUNT=gemm.order[0], LOCATE=gemm.order[1],
        PIECE=gemm.piece or gemm.stored, LOADED=sum(x.halves for x in results if x.contents == "loaded"),
        ACCUMULATE=added, KINDS=kinds, EPILOGUE=gemm.epilogue, VARIANT=gemm.variant,
        HALVES=tuple([*halves, *[-1] * MOST_RESULTS][:MOST_RESULTS]),
    )[:wanted]  # fmt: skip
