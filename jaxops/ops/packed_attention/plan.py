"""Plans of packed attention: backend, the block of the portable one, tiles of the kernels' passes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.planning.device import HOPPER_SHARED_BYTES, Device, check_gluon, runs_gluon
from jaxops._lib.planning.plans import AMPERE, BasePlan, Call, Planner, check_fields
from jaxops.ops.packed_attention.cudnn import cudnn_missing

PASSES = ("fwd", "dq", "dkv")


class Arrays(NamedTuple):
    """The operands of a call; gradients come in the same places.

    Attributes:
      q: [T, N, H].
      k, v: [S, K, H] and [S, K, V].
      first, end, inside: of `visible_rows`, int32 [T], [T], [4].
      sinks: float32 [N], or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    first: jax.Array
    end: jax.Array
    inside: jax.Array
    sinks: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static in a call, beside shapes and dtypes.

    Attributes:
      scale: factor on the scores.
      precision: of the products.
      pairs: of a query and a key that it sees, at the most, for the launches' costs.
      soft_cap: of the scores, or None.
    """

    scale: float
    precision: lax.Precision
    pairs: int
    soft_cap: float | None = None

    def capped(self, products: jax.Array, nat: float = 1.0) -> tuple[jax.Array, jax.Array | float]:
        """(scores, in units of 1 / nat, and the slope of the cap) of products of queries and keys."""
        if self.soft_cap is None:
            return self.scale * nat * products, 1.0
        share = jnp.tanh(self.scale / self.soft_cap * products)
        return self.soft_cap * nat * share, 1 - share * share


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one pass of the kernels is cut into programs.

    Attributes:
      bq: rows of queries in a step; a program of fwd and dq owns as many. Of "triton" 128.
      bk: rows of keys in a step; a program of dkv owns as many. Both are else powers of two, at least 16.
      warps: warps a program (1, 2, 4 or 8). Of "triton" 8, beside the producer's.
      stages: pipeline stages of the loop over the other operand's blocks; of "triton"'s dq at least 2.
    """

    bq: int
    bk: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        check_fields(self, "bq", "bk", power_of_2=True, least=16)
        check_fields(self, "warps", power_of_2=True, most=8)
        check_fields(self, "stages")


@dataclasses.dataclass(frozen=True)
class Plan(BasePlan):
    """Tiles of the forward and of the two backward passes (gradients of q, and of k and v).

    Attributes:
      block: of "xla": rows of queries and of keys in a step of its loops.
    """

    backend: Literal["triton", "cudnn", "pallas", "xla"] = "pallas"
    block: int | None = None
    fwd: Tiles | None = None
    dq: Tiles | None = None
    dkv: Tiles | None = None

    def __post_init__(self):
        if self.block is not None:
            if self.backend != "xla":
                raise ValueError(f"Plan.block={self.block!r} is of 'xla', and Plan.backend is {self.backend!r}.")
            check_fields(self, "block")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a plan depends on.

    Attributes:
      T, S: rows of queries and of keys.
      heads, kv_heads, head_dim, dtype: of q and k.
      mask: "whole" or "causal", or "rows" where a window or visible_until says what each row sees.
      cross: keys have offsets of their own.
      value_dim: of v; None for that of q and k.
      sinks, soft_cap: whether there are some.
    """

    T: int
    S: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: Literal["whole", "causal", "rows"] = "whole"
    cross: bool = False
    value_dim: int | None = None
    sinks: bool = False
    soft_cap: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a head of q and k, and of v."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim


def _cudnn_cannot(p: Problem, device: Device) -> str:
    """Why cuDNN cannot run it; "" where it can."""
    if not device.has(AMPERE):
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer, and this is {device.kind}"
    if p.dtype == "float32":
        return "it has bfloat16 and float16 only, and q is float32"
    if p.mask == "rows" or p.cross:
        return "its ragged layout has no window, no visible_until and no kv_offsets"
    if p.sinks or p.soft_cap or len({*p.widths}) > 1:
        return "it has no sinks, no soft_cap and no other head_dim of v"
    if p.head_dim % 8 or p.head_dim > 128:
        return f"it takes a head_dim of at most 128, a multiple of 8, and this is {p.head_dim}"
    return cudnn_missing()


_WIDEST = 256  # head_dim of the kernels, whose programs hold whole rows in registers and shared memory


def _triton_cannot(p: Problem) -> str:
    """Why the Hopper kernel cannot run it; "" where it can."""
    if p.dtype == "float32":
        return "it has bfloat16 and float16 only, and q is float32"
    for width in p.widths:
        if width % 8 or width > _WIDEST:
            return f"it takes a head_dim of at most {_WIDEST}, a multiple of 8, and this is {width}"
    return ""


def _on_hopper(problem: Problem, device: Device) -> bool:
    return not _triton_cannot(problem) and runs_gluon(device)


def _auto(problem: Problem, device: Device) -> str:
    """The Hopper kernels are 1.2 to 1.7 times as fast as cuDNN forward, and as fast or up to 1.6 times with backward,
    where cuDNN's bits differ from run to run. cuDNN is 1.2 to 1.8 times as fast as the Pallas kernels for one causal
    sequence. For other masks these are 6 to 28 times as fast as XLA's ways. Times:
    docs/notes/2026-11-29_attention_on_hopper.md, docs/notes/2026-11-28_tiles_of_row_ops.md."""
    p = problem
    if _on_hopper(p, device):
        return "triton"
    if not _cudnn_cannot(p, device):
        return "cudnn"
    kernels = device.has(AMPERE) and max(p.widths) <= _WIDEST
    more = p.mask == "rows" or p.cross or p.sinks or p.soft_cap or len({*p.widths}) > 1
    return "pallas" if kernels and more else "xla"


def _fit(pass_name: str, tiles: Tiles, call: Call[Problem, Plan]) -> Tiles:
    if call.backend == "triton":
        most = 64 if max(call.problem.widths) > 128 else 128  # columns of scores in registers, beside those of the sums
        owned, looped, names = (tiles.bk, tiles.bq, "bk bq") if pass_name == "dkv" else (tiles.bq, tiles.bk, "bq bk")
        if (owned, tiles.warps) != (128, 8) or not 64 <= looped <= most:
            own, other = names.split()
            needed = f"{own}=128 and warps=8, and {other} from 64 to {most}"
            raise ValueError(f"plan.{pass_name}={tiles}: this needs {needed}.")
        if pass_name == "dq" and tiles.stages < 2:  # v's tile is loaded after the next one of k
            raise ValueError(f"plan.dq={tiles}: this needs at least 2 stages.")
        if (needed := hopper_memory(pass_name, tiles, call.problem.widths).bytes) > HOPPER_SHARED_BYTES:
            raise ValueError(f"plan.{pass_name}={tiles} needs {needed} bytes of shared memory: use fewer stages.")
    return tiles


def head_columns(width: int) -> tuple[int, int]:
    """Columns of a head in the Hopper kernels' shared memory, and of its parts, each a power of two: three where
    a quarter or more of one would be zeros. The forward's v has one part."""
    for columns, part in ((96, 32), (192, 64)):
        if 2 * columns // 3 < width <= columns:
            return columns, part
    columns = max(16, power_of_2(width))
    return columns, columns


def gradients_apart(widths: tuple[int, int]) -> bool:
    """Whether dk and dv have a Hopper launch each: registers have no room for the sums of both."""
    return sum(head_columns(width)[0] for width in widths) > 256


class HopperMemory(NamedTuple):
    """Shared memory of a Hopper kernel.

    Attributes:
      bytes: in all, with mbarriers.
      apart: whether results have memory of their own, so that the next block's operands are loaded before they leave.
      early: stages of what a step reads only at its beginning: v for dq, dout for dk and q for dv.
    """

    bytes: int
    apart: bool
    early: int


def hopper_memory(pass_name: str, tiles: Tiles, widths: tuple[int, int]) -> HopperMemory:
    """The first that fits, otherwise the last one: results apart, results in the operands' memory, and these with one
    early stage less."""
    owned, looped = (tiles.bk, tiles.bq) if pass_name == "dkv" else (tiles.bq, tiles.bk)
    (keys, part), (values, _) = map(head_columns, widths)
    stages, two = tiles.stages, pass_name == "dkv" and gradients_apart(widths)
    if pass_name == "fwd":
        values = max(16, power_of_2(widths[1]))
    operands = keys if pass_name == "fwd" else keys + values
    results = {"fwd": values, "dq": keys, "dkv": keys + values}[pass_name]
    ways = [] if two else [(True, stages)]
    if pass_name != "fwd" or part == values:
        ways += [(False, stages)]
    if stages > 1 and (two or pass_name == "dq"):
        ways += [(False, stages - 1)]
    found = []
    for apart, early in ways:
        staged = stages * (keys + values) - (stages - early) * (values if pass_name == "dq" else min(keys, values))
        numbers = 12 * stages * looped * (pass_name == "dkv")  # lse, along, runs
        needed = 2 * (owned * (operands + apart * results) + looped * staged) + numbers + 768
        found.append(HopperMemory(needed, apart, early))
    return next((memory for memory in found if memory.bytes <= HOPPER_SHARED_BYTES), found[-1])


def _others(call: Call[Problem, Plan]) -> dict[str, Any]:
    problem = call.problem
    if call.backend == "triton":
        if why := _triton_cannot(problem):
            raise NotImplementedError(f"backend='triton' cannot run this: {why}. Use backend='auto' or 'xla'.")
        check_gluon(call.device)
    if call.backend == "cudnn" and (why := _cudnn_cannot(problem, call.device)):
        raise NotImplementedError(f"backend='cudnn' cannot run this: {why}. Use backend='auto' or 'xla'.")
    if call.backend == "pallas" and (wide := max(problem.widths)) > _WIDEST:
        raise NotImplementedError(f"the kernels have a head_dim of at most {_WIDEST}, not {wide}. Use 'xla'.")
    if call.backend != "xla":
        return {}
    # On a CPU blocks of 64 rows take half the time of 256. 512 are not timed on a GPU.
    return {"block": call.plan.block or (64 if call.device.platform == "cpu" else 512)}


def shared_bytes(pass_name: str, tiles: Tiles, problem: Problem) -> int:
    """Shared memory in bytes: the blocks that a program owns, those of the loop, `stages` of each, and what dkv's
    probabilities take on their way to another layout."""
    row, value = (max(16, power_of_2(width)) * jnp.dtype(problem.dtype).itemsize for width in problem.widths)
    both = row + value
    if pass_name == "dkv":
        return (tiles.bk + tiles.stages * tiles.bq) * both + 2 * tiles.bq * tiles.bk
    return tiles.stages * tiles.bk * both + tiles.bq * (row if pass_name == "fwd" else both)


def heuristic(pass_name: str, problem: Problem, device: Device, kernel: str = "pallas") -> Tiles:
    """The fastest of 14 to 24 on an H200, of 16,384 rows in 16 sequences and heads of 64 and 128; the times are in
    docs/notes/2026-11-28_tiles_of_row_ops.md. Those of "triton" are of 16,384 rows and 16 heads, causal; with
    soft_cap those that do not spill."""
    wide, half = max(problem.widths) > 64, problem.dtype != "float32"
    if kernel == "triton":
        stages = 3 if sum(head_columns(width)[0] for width in problem.widths) <= 320 else 2  # as there is room
        if pass_name == "dkv":
            return Tiles(64, 128, 8, stages) if wide or problem.soft_cap else Tiles(128, 128, 8, 2)
        if pass_name == "dq":
            return Tiles(128, 64, 8, stages)
        return Tiles(128, 64 if max(problem.widths) > 128 else 128, 8, 2)
    if not half:
        tiles = Tiles(64, 32, 8, 2)
    elif pass_name == "dkv":
        tiles = Tiles(32, 64, 4, 3) if wide else Tiles(64, 64, 4, 3)
    elif pass_name == "dq":
        tiles = Tiles(64, 32, 4, 2 if wide else 3)
    else:
        tiles = Tiles(64, 32, 4, 3) if wide else Tiles(64, 64, 4, 2)
    while shared_bytes(pass_name, tiles, problem) > device.shared_bytes and tiles != Tiles(16, 16, tiles.warps, 1):
        if tiles.stages > 1:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        elif tiles.bq > tiles.bk:
            tiles = dataclasses.replace(tiles, bq=tiles.bq // 2)
        else:
            tiles = dataclasses.replace(tiles, bk=tiles.bk // 2)
    return tiles


def _key(
    pass_name: str, *, T: int, S: int, heads: int, kv_heads: int, head_dim: int, dtype: str, mask: str,
    value_dim: int | None = None, **_: Any,
) -> tuple:  # fmt: skip
    """Lengths count up to the next power of two, so that a new one needs no new tuning."""
    values = head_dim if value_dim is None else value_dim
    return pass_name, dtype, power_of_2(T), power_of_2(S), heads, kv_heads, head_dim, values, mask


def _search(pass_name: str, problem: Problem, device: Device, kernel: str) -> Iterator[Tiles]:
    """Tiles that fit the shared memory, of at most 64 float32 sums of a row of keys or queries a thread."""
    width = max(16, power_of_2(max(problem.widths)))
    for bq, bk, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        tiles = Tiles(bq, bk, warps, stages)
        owned = 2 * bk if pass_name == "dkv" else bq
        held = owned * width / (32 * warps)
        if held <= 64 and shared_bytes(pass_name, tiles, problem) <= device.shared_bytes:
            yield tiles


PLANNER = Planner(
    Plan, Tiles, PASSES, heuristic, _search, _key, lambda problem: AMPERE, library="cudnn", auto=_auto,
    triton=_on_hopper, fit=_fit, others=_others, symbolic=("T", "S"),
)  # fmt: skip
make_plan, candidates = PLANNER.make_plan, PLANNER.candidates
