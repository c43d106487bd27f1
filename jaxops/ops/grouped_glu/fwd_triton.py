"""A gated linear unit over ragged groups for Hopper, in Gluon: both products, side by side in one tile, and the activation in one kernel.

Gate's columns and up's lie beside each other in shared memory, so that one instruction multiplies both, and in the registers of one thread.
"""

import jax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxops._lib.activations_triton import activate
from jaxops._lib.grouped_gemm_triton import ROWS, make_ring, next_tile, pass_tile, produce, produce_gathered, sum_steps
from jaxops._lib.hopper_triton import result_buffers, store, tile_layout
from jaxops._lib.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_rows
from jaxops._lib.tiling import tile_bound

BM, BF = gl.constexpr(128), gl.constexpr(128)  # rows, and columns of h, of a tile


@gluon.jit
def _consume(
    used,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATHERED: gl.constexpr,
):
    h_desc, gate_desc, up_desc, h_ptr, gate_ptr, up_ptr, facts, places, a_bufs, b_bufs, bufs, full, empty, turns, F = (
        used
    )
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BF, 16])
    s = 0
    phase = 0
    buf = 0
    more = True
    while more:
        _, row, end, col, steps, s, phase, _ = next_tile(facts, places, full, turns, s, phase, 0, WHICH, BM, 2)
        more = steps > 0
        if row < end:
            acc = gl.zeros([BM // 2, 2 * BF], gl.float32, MMA)
            acc, s, phase = sum_steps(
                acc,
                a_bufs,
                b_bufs,
                full,
                empty,
                turns,
                places,
                steps,
                s,
                phase,
                WHICH,
                STAGES,
                ROWS,
                False,
                2,
                GATHERED,
            )
            pre = acc.to(a_bufs.dtype)  # as they are saved: the backward sees the same
            gate, up = pre.reshape([BM // 2, 2, BF]).permute((0, 2, 1)).split()
            # A consumer's buffers in turns: one store fills its own while the one before is still read.
            if gate_desc is not None:
                store(
                    gate,
                    gate_desc,
                    gate_ptr,
                    bufs.index(BUFFERS * WHICH + buf),
                    row,
                    end,
                    col,
                    F,
                    MMA,
                    False,
                    True,
                    BUFFERS - 1,
                )
                buf = (buf + 1) % BUFFERS
                store(
                    up,
                    up_desc,
                    up_ptr,
                    bufs.index(BUFFERS * WHICH + buf),
                    row,
                    end,
                    col,
                    F,
                    MMA,
                    False,
                    True,
                    BUFFERS - 1,
                )
                buf = (buf + 1) % BUFFERS
            h = activate(gate, ACTIVATION) * up.to(gl.float32)
            store(h, h_desc, h_ptr, bufs.index(BUFFERS * WHICH + buf), row, end, col, F, MMA, False, True, BUFFERS - 1)
            buf = (buf + 1) % BUFFERS
        else:
            s, phase = pass_tile(full, empty, turns, places, steps, s, phase, WHICH, STAGES, 2)
    tma.store_wait(0)


@gluon.jit
def grouped_glu_kernel(
    x_desc, x_ptr, indices, gate_w_desc, up_w_desc, schedule, h_desc, gate_desc, up_desc, h_ptr, gate_ptr, up_ptr, entries, G, M, F, K, T,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, PANEL: gl.constexpr, DYNAMIC: gl.constexpr, ACTIVATION: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    facts, places, a_bufs, b_bufs, full, empty, turns = make_ring(
        gate_w_desc, BM, 2 * BF, STAGES, ROWS, False, 2, GATHERED
    )
    bufs = result_buffers(h_ptr, 2 * BUFFERS, BM // 2, BF)
    used = (
        h_desc,
        gate_desc,
        up_desc,
        h_ptr,
        gate_ptr,
        up_ptr,
        facts,
        places,
        a_bufs,
        b_bufs,
        bufs,
        full,
        empty,
        turns,
        F,
    )
    if GATHERED:
        made = (
            x_ptr,
            indices,
            T,
            gate_w_desc,
            up_w_desc,
            schedule,
            facts,
            a_bufs,
            b_bufs,
            full,
            empty,
            entries,
            G,
            M,
            F,
            K,
        )
        gl.warp_specialize([
            (_consume, (used, 0, STAGES, BUFFERS, ACTIVATION, GATHERED)),
            (_consume, (used, 1, STAGES, BUFFERS, ACTIVATION, GATHERED)),
            (produce_gathered, (made, BM, 2 * BF, STAGES, PANEL, DYNAMIC)),
        ], [4, 4], [208, 80])  # fmt: skip
    else:
        made = (
            x_desc,
            gate_w_desc,
            up_w_desc,
            (None, None),
            schedule,
            facts,
            a_bufs,
            b_bufs,
            full,
            empty,
            entries,
            G,
            M,
            F,
            K,
        )
        gl.warp_specialize([
            (_consume, (used, 0, STAGES, BUFFERS, ACTIVATION, GATHERED)),
            (_consume, (used, 1, STAGES, BUFFERS, ACTIVATION, GATHERED)),
            (produce, (made, BM, 2 * BF, STAGES, PANEL, DYNAMIC, ROWS, False, 2)),
        ], [4, 1], [224, 56])  # fmt: skip


def fwd_triton(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    offsets: jax.Array,
    indices: jax.Array | None = None,
    *,
    activation: str,
    save: bool,
    panel: int,
    dynamic: bool,
    stages: int,
    cores: int,
) -> tuple[jax.Array, ...]:
    """x[M, K], gate's and up's weights [G, K, F], offsets[G + 1] -> h [M, F], and with save the pre-activations, gate and up [M, F]. With indices [M], row m is
    x[indices[m]], K is a multiple of 64. bfloat16 or float16, K and F multiples of 8; no size is 0."""
    (T, K), (G, _, F), gathered = x.shape, weights[0].shape, indices is not None
    M = T if indices is None else indices.shape[0]
    part, cols = BM.value // 2, BF.value
    x_desc = None if gathered else TensorDescriptor.from_array(x, (part, 64), layout=tile_layout(x.dtype, (part, 64)))
    descs = [TensorDescriptor.from_array(w, (1, 64, cols), layout=tile_layout(w.dtype, (1, 64, cols))) for w in weights]
    schedule = schedule_rows(offsets, M, BM.value, False)
    h = out_struct((M, F), x.dtype, like=x)
    layout = tile_layout(x.dtype, (1, part, cols))
    results = (h, h, h) if save else (h,)
    outs = [OutTile((part, cols), layout, None, i, windows=True) if i < len(results) else None for i in range(3)]
    pointers = {} if save else {"gate_ptr": None, "up_ptr": None}
    count = tile_bound(M, G, BM.value) * -(-F // cols)
    work = Scratch(schedule) if dynamic else schedule
    return triton_call(
        x_desc, x if gathered else None, indices, *descs, work, *outs, **pointers, kernel=grouped_glu_kernel, out_type=results,
        grid=min(cores, count), name="grouped_glu_fwd", entries=schedule.shape[0] // COLUMNS, G=G, M=M, F=F, K=K, T=T, STAGES=stages,
        BUFFERS=5 - stages, PANEL=panel, DYNAMIC=dynamic, ACTIVATION=activation, GATHERED=gathered,
    )  # fmt: skip
