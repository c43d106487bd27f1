"""cast="inside": the units of the cast, the flags that the product waits for, and the casting warps' loop, each in
plain Python."""

import collections
import itertools
import threading
import types

import numpy as np
import pytest

pytest.importorskip("triton", minversion="3.7")
pytest.importorskip("jax_triton", exc_type=ImportError)

from jaxops.ops.fp8_matmul import Tiles, cast_triton
from jaxops.ops.fp8_matmul.inside_triton import Casting

TILES = [
    Tiles("triton", 128, 128, stages=4, panel=16),
    Tiles("triton", 192, 128, stages=4, panel=3),
    Tiles("triton", 128, 256, stages=3, panel=1),
    Tiles("triton", 128, 64, stages=7, panel=2),
]
SIZES = [(1, 1), (7, 131), (65, 128), (129, 389), (64, 1041), (300, 520), (2050, 300), (1536, 256)]
KINDS = [(False, False), (False, True), (True, False)]  # by_row, both
cdiv = lambda a, b: -(-a // b)


@pytest.fixture
def in_python(monkeypatch):
    """The functions' arithmetic on Python's numbers."""
    names = {"cdiv": cdiv, "where": lambda c, a, b: a if c else b, "static_range": range, "to_tensor": lambda x: x}
    names |= {"full": lambda *_: None, "float32": None, "barrier": lambda: None}
    monkeypatch.setattr(cast_triton, "gl", types.SimpleNamespace(**names))
    for name in ("NEXT", "PANELS", "LINES_AT_ONCE"):
        monkeypatch.setattr(cast_triton, name, getattr(cast_triton, name).value)
    for name in ("_flags", "_locate_unit", "_load_box", "advance"):
        monkeypatch.setattr(cast_triton, name, getattr(cast_triton, name).fn)
    return monkeypatch


def casting_of(tiles: Tiles, by_row: bool, both: bool) -> tuple[Casting, types.SimpleNamespace]:
    casting = Casting.of(tiles, by_row, both)
    steps = casting.boxes * casting.box[1] // 128
    sizes = {"BM": tiles.bm, "HEIGHT": casting.height, "ROWS": casting.box[0], "STEPS": steps, "CHUNK": casting.chunk}
    return casting, types.SimpleNamespace(state=0, **sizes)


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.bm}x{tiles.bn}")
@pytest.mark.parametrize(("by_row", "both"), KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_number_is_cast_once_and_every_flag_is_reached(in_python, tiles, by_row, both, sizes):
    (M, K), (casting, casts) = sizes, casting_of(tiles, by_row, both)
    units = casting.units(M, K)
    width, columns = casting.boxes * casting.box[1], casting.boxes * casting.cols
    rows, cols, measured = np.zeros((M, cdiv(K, 16) * 16), int), np.zeros((M, K), int), np.zeros((M, K), int)
    announcements, panels, first_of = collections.Counter(), collections.Counter(), {}
    for u in range(units):
        to_rows, row, col = cast_triton._locate_unit(u, M, K, casting.height, casts.ROWS, width, columns, by_row)
        assert 0 <= row < M
        assert 0 <= col < K
        if to_rows:
            rows[row : row + casts.ROWS, col : col + width] += 1
            announcements[cast_triton._flags(casts, row, M, K) + col // (128 * casts.CHUNK)] += 1
            panels[row // casting.height] += 1
            first_of.setdefault(row // tiles.bm, u)
        elif by_row:
            assert row // tiles.bm not in first_of, "measured after a unit that waits for it"
            measured[row : row + casts.ROWS, col : col + width] += 1
        else:
            cols[row : row + 128, col : col + columns] += 1
    assert (rows == 1).all()  # with the zeros past K that TMA needs
    assert (cols == both).all()
    assert (measured == by_row).all()

    waits = {}
    in_python.setattr(cast_triton, "_wait", lambda flag, needed: waits.update({flag: needed}))
    for row, k in itertools.product(range(0, M, tiles.bm), range(0, cdiv(K, 128), casting.chunk)):
        cast_triton.wait_for_casts.fn(casts, row, k, M, K)
    assert waits == announcements
    last = M + cdiv(M, tiles.bm) if by_row else 0
    assert casting.state(M, K) == cast_triton._flags(casts, cdiv(M, tiles.bm) * tiles.bm, M, K) + last
    for more in (-1, 0):
        in_python.setattr(cast_triton, "_reached", lambda at: panels[at - cast_triton.PANELS] + more)  # noqa: B023
        whole = [cast_triton.panel_is_cast.fn(casts, row, M, K) for row in range(0, M, tiles.bm)]
        assert whole == [more == 0] * len(whole)


class Counters:
    """Global memory that warps share: the state's numbers; who waits sees others' progress."""

    def __init__(self):
        self.numbers, self.changed = collections.Counter(), threading.Condition()

    def add(self, at: int) -> int:
        with self.changed:
            self.numbers[at] += 1
            self.changed.notify_all()
            return self.numbers[at] - 1

    def wait(self, at: int, needed: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.numbers[at] >= needed, 20), "a wait that does not end"


class Box:
    """A warp's buffer: what its last load brought, until it is free again."""

    holds = None

    def reinterpret(self, **_):
        return self

    def permute(self, _):
        return self

    def slice(self, *_, **__):
        return self


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.bm}x{tiles.bn}")
@pytest.mark.parametrize(("by_row", "both"), KINDS)
@pytest.mark.parametrize("warps", [1, 5])
def test_warps_do_all_units_each_on_the_boxes_it_loaded(in_python, tiles, by_row, both, warps):
    """However many warps there are, one at least. A box is read after its load and before the next one into it."""
    (M, K), (casting, casts) = (300, 1300), casting_of(tiles, by_row, both)
    units = casting.units(M, K)
    memory, done, failed = Counters(), collections.Counter(), []
    row_box = types.SimpleNamespace(block_shape=casting.box, nbytes_per_cta=0, layout=None, name="rows")
    col_box = types.SimpleNamespace(layout=None, name="columns")

    def load(desc, at, barrier, buf):
        assert buf.holds is None
        buf.holds = desc.name, *at
        barrier.append(buf)

    def waited(barrier, _phase):
        assert barrier.pop() is not None

    def used(name, buf, *at):
        assert buf.holds == (name, *at)
        done[name, *at] += 1

    def cast_lines(buf, values, _scales, line, _lines, at, *_):
        name, row, col = buf.holds
        assert values == name
        assert at == (col if name == "rows" else row)
        first, high = (row, casting.box[0]) if name == "rows" else (col, casting.cols)
        assert 0 <= line - first < high
        at_once = min(casting.box[0], cast_triton.LINES_AT_ONCE)
        done[name, row, col] += line - first == high - at_once

    def store_values(buf, _factor, _values, row, _M, at, *_):
        name, first, col = buf.holds
        assert (name, first) == ("rows", row)
        done["rows", row, col] += at == col + casting.box[1] - 128

    measured = lambda buf, _largest, row, _M: used("rows", buf, row, buf.holds[2]) or done.update({"measured": 1})
    nothing = lambda *_: (None, None)
    parts = {"_cast_lines": cast_lines, "_store_values": store_values, "_measure": measured, "_load": lambda buf: buf}
    parts |= dict.fromkeys(("scale_and_factor", "_load_largest", "_store_scales"), nothing)
    parts |= {"start_fetch_add": memory.add, "finish_fetch_add": lambda n: n, "_wait": memory.wait}
    parts |= {"_announce": lambda *at: [memory.add(i) for i in at], "_announce_measured": memory.add}
    parts["fence_async_shared"] = lambda: None
    parts["mbarrier"] = types.SimpleNamespace(expect=lambda *_: None, wait=waited)
    parts["tma"] = types.SimpleNamespace(async_load=load)
    for name, part in parts.items():
        in_python.setattr(cast_triton, name, part)
    loads = cast_triton._load_box

    def load_box(casts, descs, buf, *rest):  # the box was read
        buf.holds = None
        return loads(casts, descs, buf, *rest)

    in_python.setattr(cast_triton, "_load_box", load_box)

    class List(list):
        index = list.__getitem__

    def warp():
        count = casting.depth
        bufs, barriers = List(Box() for _ in range(count)), List([] for _ in range(count))
        args = ((row_box, col_box), "rows", 0, "columns", 0, bufs, barriers, units, M, K, cdiv(K, 16) * 16, M)
        how = (casting.boxes, casting.depth, casting.cols, by_row, False, False)
        try:
            cast_triton.cast.fn(args, casts, 0, *how)
            assert not any(barriers), "a load that nobody waits for"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=warp) for _ in range(warps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    panels = [memory.numbers[cast_triton.PANELS + i] for i in range(cdiv(M, casting.height))]
    columns = cdiv(M, 128) * cdiv(K, casting.boxes * casting.cols) if both else 0
    assert sum(panels) == (units // 2 if by_row else units - columns)
    boxes = units * casting.boxes
    assert done.pop("measured", 0) == (boxes // 2 if by_row else 0)
    assert done.total() == boxes
    assert set(done.values()) == {2 if by_row else 1}  # measured, then cast
