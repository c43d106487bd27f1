"""Tiles and plans that no kernel can have are errors that name the field, where they are made."""

import pytest

from jaxops.ops import adaln, grouped_glu, grouped_matmul, moe_mlp, packed_attention, permute, quantize, route

# How tiles are made rightly, and what is wrong with others.
RIGHT = {
    route: {"rows": 16, "step": 4, "warps": 4},
    permute: {"rows": 2, "block": 256, "choices": 8, "warps": 4},
    adaln: {"rows": 16, "step": 1, "block": 128, "warps": 4},
    grouped_matmul: {"bm": 64, "bn": 64, "bk": 32},
    grouped_glu: {"rows": 4, "columns": 128, "warps": 4},
    packed_attention: {"bq": 16, "bk": 16, "warps": 4, "stages": 2},
    quantize: {"rows": 16, "cols": 128},
}
POWER = "power of two"
WRONG = [
    (route, {"rows": 12}, POWER), (route, {"step": 0}, POWER), (route, {"step": 32}, r"at most Tiles\.rows=16"),
    (permute, {"rows": 12}, POWER), (permute, {"block": 0}, POWER), (permute, {"choices": 3}, POWER),
    (adaln, {"rows": 0}, "at least 1"), (adaln, {"step": 3}, POWER), (adaln, {"step": -1}, POWER),
    (adaln, {"block": 100}, POWER), (adaln, {"step": 32}, r"at most Tiles\.rows=16"),
    (packed_attention, {"bq": 24}, "power of two and at least 16"), (packed_attention, {"bk": 8}, "at least 16"),
    (packed_attention, {"warps": 16}, "at most 8"), (packed_attention, {"stages": 0}, ""),
    *((grouped_matmul, {field: value}, "power of two.*16") for field, value in (("bm", 48), ("bn", 8), ("bk", -64))),
    (grouped_matmul, {"warps": 3}, "power of two and at most 16"), (grouped_matmul, {"stages": 0}, "at least 1"),
    (grouped_matmul, {"panel": 0}, "at least 1"),
    (grouped_glu, {"rows": 12}, POWER), (grouped_glu, {"columns": 0}, POWER),
    *((quantize, {field: 12}, POWER) for field in ("rows", "cols", "patch", "near", "panel")),
    (quantize, {"patch": 16, "near": 2}, r"times Tiles\.near=2.*at most Tiles\.rows=16"),
    (quantize, {"programs": 0}, "at least 1"),
    *((op, {"warps": 6}, POWER) for op in (route, permute, adaln, grouped_glu)),
    *((op, {"warps": 64}, "at most 32") for op in (route, permute, adaln, grouped_glu, quantize)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "says"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_tiles(op, change, says):
    op.Tiles(**RIGHT[op])
    field, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=rf"Tiles\.{field}={value}\b.*{says}"):
        op.Tiles(**RIGHT[op] | change)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (("cudnn", 8), r"Plan\.block=8 is of 'xla', and Plan\.backend is 'cudnn'"),
        (("xla", 0), r"Plan\.block=0 must be at least 1"),
    ],
)
def test_wrong_plans(plan, says):
    with pytest.raises(ValueError, match=says):
        packed_attention.Plan(**dict(zip(("backend", "block"), plan, strict=False)))


def test_panels_that_no_kernel_can_have():
    with pytest.raises(ValueError, match=r"TileOrder\.panel=0 must be at least 1"):
        moe_mlp.TileOrder(0)
