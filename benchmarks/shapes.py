"""The named workloads, and the one definition of group sizes that every peer is measured with. Needs numpy only: torch's process reads it too."""

import dataclasses

import numpy as np

DISTS = ("balanced", "skewed", "one_group", "half")
PASSES = ("fwd", "dgrad", "wgrad")
SAMPLED_ROWS = 64
_SEED = 0


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
        """Of any one pass: every row belongs to a group, so all three passes multiply the same M, K and N."""
        return 2 * self.M * self.K * self.N

    def moved_bytes(self, pass_name: str, sizes: np.ndarray, itemsize: int = 2) -> int:
        """What one pass must read and write at the least. fwd and dgrad leave the weights of empty groups alone; wgrad writes their zeros."""
        groups = self.G if pass_name == "wgrad" else int(np.count_nonzero(sizes))
        return itemsize * (self.M * self.K + self.M * self.N + groups * self.K * self.N)

    @property
    def dims(self) -> dict[str, int]:
        return {"G": self.G, "M": self.M, "K": self.K, "N": self.N}


GROUPED = {
    shape.name: shape
    for shape in (
        GroupedShape("mixtral_up", 8, 32768, 4096, 14336),
        GroupedShape("mixtral_down", 8, 32768, 14336, 4096),
        GroupedShape("dsmoe16b", 64, 32768, 2048, 1408),
        GroupedShape("qwen3_30b", 128, 32768, 2048, 768),
        GroupedShape("dsv3", 256, 32768, 7168, 2048),
        GroupedShape("dsv3_small", 256, 4096, 7168, 2048),
    )
}


def group_sizes(dist: str, G: int, M: int) -> np.ndarray:
    """Rows of each group, int32 [G], summing to M; the same for the same arguments, on every machine.

    balanced: M / G each, the remainder spread over the first groups. skewed: Zipf with exponent 1 in shuffled order, max(1, G // 16) groups empty,
    sizes rounded to nothing but whole rows. one_group: all rows in the middle group. half: half of the rows in one group, a third of the groups
    empty, the rest even.
    """
    if dist == "balanced":
        return _even(M, G)
    if dist == "one_group":
        sizes = np.zeros(G, np.int32)
        sizes[G // 2] = M
        return sizes
    if dist == "skewed":
        full = max(1, G - max(1, G // 16))
        weights = 1.0 / np.arange(1, full + 1)
        exact = M * weights / weights.sum()
        sizes = np.floor(exact).astype(np.int32)
        # Largest remainders first, as in an election: the sum is M to the row.
        sizes[np.argsort(sizes - exact, kind="stable")[: M - sizes.sum()]] += 1
    elif dist == "half":
        full = max(1, G - G // 3)
        sizes = np.concatenate([[M // 2], _even(M - M // 2, full - 1)]).astype(np.int32) if full > 1 else np.array([M], np.int32)
    else:
        raise ValueError(f"dist={dist!r}: write one of {', '.join(DISTS)}.")
    spread = np.zeros(G, np.int32)
    spread[: len(sizes)] = sizes
    return np.random.default_rng(_SEED).permutation(spread)


def group_offsets(sizes: np.ndarray) -> np.ndarray:
    """Where each group starts, then where the last one ends: int32 [G + 1]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def sampled_rows(pass_name: str, shape: GroupedShape, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a pass's result are compared with float32: (group, row within lhs) in fwd and dgrad, (group, row of the group's matrix) in wgrad.

    Both ends of groups are among them, the smallest and the largest too, and in wgrad an empty one: that is where a ragged kernel goes wrong.
    """
    rng = np.random.default_rng(_SEED)
    sizes = np.diff(offsets)
    full = np.flatnonzero(sizes)
    special = [full[np.argmin(sizes[full])], full[np.argmax(sizes[full])]]
    if pass_name == "wgrad":
        special += list(np.flatnonzero(sizes == 0)[:1])
        groups = np.concatenate([special, rng.integers(0, shape.G, SAMPLED_ROWS - len(special))])
        rows = rng.integers(0, shape.K, SAMPLED_ROWS)
        rows[:2] = 0, shape.K - 1
    else:
        ends = np.concatenate([special, rng.choice(full, SAMPLED_ROWS // 4)])
        rows = np.concatenate([offsets[ends], offsets[ends + 1] - 1])
        rows = np.concatenate([rows, rng.integers(0, shape.M, SAMPLED_ROWS - len(rows))])
        groups = np.searchsorted(offsets, rows, side="right") - 1
    return groups.astype(np.int32), rows.astype(np.int32)


def _even(M: int, G: int) -> np.ndarray:
    return (M // G + (np.arange(G) < M % G)).astype(np.int32)
