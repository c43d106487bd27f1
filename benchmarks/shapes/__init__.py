"""The named workloads, and the one definition of group sizes and sequence lengths for all sides.

Imports numpy only: torch's process reads it too.
"""

import dataclasses
from typing import Protocol, TypeVar

import numpy as np

DISTS = ("balanced", "skewed", "one_group", "half", "zipf", "huge", "router")
PASSES = ("fwd", "dgrad", "wgrad")
SAMPLED_ROWS = 64
_SEED = 0


Shape = TypeVar("Shape", bound="Named")


class Named(Protocol):
    """A workload."""

    @property
    def name(self) -> str: ...


def by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """`lhs[M, K] @ rhs[G, K, N]`, the rows of lhs sorted by group."""

    name: str
    G: int
    M: int
    K: int
    N: int

    @property
    def flops(self) -> int:
        """Of any pass: every row is in a group, so all three passes multiply the same M, K and N."""
        return 2 * self.M * self.K * self.N

    def moved_bytes(self, pass_name: str, sizes: np.ndarray, itemsize: int = 2) -> int:
        """The fewest bytes of a pass.

        fwd and dgrad do not read the weights of empty groups; wgrad writes their zeros.
        """
        groups = self.G if pass_name == "wgrad" else int(np.count_nonzero(sizes))
        return itemsize * (self.M * self.K + self.M * self.N + groups * self.K * self.N)

    @property
    def dims(self) -> dict[str, int]:
        return {"G": self.G, "M": self.M, "K": self.K, "N": self.N}


GROUPED = by_name(
    GroupedShape("mixtral_up", 8, 32768, 4096, 14336),
    GroupedShape("mixtral_down", 8, 32768, 14336, 4096),
    GroupedShape("dsmoe16b", 64, 32768, 2048, 1408),
    GroupedShape("qwen3_30b", 128, 32768, 2048, 768),
    GroupedShape("dsv3", 256, 32768, 7168, 2048),
    GroupedShape("dsv3_small", 256, 4096, 7168, 2048),
)


@dataclasses.dataclass(frozen=True)
class DenseShape:
    """`x[M, K] @ w[K, N]`."""

    M: int
    K: int
    N: int

    @property
    def name(self) -> str:
        return f"m{self.M}_k{self.K}_n{self.N}"

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "K": self.K, "N": self.N}

    @property
    def flops(self) -> int:
        """Of one of the three products: y, dx and dw multiply the same M, K and N."""
        return 2 * self.M * self.K * self.N

    @property
    def one_group(self) -> GroupedShape:
        """As a grouped product of one group, to sample and check its rows in the same way."""
        return GroupedShape(self.name, 1, self.M, self.K, self.N)


DENSE = by_name(
    DenseShape(8192, 4096, 4096),
    DenseShape(8192, 4096, 14336),
    DenseShape(8192, 7168, 2048),
    DenseShape(8192, 8192, 8192),
    DenseShape(16384, 4096, 16384),
    DenseShape(15872, 4096, 16384),
    DenseShape(4608, 5120, 13824),
    DenseShape(333, 4096, 4096),
    DenseShape(1024, 4096, 4096),
    DenseShape(333, 7168, 2048),
    DenseShape(1024, 4096, 14336),
)


# Of products across devices: M tokens of all of them, and N columns (of the first product) over all of them.
COLLECTIVE = by_name(
    DenseShape(2048, 4096, 8192),
    DenseShape(2048, 4096, 14336),
    DenseShape(4096, 4096, 14336),
    DenseShape(8192, 8192, 28672),
    DenseShape(16384, 2880, 5760),
    DenseShape(10006, 4096, 14336),
)


@dataclasses.dataclass(frozen=True)
class MatrixShape:
    """x[M, K], to be quantised."""

    M: int
    K: int

    @property
    def name(self) -> str:
        return f"m{self.M}_k{self.K}"

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "K": self.K}

    @property
    def size(self) -> int:
        return self.M * self.K


MATRICES = by_name(
    MatrixShape(8192, 4096),
    MatrixShape(8192, 14336),
    MatrixShape(16384, 4096),
    MatrixShape(32768, 7168),
    MatrixShape(16384, 16384),
)


def group_sizes(dist: str, G: int, M: int) -> np.ndarray:
    """Rows of each group, int32 [G], summing to M; the same for the same arguments, on every machine.

    balanced: M / G each, the remainder spread over the first groups. skewed: Zipf with exponent 1 in shuffled order,
    max(1, G // 16) groups empty, sizes not rounded to tiles. one_group: all rows in the middle group. half: half of the
    rows in one group, a third of the groups empty, the rest even. zipf: Zipf with exponent 1.2 in shuffled order. huge:
    a row in each group, and all others in one of them. router: multinomial, each group equally probable for each row.
    """
    if dist == "balanced":
        return _even(M, G)
    if dist == "one_group":
        sizes = np.zeros(G, np.int32)
        sizes[G // 2] = M
        return sizes
    if dist == "router":
        return np.random.default_rng(_SEED).multinomial(M, np.full(G, 1 / G)).astype(np.int32)
    if dist == "skewed":
        full = max(1, G - max(1, G // 16))
        sizes = in_proportion(1.0 / np.arange(1, full + 1), M)
    elif dist == "zipf":
        sizes = in_proportion(np.arange(1, G + 1) ** -1.2, M)
    elif dist == "huge":
        sizes = np.full(G, min(1, M // G), np.int32)
        sizes[0] += M - sizes.sum()
    elif dist == "half":
        full = max(1, G - G // 3)
        sizes = (
            np.concatenate([[M // 2], _even(M - M // 2, full - 1)]).astype(np.int32)
            if full > 1
            else np.array([M], np.int32)
        )
    else:
        raise ValueError(f"dist={dist!r}: write one of {', '.join(DISTS)}.")
    return _shuffled(sizes, G)


_MOST_WEIGHTS, _MOST_FLOPS = 2**31, 4e12  # numbers, and multiplications twice: some milliseconds


def random_shapes(name: str, count: int, seed: int) -> list[GroupedShape]:
    """The same every time: 1 to 256 groups, 2,048 to 65,536 rows, widths of 256 to 8,192, divisible by 8."""
    rng = np.random.default_rng(seed)
    found: list[GroupedShape] = []
    while len(found) < count:
        G, M, K, N = (int(2 ** rng.uniform(low, high)) for low, high in ((0, 8), (11, 16), (8, 13), (8, 13)))
        shape = GroupedShape(f"{name}_{len(found):02}", G, M, K // 8 * 8, N // 8 * 8)
        if G * shape.K * shape.N < _MOST_WEIGHTS and shape.flops < _MOST_FLOPS:
            found.append(shape)
    return found


def held_out() -> list[tuple[GroupedShape, tuple[str]]]:
    """Twenty random shapes that no plan was tuned for or looked at with, each with a distribution of its groups."""
    dists = 5 * (("balanced",), ("skewed",)) + 5 * (("huge",), ("zipf",))
    return list(zip(random_shapes("held_out", len(dists), 27), dists, strict=True))


def group_offsets(sizes: np.ndarray) -> np.ndarray:
    """Start of each group, then the end of the last one: int32 [G + 1]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def sampled_rows(pass_name: str, shape: GroupedShape, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a pass's result that are compared with float32.

    fwd and dgrad: (group, row of lhs); wgrad: (group, row of the group's matrix). They include both ends of groups, the
    smallest and the largest group, and in wgrad an empty one, where ragged kernels go wrong.
    """
    if pass_name != "wgrad":
        return sampled_packed_rows(offsets)
    rng = np.random.default_rng(_SEED)
    sizes = np.diff(offsets)
    special = [*_smallest_and_largest(sizes), *np.flatnonzero(sizes == 0)[:1]]
    groups = np.concatenate([special, rng.integers(0, shape.G, SAMPLED_ROWS - len(special))])
    rows = rng.integers(0, shape.K, SAMPLED_ROWS)
    rows[:2] = 0, shape.K - 1
    return groups.astype(np.int32), rows.astype(np.int32)


def sampled_packed_rows(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(group or sequence, row) of SAMPLED_ROWS rows.

    First and last rows of groups, those of the smallest and largest group too, then random ones.
    """
    rng = np.random.default_rng(_SEED)
    sizes = np.diff(offsets)
    ends = np.concatenate([_smallest_and_largest(sizes), rng.choice(np.flatnonzero(sizes), SAMPLED_ROWS // 4)])
    rows = np.concatenate([offsets[ends], offsets[ends + 1] - 1])
    rows = np.concatenate([rows, rng.integers(0, offsets[-1], SAMPLED_ROWS - len(rows))])
    groups = np.searchsorted(offsets, rows, side="right") - 1
    return groups.astype(np.int32), rows.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """B sequences packed one after another: T rows of D in all."""

    name: str
    T: int
    D: int
    B: int
    dists: tuple[str, ...] = ("unequal",)

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.T, "D": self.D, "B": self.B}

    def of_dist(self, dist: str) -> "PackedShape":
        """With the number of sequences of the distribution: "many" and "single" have their own."""
        return dataclasses.replace(self, B=len(sequence_lengths(dist, self.B, self.T)))

    def moved_bytes(self, op: str, pass_name: str, itemsize: int = 2, vector_itemsize: int = 2) -> int:
        """The fewest bytes of a pass: [T, D] tensors of itemsize, and [B, D] ones, gradients too, of vector_itemsize.

        adaln fwd: x, y; scale, shift. bwd: x, dy, dx; scale, dscale, dshift. gated_residual_adaln fwd: residual, h, new
        residual, y; gate, scale, shift. bwd: new residual, h, the cotangents of both results, dresidual, dh; gate,
        scale, dgate, dscale, dshift. fwd+bwd is one program that reads gate, scale and shift once; x and h are not in
        any cache in the backward.
        """
        tensors, vectors = _MOVED[op, pass_name]
        return self.D * (itemsize * tensors * self.T + vector_itemsize * vectors * self.B)


_MOVED = {
    ("adaln", "fwd"): (2, 2),
    ("adaln", "bwd"): (3, 3),
    ("adaln", "fwd+bwd"): (5, 4),
    ("gated_residual_adaln", "fwd"): (4, 3),
    ("gated_residual_adaln", "bwd"): (6, 5),
    ("gated_residual_adaln", "fwd+bwd"): (10, 6),
}
PACKED_OPS = ("adaln", "gated_residual_adaln")
PACKED_PASSES = ("fwd", "bwd", "fwd+bwd")
PACKED_DISTS = ("unequal", "many", "one", "single", "third_empty")
PACKED = by_name(
    PackedShape("t65536_d1024", 65536, 1024, 64, PACKED_DISTS),
    PackedShape("t65536_d3072", 65536, 3072, 64, PACKED_DISTS),
    PackedShape("t65536_d4096", 65536, 4096, 64),
    PackedShape("t16384_d3072", 16384, 3072, 16),
    PackedShape("t20011_d2432", 20011, 2432, 7),
    PackedShape("t30011_d1152", 30011, 1152, 7),
    PackedShape("t24001_d1536", 24001, 1536, 128),
    PackedShape("t9001_d6144", 9001, 6144, 300),
    PackedShape("t4801_d8192", 4801, 8192, 100, ("unequal", "many")),
)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """B sequences packed one after another, T rows in all, with N heads of H and K heads of keys and values."""

    name: str
    T: int
    N: int
    H: int
    K: int
    B: int = 16

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.T, "N": self.N, "H": self.H, "K": self.K}

    def flops(self, pass_name: str, pairs: int) -> int:
        """Of pairs of a query and a key that it sees: two products forward, five backward, one of them the recomputed
        forward."""
        return {"fwd": 2, "fwd+bwd": 7}[pass_name] * 2 * self.N * self.H * pairs


WINDOWS = {"window_4096": 4096, "window_1024": 1024}  # causal; rows that a row sees, itself one of them
ATTENTION_MASKS = ("whole", "causal", "text_and_images", *WINDOWS)
_PART = 256  # rows of a part of text, or of an image


def visible_until(mask: str, offsets: np.ndarray) -> np.ndarray:
    """int32 [T]: the first row that each row sees no more. text_and_images: in turn parts of text, which are causal,
    and images, which see all of themselves."""
    lengths = np.diff(offsets)
    row = np.arange(offsets[-1], dtype=np.int32)
    start, end = (np.repeat(x, lengths).astype(np.int32) for x in (offsets[:-1], offsets[1:]))
    if mask == "whole":
        return end
    part = (row - start) // _PART
    of_image = np.minimum(start + (part + 1) * _PART, end)
    return np.where((part % 2 == 1) & (mask == "text_and_images"), of_image, row + 1).astype(np.int32)


def visible_from(mask: str, offsets: np.ndarray) -> np.ndarray:
    """int32 [T]: the first row that each row sees."""
    start = np.repeat(offsets[:-1], np.diff(offsets)).astype(np.int32)
    row = np.arange(offsets[-1], dtype=np.int32)
    return np.maximum(start, row + 1 - WINDOWS[mask]) if mask in WINDOWS else start


def visible_pairs(mask: str, offsets: np.ndarray) -> int:
    """Pairs of a query and a key that it sees."""
    return int(np.sum(visible_until(mask, offsets) - visible_from(mask, offsets).astype(np.int64)))


ATTENTION = by_name(
    AttentionShape("t4096_16x64", 4096, 16, 64, 16),
    AttentionShape("t4096_24x128", 4096, 24, 128, 24),
    AttentionShape("t16384_16x64", 16384, 16, 64, 16),
    AttentionShape("t16384_24x128", 16384, 24, 128, 24),
    AttentionShape("t16384_32x128_kv8", 16384, 32, 128, 8),
    AttentionShape("t16384_16x96", 16384, 16, 96, 16),
    AttentionShape("t16384_16x192", 16384, 16, 192, 16),
    AttentionShape("t16384_16x256", 16384, 16, 256, 16),
    AttentionShape("t65536_16x64", 65536, 16, 64, 16),
    AttentionShape("t65536_32x128_kv8", 65536, 32, 128, 8),
)


def sequence_lengths(dist: str, B: int, T: int) -> np.ndarray:
    """Rows of each sequence, int32, summing to T; the same for the same arguments, on every machine.

    unequal: B lengths, evenly from 0.25 to 1.75 times their mean, in shuffled order, not rounded to tiles. third_empty:
    B // 3 empty ones, the others unequal. one: all rows in the middle one of B. single: one sequence, for any B. many:
    16 rows each, for any B.
    """
    if dist in ("unequal", "third_empty"):
        full = max(1, B - (B // 3 if dist == "third_empty" else 0))
        return _shuffled(in_proportion(np.linspace(0.25, 1.75, full), T), B)
    if dist == "one":
        return group_sizes("one_group", B, T)
    if dist == "single":
        return np.array([T], np.int32)
    if dist == "many":
        return np.minimum(16, T - np.arange(0, T, 16)).astype(np.int32)
    raise ValueError(f"dist={dist!r}: write one of {', '.join(PACKED_DISTS)}.")


def in_proportion(weights: np.ndarray, total: int) -> np.ndarray:
    exact = total * weights / weights.sum()
    sizes = np.floor(exact).astype(np.int32)
    # Largest remainders first: the sum is exact.
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    return sizes


def _shuffled(sizes: np.ndarray, count: int) -> np.ndarray:
    """sizes and zeros, count in all, in random order."""
    spread = np.zeros(count, np.int32)
    spread[: len(sizes)] = sizes
    return np.random.default_rng(_SEED).permutation(spread)


def _smallest_and_largest(sizes: np.ndarray) -> list[int]:
    """The smallest and the largest nonempty group."""
    full = np.flatnonzero(sizes)
    return [int(full[np.argmin(sizes[full])]), int(full[np.argmax(sizes[full])])]


def _even(M: int, G: int) -> np.ndarray:
    return (M // G + (np.arange(G) < M % G)).astype(np.int32)
