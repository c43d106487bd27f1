"""The layers of open mixtures of experts, and the grouped products of which they are made.

Imports numpy, shapes.py and moe.py only.
"""

import itertools

import numpy as np

from benchmarks.shapes import GroupedShape, by_name
from benchmarks.shapes.moe import MoeShape

# Experts, experts per token, width D of the model and F of an expert, from each model's published config.json.
LAYERS = {
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "mixtral_8x22b": (8, 2, 6144, 16384),
    "deepseek_moe_16b": (64, 6, 2048, 1408),
    "deepseek_v3": (256, 8, 7168, 2048),
    "qwen15_moe_a27b": (60, 4, 2048, 1408),
    "qwen3_30b_a3b": (128, 8, 2048, 768),
    "qwen3_235b_a22b": (128, 8, 4096, 1536),
    "qwen3_coder_480b": (160, 8, 6144, 2560),
    "glm_45": (160, 8, 5120, 1536),
    "glm_45_air": (128, 8, 4096, 1408),
    "llama4_scout": (16, 1, 5120, 8192),
    "llama4_maverick": (128, 1, 5120, 8192),
    "gpt_oss_20b": (32, 4, 2880, 2880),
    "phi35_moe": (16, 2, 4096, 6400),
    "granite_3b_a800m": (40, 8, 1536, 512),
    "dbrx": (16, 4, 6144, 10752),
    "jamba_mini": (16, 2, 4096, 14336),
    "arctic": (128, 2, 7168, 4864),
    "minimax_text_01": (32, 2, 6144, 9216),
    "hunyuan_large": (16, 1, 6400, 18304),
}
TOKENS = (4096, 16384, 65536)
SLICES = {"whole": (1, 1), "e4": (4, 1), "f2": (1, 2), "f4": (1, 4)}  # of how many cards: of E, of F
DIRECTIONS = ("up", "down")
DISTS = ("balanced", "router", "zipf", "huge")
# Of lhs, rhs, dout and the largest result in bfloat16: with torch's second layout of rhs, two sides share 80 GB.
_MOST_BYTES = 24e9
_MOST_FLOPS = 16e12  # 20 ms


def products(model: str, T: int) -> list[GroupedShape]:
    """A layer's products at T tokens: up (D to F) and down (F to D), whole, with E / 4 experts (a card's slice of the
    offsets, with the mean of T k / 4 rows), and with F / 2 and F / 4 (tensor parallel).

    Without those of more than 24 GB or 16 TFLOP: deepseek_v3 whole, qwen3_coder_480b whole, mixtral_8x22b whole, dbrx
    whole and with F / 2, all at 65,536 tokens.
    """
    E, k, D, F = LAYERS[model]
    found = []
    for (name, (experts, parts)), direction in itertools.product(SLICES.items(), DIRECTIONS):
        G, M, width = E // experts, T * k // experts, F // parts
        K, N = (D, width) if direction == "up" else (width, D)
        shape, numbers = GroupedShape(f"{model}_t{T}_{name}_{direction}", G, M, K, N), (M * K, M * N, G * K * N)
        fits = 2 * (sum(numbers) + max(numbers)) <= _MOST_BYTES and shape.flops <= _MOST_FLOPS
        if fits and E % experts == F % parts == 0:
            found.append(shape)
    return found


def all_models() -> list[GroupedShape]:
    return [shape for model, T in itertools.product(LAYERS, TOKENS) for shape in products(model, T)]


def models(count: int = 60, seed: int = 0) -> list[GroupedShape]:
    """One product each of `count` different pairs of model and tokens, 60 at most, in random order; always the same for
    a seed. Slices and directions are equally frequent, as far as the products fit."""
    rng = np.random.default_rng(seed)
    pairs = list(itertools.product(LAYERS, TOKENS))
    pairs = [pairs[i] for i in rng.permutation(len(pairs))[:count]]
    kinds = rng.permutation(np.resize(np.arange(len(SLICES) * len(DIRECTIONS)), len(pairs)))
    fitting = [products(*pair) for pair in pairs]
    return [found[kind % len(found)] for found, kind in zip(fitting, kinds, strict=True)]


# Ten whose weights (7.5 GB at most), gradients and a reference's gradients fit 80 GB.
_WHOLE = (
    *("mixtral_8x7b", "deepseek_moe_16b", "qwen3_30b_a3b", "qwen3_235b_a22b", "glm_45"),
    *("glm_45_air", "llama4_scout", "gpt_oss_20b", "phi35_moe", "granite_3b_a800m"),
)
MODEL_LAYERS = by_name(
    *(MoeShape(f"{model}_t{T}", T, *LAYERS[model]) for model in _WHOLE for T in TOKENS[:2]),
    MoeShape("gpt_oss_120b_t8192", 8192, 128, 4, 2880, 2880),
    MoeShape("olmoe_t16384", 16384, 64, 8, 2048, 1024),
)
