"""The gradient of the down projection's rows for Hopper, in Gluon, with what the gated unit makes of it in the same kernel: the gradients of gate and up, the
rows that the down projection's own gradient multiplies, and each row's part in its router weight's gradient.

The consumers take turns at tiles of 128 x 128: one activates while the other multiplies. H200, 2026-11-22: 284 us at qwen3_30b with 4,096 tokens, 1,606 with
32,768, 6,763 at mixtral. Alone the product takes 203, 1,110 and 5,450 (with tiles of 128 x 256 in the last two), and a pass for the activation's gradients
58, 465 and 1,084 more. Without its stores and formulas this kernel takes 216, 1,200 and 5,503: what stands after the sums is not all hidden yet.
"""

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxops._lib.activations_triton import activate_and_slope
from jaxops._lib.grouped_gemm_triton import ROWS, make_ring, next_tile, pass_tile, produce, sum_steps
from jaxops._lib.hopper_triton import columns, result_buffers, send, store_tile, tile_layout, window
from jaxops._lib.launch_triton import OutTile, Scratch, TensorDescriptor, triton_call
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.schedule_pallas import COLUMNS, schedule_rows
from jaxops._lib.tiling import tile_bound

BM, PIECE = (
    gl.constexpr(128),
    gl.constexpr(64),
)  # rows and columns of a tile; of what is loaded, activated and stored at a time
HALVES, STAGES = gl.constexpr(2), gl.constexpr(4)


@gluon.jit
def _beside(left, right):
    """The two halves in one again."""
    return gl.join(left, right).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _rows(x):
    """Its upper half and its lower one."""
    return x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute((1, 2, 0)).split()


@gluon.jit
def _unit(dh, gate, up, weight, QUARTERS: gl.constexpr, ACTIVATION: gl.constexpr):
    """(dgate, dup, the weighted unit, rounded; each row's sum of dh times the unit) of dh before the router's weights. A half after the other: what is between
    does not fit in the registers for all at once, beside the rest of the tile's sums."""
    if QUARTERS > 1:
        dh_left, dh_right = columns(dh)
        gate_left, gate_right = columns(gate)
        up_left, up_right = columns(up)
        weight_left, weight_right = columns(weight)
        dgate_left, dup_left, h_left, dot_left = _unit(
            dh_left, gate_left, up_left, weight_left, QUARTERS // 2, ACTIVATION
        )
        dgate_right, dup_right, h_right, dot_right = _unit(
            dh_right, gate_right, up_right, weight_right, QUARTERS // 2, ACTIVATION
        )
        return (
            _beside(dgate_left, dgate_right),
            _beside(dup_left, dup_right),
            _beside(h_left, h_right),
            dot_left + dot_right,
        )
    else:  # noqa: RET505  # known when it is compiled
        value, slope = activate_and_slope(gate, ACTIVATION)
        up = up.to(gl.float32)
        h = value * up
        dot = dh * h
        dh = dh * weight
        return (dh * up * slope).to(gate.dtype), (dh * value).to(gate.dtype), (h * weight).to(gate.dtype), dot


@gluon.jit
def _load(gate_desc, up_desc, gate_buf, up_buf, ready, row, end, col):
    """64 columns of a tile of gate and of up, on their way to a consumer's buffers, from which what was there is stored."""
    tma.store_wait(0)
    fence_async_shared()
    mbarrier.expect(ready, 2 * gate_desc.nbytes_per_cta)
    first, at = window(row, end, BM)
    tma.async_load(gate_desc, [first, at, col], ready, gate_buf.reshape([1, BM, PIECE]))
    tma.async_load(up_desc, [first, at, col], ready, up_buf.reshape([1, BM, PIECE]))


@gluon.jit
def _store(dgate_desc, dup_desc, h_desc, dgate_ptr, dup_ptr, h_ptr, dgate_buf, dup_buf, h_buf, row, end, col, F):
    if min(row + BM, end) >= BM:
        fence_async_shared()
        send(dgate_desc, dgate_buf, row, end, col)
        send(dup_desc, dup_buf, row, end, col)
        send(h_desc, h_buf, row, end, col)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        store_tile(dgate_buf.load(LAYOUT), dgate_ptr, row, end, col, F, LAYOUT, True)
        store_tile(dup_buf.load(LAYOUT), dup_ptr, row, end, col, F, LAYOUT, True)
        store_tile(h_buf.load(LAYOUT), h_ptr, row, end, col, F, LAYOUT, True)


@gluon.jit
def _consume(used, out, WHICH: gl.constexpr, ACTIVATION: gl.constexpr):
    facts, places, a_bufs, b_bufs, staged, full, empty, turns, ready, F = used
    dgate_desc, dup_desc, h_desc, dgate_ptr, dup_ptr, h_ptr, weights, dots, R = out
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    PIECE_MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    rows = gl.arange(0, PIECE, layout=gl.SliceLayout(1, PIECE_MMA))
    cols = gl.arange(0, PIECE, layout=gl.SliceLayout(0, PIECE_MMA))
    gate_buf = staged.index(3 * WHICH)  # in whose place its gradient comes; as up's in its
    up_buf = staged.index(3 * WHICH + 1)
    h_buf = staged.index(3 * WHICH + 2)
    s = 0
    phase = 0
    waited = 1 - WHICH  # the first consumer has the first turn
    loaded = 0
    more = True
    while more:
        _, row, end, col, steps, s, phase, waited = next_tile(
            facts, places, full, turns, s, phase, waited, WHICH, BM, 1
        )
        more = steps > 0
        if more:
            _load(dgate_desc, dup_desc, gate_buf, up_buf, ready.index(WHICH), row, end, col)
            upper = gl.load(weights + row + rows, mask=rows < end - row, other=0.0)
            lower = gl.load(weights + row + PIECE + rows, mask=rows < end - row - PIECE, other=0.0)
            dh = gl.zeros([BM, BM], gl.float32, MMA)
            dh, s, phase = sum_steps(
                dh, a_bufs, b_bufs, full, empty, turns, places, steps, s, phase, WHICH, STAGES, ROWS, True, 1
            )
            sides = columns(dh)
            for j in gl.static_range(HALVES):
                if j > 0:
                    _load(dgate_desc, dup_desc, gate_buf, up_buf, ready.index(WHICH), row, end, col + j * PIECE)
                mbarrier.wait(ready.index(WHICH), loaded)
                loaded ^= 1
                parts = _rows(sides[j])
                left = col + j * PIECE
                for i in gl.static_range(HALVES):
                    at = row + i * PIECE
                    if (
                        at < end and left < F
                    ):  # all in there: so that one piece's numbers are gone before the next one's come
                        part = gl.convert_layout(parts[i], PIECE_MMA, assert_trivial=True)
                        # Columns past F are those of the next expert's weights.
                        part = gl.where((cols < F - left)[None, :], part, 0.0)
                        gate = gate_buf.slice(i * PIECE, PIECE, dim=0)
                        up = up_buf.slice(i * PIECE, PIECE, dim=0)
                        weight = (upper if i == 0 else lower)[:, None].broadcast_to(part.shape)
                        dgate, dup, h, dot = _unit(
                            part, gate.load(PIECE_MMA), up.load(PIECE_MMA), weight, 4, ACTIVATION
                        )
                        row_dots = gl.convert_layout(
                            gl.sum(dot, axis=1), gl.SliceLayout(1, PIECE_MMA), assert_trivial=True
                        )
                        gl.store(
                            dots + gl.cast(left // PIECE, gl.int64) * R + at + rows, row_dots, mask=rows < end - at
                        )
                        gate.store(dgate)
                        up.store(dup)
                        h_buf.slice(i * PIECE, PIECE, dim=0).store(h)
                if left < F:
                    _store(
                        dgate_desc,
                        dup_desc,
                        h_desc,
                        dgate_ptr,
                        dup_ptr,
                        h_ptr,
                        gate_buf,
                        up_buf,
                        h_buf,
                        row,
                        end,
                        left,
                        F,
                    )
        else:
            s, phase = pass_tile(full, empty, turns, places, steps, s, phase, WHICH, STAGES, 1)
    tma.store_wait(0)


@gluon.jit
def moe_mlp_bwd_kernel(
    dy_desc, down_desc, weights, schedule, dgate_desc, dup_desc, h_desc, dgate_ptr, dup_ptr, h_ptr, dots, entries, G, R, F, D,
    PANEL: gl.constexpr, DYNAMIC: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Where gate's gradient is to stand, gate stands, and up likewise: each piece is read by the program that then writes it."""
    facts, places, a_bufs, b_bufs, full, empty, turns = make_ring(down_desc, BM, BM, STAGES, ROWS, True, 1)
    staged = result_buffers(h_ptr, 2 * 3, BM, PIECE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    used = (facts, places, a_bufs, b_bufs, staged, full, empty, turns, ready, F)
    out = (dgate_desc, dup_desc, h_desc, dgate_ptr, dup_ptr, h_ptr, weights, dots, R)
    made = (dy_desc, down_desc, None, (None, None), schedule, facts, a_bufs, b_bufs, full, empty, entries, G, R, F, D)
    gl.warp_specialize([
        (_consume, (used, out, 0, ACTIVATION)),
        (_consume, (used, out, 1, ACTIVATION)),
        (produce, (made, BM, BM, STAGES, PANEL, DYNAMIC, ROWS, True, 1)),
    ], [4, 1], [224, 56])  # fmt: skip


def bwd_triton(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    weights: jax.Array,
    offsets: jax.Array,
    *,
    activation: str,
    panel: int,
    dynamic: bool,
    cores: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dy [R, D], each token's cotangent in the rows of its choices; w_down [E, F, D]; gate, up [R, F]; weights [R] float32 of the rows; offsets [E + 1] ->
    the gradients of gate and up, in their memory, the weighted unit (all [R, F]), and [cdiv(F, 64), R] float32, whose sums are the weights' gradients. bfloat16
    or float16, D and F multiples of 8; no size is 0."""
    (R, D), (E, F, _) = dy.shape, w_down.shape
    high, wide = BM.value, PIECE.value

    def describe(x, *block):
        return TensorDescriptor.from_array(x, block, layout=tile_layout(x.dtype, block))

    schedule = schedule_rows(offsets, R, high, False)
    rows, dots = out_struct((R, F), dy.dtype, like=dy), out_struct((-(-F // wide), R), jnp.float32, like=dy)
    layout = tile_layout(dy.dtype, (1, high, wide))
    outs = (OutTile((high, wide), layout, first, i, windows=True) for i, first in enumerate((gate, up, None)))
    return triton_call(
        describe(dy, high, 64), describe(w_down.reshape(E * F, D), high, 64), weights, Scratch(schedule) if dynamic else schedule, *outs,
        kernel=moe_mlp_bwd_kernel, out_type=(rows, rows, rows, dots), grid=min(cores, tile_bound(R, E, high) * -(-F // high)),
        name="moe_mlp_bwd", entries=schedule.shape[0] // COLUMNS, G=E, R=R, F=F, D=D, PANEL=panel, DYNAMIC=dynamic, ACTIVATION=activation,
    )  # fmt: skip
