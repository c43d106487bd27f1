"""The list's op of attention, with the masks that its portable backend and its kernels have."""

import numpy as np

import jaxops
from jaxops.ops import cached_attention, packed_attention
from jaxops.ops.cached_attention import Plan as CachedPlan
from jaxops.ops.cached_attention import Tiles as CachedTiles
from jaxops.ops.cached_attention.reference import cached_attention_reference
from jaxops.ops.packed_attention import Plan, Tiles
from jaxops.ops.packed_attention.reference import packed_attention_reference
from tests.contracts.entry import EXACT, Arguments, Dims, Op, f32, i32, offsets, outside_of, ways_of

NAMES = ("queries", "keys", "values")


def attention_plan(run: str) -> Plan:
    tiles = Tiles(16, 16)
    return Plan("xla", block=8) if run == "xla" else Plan("pallas", fwd=tiles, dq=tiles, dkv=tiles)


def attention_shapes(d: Dims) -> Arguments:
    T, S, K, G, H, B = (d[name] for name in "TSKGHB")
    return {
        "queries": f32(T, K * G, H), "keys": f32(S, K, H), "values": f32(S, K, H), "until": i32(T),
        "offsets": i32(B + 1), "kv_offsets": i32(B + 1),
    }  # fmt: skip


def attention_integers(rng: np.random.Generator, d: Dims) -> Arguments:
    T, S, B = (d[name] for name in "TSB")
    until = rng.integers(-2, S + 3, T).astype(np.int32)
    return {"offsets": offsets(rng, T, B), "kv_offsets": offsets(rng, S, B), "until": until}


def attention(function, **more):
    def call(a: Arguments, **how):
        masks = {"kv_offsets": a["kv_offsets"], "visible_until": a["until"], "window": 7}
        return function(*(a[name] for name in NAMES), a["offsets"], **masks, **more, **how)

    return call


def attention_outside(a: Arguments) -> tuple[Arguments, list]:
    rows, others = (
        outside_of(a[offsets], a[name].shape[0])[:, :, None]
        for offsets, name in (("offsets", "queries"), ("kv_offsets", "keys"))
    )
    return {"queries": rows, "keys": others, "values": others}, [rows]


def cached_shapes(d: Dims) -> Arguments:
    B, K, G, S, H = (d[name] for name in "BKGSH")
    caches = {"k_cache": f32(B, K, S, H), "v_cache": f32(B, K, S, H)}
    turned = {"q_weight": f32(H), "k_weight": f32(H), "cos": f32(B, H // 4), "sin": f32(B, H // 4)}
    return {"qkv": f32(B, K * (G + 2), H)} | caches | {"at": i32(B), "sinks": f32(K * G)} | turned


def cached(function, **more):
    def call(a: Arguments, **how):
        pairs = {"qk_norm": (a["q_weight"], a["k_weight"]), "rotary": (a["cos"], a["sin"])}
        return function(*(a[name] for name in CACHED), sinks=a["sinks"], window=20, **pairs, **more, **how)

    return call


def cached_outside(a: Arguments) -> tuple[Arguments, list]:
    """Rows without a position, and of others what is cached from it on or before the window."""
    at, S = a["at"][:, None], a["k_cache"].shape[2]
    token, rows = np.arange(S)[None, :], ((at < 0) | (at >= S))[:, :, None]
    unread = (rows[:, 0] | (token >= at) | (token < at - 20))[:, None, :, None]
    kept = unread & (token != at)[:, None, :, None]
    return {"qkv": rows, "k_cache": unread, "v_cache": unread}, [rows, kept, kept]


def cached_plan(run: str) -> CachedPlan:
    return CachedPlan("xla") if run == "xla" else CachedPlan("pallas", fwd=CachedTiles(2, 16))


CACHED = ("qkv", "k_cache", "v_cache", "at")
ATTENTION_OPS = [
    Op(
        "cached_attention", cached(lambda *a, **how: jaxops.cached_attention(*a, **how)), cached_shapes,
        {"B": 4, "K": 2, "G": 2, "S": 37, "H": 10},
        ways_of(cached_plan, **EXACT), cached(cached_attention_reference),
        wrt=(*CACHED[:-1], "sinks", "q_weight", "k_weight", "cos", "sin"),
        local=(*CACHED, "cos", "sin"),
        integers=lambda rng, d: {"at": rng.integers(-1, d["S"] + 1, d["B"]).astype(np.int32)},
        outside=cached_outside, passes=True, module=cached_attention,
        multiplies=True,
        large=(({"B": 64, "K": 8, "G": 2, "S": 40_000, "H": 128}, {}),),
    ),
    Op(
        "packed_attention", attention(lambda *a, **how: jaxops.packed_attention(*a, **how)), attention_shapes,
        {"T": 23, "S": 26, "K": 2, "G": 2, "H": 10, "B": 4}, ways_of(attention_plan, **EXACT),
        attention(packed_attention_reference), wrt=NAMES, local=(*NAMES, "until", "offsets", "kv_offsets"),
        integers=attention_integers, outside=attention_outside, module=packed_attention,
        multiplies=True,
        large=(({"T": 1_200_000, "S": 1_200_000, "K": 4, "G": 4, "H": 128, "B": 64}, {}),),
    ),
]  # fmt: skip
