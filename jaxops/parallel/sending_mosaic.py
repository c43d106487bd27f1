"""Sends a device's rows to all other devices, beside a product's tiles.

Another device's memory is only written by copies of bytes in a row. They find its address on the device, in a table
that is filled before each execution. For other copies Mosaic makes a TMA descriptor on the host, when the kernel is
launched, and a CUDA graph that is kept does not see that the other device's buffer has moved. On two H200s with JAX
0.11.2 such copies gave wrong results from some execution on, in programs of several operations; copies in a row none.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops.parallel.mainloop_mosaic import SENT, Place, Problem, plgpu, wait_for
from jaxops.parallel.plan import CHUNK, Tiles, senders

FLUSHED = 8  # steps: a tile's copies have mostly ended so many steps after the last of them was started
# Promises that the copy is in bounds; otherwise Mosaic makes a tiled copy of it.
IN_A_ROW = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}


def chunk_of(x) -> tuple[int, int]:
    """Rows and columns that are sent at once: whole rows, or a part of one; multiples of 128 bytes."""
    m, k = x.shape
    together = 64 // math.gcd(k, 64)
    rows = min(m, CHUNK // k) // together * together
    return (rows, k) if rows else (1, min(k, CHUNK) // 64 * 64)


class _Open(NamedTuple):
    """A Sender's state within a tile.

    Attributes:
      waiting: the phase of the last tile all of whose copies have been started; -1 if they have been signalled.
      due: the step at which they are.
      sent: chunks that this program has sent, of all tiles.
      chunk, end: this tile's next chunk, and the end of its chunks.
      phase: of this tile while chunks are left to send, otherwise -1.
    """

    waiting: jax.Array
    due: jax.Array
    sent: jax.Array
    chunk: jax.Array
    end: jax.Array
    phase: jax.Array


class Sender:
    """Copies x's rows into `gathered_ref[own]` of every device, in chunks, by the producer of each program.

    In phase p the first tiles each send a share of the rows to the device that comes p + 1 before this one, which
    reads them in its phase p + 1. They are not all tiles, so that the last rows arrive before that phase begins.
    State between tiles: `waiting` and `sent` of `_Open`, which is the state from `begin` to `end`.
    """

    def __init__(self, p: Problem, tiles: Tiles, x_ref, gathered_ref, semaphores, scratch):
        self.p, self.semaphores = p, semaphores
        self.x_ref, self.gathered_ref = x_ref, gathered_ref
        (self.m, self.k), (self.high, self.wide) = x_ref.shape, chunk_of(x_ref)
        self.across = pl.cdiv(self.k, self.wide)
        self.smem, self.loaded = scratch["sent_smem"], scratch["loaded"]
        self.own = lax.axis_index(p.axis_name)
        self.chunks = pl.cdiv(self.m, self.high) * self.across
        down, across = p.tiles(tiles)
        self.tiles = senders(down * across, tiles.programs, p.n)
        self.pace = max(1, p.steps * 6 // 10 // pl.cdiv(self.chunks, self.tiles))

    def start(self):
        return jnp.int32(-1), jnp.int32(0)

    def begin(self, place: Place, state) -> _Open:
        """Starts a tile. Copies of earlier tiles are signalled before this tile can wait for other devices."""
        waiting, sent = state
        sends = (place.phase < self.p.devices - 1) & (place.number < self.tiles)
        first, end = (self._bound(place.number + i) for i in range(2))
        first, end = jnp.where(sends, first, 0), jnp.where(sends, end, 0)
        waiting = self._flush(place.phase > 0, waiting)

        @pl.when(first < end)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._load(first, sent)

        due = jnp.int32(min(FLUSHED, self.p.steps - 1))
        return _Open(waiting, due, sent, first, end, jnp.where(sends, place.phase, -1))

    def send_all(self, condition, at: _Open) -> _Open:
        """If condition, sends all chunks of the tile and signals them. Earlier tiles' must have been signalled."""
        chunk, sent = self._send_until(jnp.where(condition, at.end, at.chunk), at)
        phase = jnp.where(condition, at.phase, -1)
        self._flush(condition, phase)
        return at._replace(chunk=chunk, sent=sent, phase=jnp.where(condition, -1, at.phase))

    def advance(self, k, at: _Open) -> _Open:
        """After the tile's step k."""
        send = (at.chunk < at.end) & (lax.rem(k, jnp.int32(self.pace)) == 0)
        one = lambda chunk, sent: self._send(chunk, sent, at.end, at.phase)
        chunk, sent = lax.cond(send, one, lambda chunk, sent: (chunk, sent), at.chunk, at.sent)
        done = (at.phase >= 0) & (chunk >= at.end)
        waiting = self._flush(done | (k == at.due), at.waiting)
        waiting, due = jnp.where(done, at.phase, waiting), jnp.where(done, k + FLUSHED, at.due)
        return at._replace(waiting=waiting, due=due, sent=sent, chunk=chunk, phase=jnp.where(done, -1, at.phase))

    def end(self, at: _Open):
        """Ends a tile: sends the chunks that are left."""
        _, sent = self._send_until(at.end, at)
        # Copies of an earlier tile are still to be signalled only if this tile was empty: `advance` was not called.
        waiting = self._flush(at.phase >= 0, at.waiting)
        return jnp.where(at.phase >= 0, at.phase, waiting), sent

    def finish(self, state) -> None:
        """Ends when all other devices' rows are here."""
        self._flush(True, state[0])
        for number in range(1, self.p.devices):
            self.wait(self.p.after(self.own, number))

    def wait(self, source) -> None:
        wait_for(self.semaphores.at[SENT + source], self.tiles)

    def _bound(self, number):
        each, more = divmod(self.chunks, self.tiles)  # not number * chunks: that can be more than int32 holds
        return number * each + jnp.minimum(number, more)

    def _device(self, phase):
        return self.p.after(self.own, self.p.devices - 1 - phase)

    def _flush(self, condition, waiting):
        """If so, waits for the copies of the tile that has not been signalled, and signals it."""

        @pl.when(condition & (waiting >= 0))
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(
                self.semaphores.at[SENT + self.own], 1, device_id={self.p.axis_name: self._device(waiting)}
            )

        return jnp.where(condition, -1, waiting)

    def _window(self, number):
        """The last chunk begins early enough to end at the edge, and sends some numbers twice."""
        row, column = lax.div(number, jnp.int32(self.across)), lax.rem(number, jnp.int32(self.across))
        row = jnp.minimum(row * self.high, self.m - self.high)
        return pl.ds(row, self.high), pl.ds(jnp.minimum(column * self.wide, self.k - self.wide), self.wide)

    def _load(self, number, sent) -> None:
        slot = lax.rem(sent, jnp.int32(2))
        x = self.x_ref.at[self._window(number)]
        plgpu.copy_gmem_to_smem(x, self.smem.at[slot], self.loaded.at[slot], **IN_A_ROW)

    def _send_until(self, stop, at: _Open):
        one = lambda _, found: self._send(found[0], found[1], at.end, at.phase)
        return lax.fori_loop(at.chunk, jnp.maximum(at.chunk, stop), one, (at.chunk, at.sent))

    def _send(self, chunk, sent, end, phase):
        slot = lax.rem(sent, jnp.int32(2))

        @pl.when(chunk + 1 < end)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._load(chunk + 1, sent + 1)

        plgpu.barrier_wait(self.loaded.at[slot])
        here = self.own, *self._window(chunk)
        there = plgpu.remote_ref(self.gathered_ref, {self.p.axis_name: self._device(phase)})
        plgpu.copy_smem_to_gmem(self.smem.at[slot], there.at[here])
        pl.when(phase == 0)(lambda: plgpu.copy_smem_to_gmem(self.smem.at[slot], self.gathered_ref.at[here]))
        return chunk + 1, sent + 1
