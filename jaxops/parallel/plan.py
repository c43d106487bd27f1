"""How a product across devices runs: in one kernel with its communication, or as XLA's collective and product; and how
rows are sent that only some devices need."""

import dataclasses
from typing import Literal

import jax
from jax import lax

from jaxops._lib.planning.device import Device
from jaxops._lib.planning.plans import BasePlan
from jaxops._lib.planning.recorded import note
from jaxops.parallel.peer_memory import peer_memory_missing

HIGH, DEEP = 128, 64  # rows of a tile, depth of a step
CONSUMERS = 2  # warpgroups that multiply
CHUNK = 4096  # elements that are sent at once
COPIED = 4096  # rows of all devices from which on "auto" pads w: by its bytes, that takes a tenth of the product's time
MOST = 8  # devices of a mesh axis: as many as XLA's barrier between devices takes
BACKENDS = "mosaic", "xla"
WAYS = "mosaic", "padded"
ROW_BYTES = 220_000  # of a row that is sent, in the kernel's shared memory
OLDEST = 0, 11, 2  # JAX in which a Mosaic kernel reaches another device's memory


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel runs.

    Attributes:
      wide: columns of a tile: 64, 128, 192 or 256.
      stages: steps in shared memory.
      outputs: parts of a result's tile in shared memory, of 64 columns for each multiplying warpgroup.
      group: tiles down that are taken together, for each column of tiles.
      programs: of a device.
    """

    wide: int = 256
    stages: int = 4
    outputs: int = 1
    group: int = 8
    programs: int = 132


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """The plan of one product.

    Attributes:
      backend: "mosaic" for the kernel, or "xla".
      tiles: of the kernel.
      why: what keeps the kernel from being taken; empty if it is taken.
    """

    backend: Literal["mosaic", "xla"] = "mosaic"
    tiles: Tiles | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class ExchangePlan(BasePlan):
    """The plan of `dispatch` and `collect`.

    Attributes:
      backend: "mosaic" for the kernel that writes these rows alone; "padded" for `jax.lax.all_to_all` of as many rows
        for each device as it could get.
      why: what the kernel cannot do here.
    """

    backend: Literal["mosaic", "padded"] = "mosaic"
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Reach:
    """What decides whether a kernel can write the memory of the other devices of a mesh axis.

    Attributes:
      devices: on the axis, or on all axes that are one exchange.
      manual: whether `jax.shard_map` is over all axes of the mesh.
      missing: of `peer_memory_missing`.
    """

    devices: int
    manual: bool = True
    missing: str = ""


def reach_of(axes: tuple[str, ...]) -> Reach:
    """Of the mesh axes, inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(axes) <= set(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)
    return Reach(lax.axis_size(axes), manual, peer_memory_missing())


def make_exchange_plan(reach: Reach, device: Device, *, row_bytes: int = 0, backend: str = "auto") -> ExchangePlan:
    """Decides how rows of so many bytes are sent between devices like `device`; a pure function.

    Raises:
      NotImplementedError: backend="mosaic" where the kernel cannot run.
    """
    why = _unreachable(reach, device)
    if row_bytes > ROW_BYTES:
        why = why or f"the kernel's shared memory holds rows of {ROW_BYTES} bytes, and these have {row_bytes}"
    if backend == "mosaic" and why:
        raise NotImplementedError(f"backend='mosaic': {why}. Write backend='auto' or 'padded'.")
    if backend == "padded" or why:
        return ExchangePlan("padded", why=why or "backend='padded'", device=device)
    return ExchangePlan(device=device)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on: the product [m, depth] x [depth, n] of a device's rows with what it has of w.

    Attributes:
      devices: on the axis.
      depths: contracted sizes: several if products are summed.
      dtype: of what is sent.
      transposed: whether w is [n, depth], as in a backward.
      exact: whether the products' operands are of dtype, and not of another one that the precision asks for.
      sent: columns of the rows that are gathered; 0 for none.
    """

    reach: Reach
    m: int
    n: int
    depths: tuple[int, ...]
    dtype: str
    transposed: bool = False
    exact: bool = True
    sent: int = 0


def make_plan(problem: Problem, device: Device, *, backend: str = "auto") -> Plan:
    """Decides how to run `problem` on `device`; a pure function.

    Raises:
      NotImplementedError: backend="mosaic" for what the kernel cannot do.
    """
    note(problem)
    why = _refused(problem, device)
    if backend == "mosaic" and why:
        raise NotImplementedError(f"backend='mosaic': {why}. Write backend='auto' or 'xla'.")
    if backend == "xla" or why:
        return Plan("xla", why=why or "backend='xla'", device=device)
    tiles = _heuristic(problem, device)
    if backend == "auto" and (why := _slower(problem, tiles, device)):
        return Plan("xla", why=f"{why}: XLA is faster", device=device)
    return Plan("mosaic", tiles, device=device)


def _unreachable(reach: Reach, device: Device) -> str:
    if reach.devices == 1:
        return "one device on the axis has nothing to send"
    if reach.devices > MOST:
        return f"the kernel knows at most {MOST} devices, and the axis has {reach.devices}"
    if not device.is_hopper:
        return f"the kernel needs a Hopper GPU, and this is {device.kind}"
    if "PCIe" in device.kind:
        return f"the kernel needs NVLink, and this is {device.kind}"
    if jax.__version_info__ < OLDEST:
        return f"the kernel needs JAX {'.'.join(map(str, OLDEST))} or newer, and this is {jax.__version__}"
    if reach.missing:
        return reach.missing
    if not reach.manual:
        return "the kernel needs jax.shard_map over all axes of the mesh"
    return ""


def _refused(problem: Problem, device: Device) -> str:
    if why := _unreachable(problem.reach, device):
        return why
    if problem.dtype not in ("bfloat16", "float16") or not problem.exact:
        return "the kernel multiplies bfloat16 and float16 in themselves"
    if not problem.m or not problem.n or not all(problem.depths):
        return "a size is 0"
    if any(size % 8 for size in (problem.n, problem.sent, *problem.depths)):
        return f"TMA needs sizes that are multiples of 8, and these are {problem.n}, {problem.sent}, {problem.depths}"
    if 0 < problem.sent < 64 and problem.m < 8:
        return f"[{problem.m}, {problem.sent}] are too few numbers to send"
    return ""


def _slower(problem: Problem, tiles: Tiles, device: Device) -> str:
    """Why XLA's collective and product take less time than the kernel; empty if they do not.

    On four H200s x [512, 4096] of a device times w [4096, 2048], in 128 tiles, takes 102 us, XLA 117. x [256, 4096], in
    88 tiles, takes 99, XLA 82; with w [4096, 1024], in 96, 92 and 94. Where w is padded, x [1024, 2880] times
    w [2880, 1440] takes 109, XLA 139 (2026-11-26).
    """
    count = _count(problem, tiles.wide)
    if problem.sent > 0 and 5 * count < 4 * device.cores:
        return f"{count} tiles are too few for {device.cores} multiprocessors"
    columns = problem.depths if problem.transposed else (problem.n,)
    if problem.reach.devices * problem.m < COPIED and any(number % DEEP for number in columns):
        return f"w has {', '.join(map(str, columns))} columns, no multiple of {DEEP}, and would be padded for few rows"
    return ""


def _count(problem: Problem, wide: int) -> int:
    """Tiles of a device's product: of all devices' rows."""
    return problem.reach.devices * -(-problem.m // HIGH) * -(-problem.n // wide)


def _heuristic(problem: Problem, device: Device) -> Tiles:
    """The tile width that needs the least time by its waves of tiles; larger groups of tiles where K is short.

    Two H200s: (M, K, N) = (16384, 2880, 5760) takes 442 us with 192 columns and 457 with 256, (4096, 4096, 14336) 378
    and 356 (2026-11-24). In groups of 16 the latter takes 391 us, of 8 402; (8192, 8192, 28672) 3,032 and 2,919
    (2026-11-25).
    """

    def time(wide: int) -> float:
        return -(-_count(problem, wide) // device.cores) * wide * (1.04 if wide < 256 else 1)

    wide = min((256, 192), key=time)
    group = 16 if max(problem.depths) <= 4096 else 8
    return Tiles(wide, outputs=1 if wide == 256 else 3, group=group, programs=device.cores)


def senders(tiles: int, programs: int, n: int) -> int:
    """How many of a phase's tiles send rows: few, so that the last rows arrive before the next phase, but at least as
    many as run at once, and enough that the link carries about 250 of its 400 GB/s: a producer that waits for the link
    does not load. At 700 TFLOP/s a phase sends 700e12 / n bytes a second: 2,800 / n times as many as 250e9.
    """
    return min(tiles, max(programs, int(tiles * 2800 / n)))
