"""Into how many parts wgrad's sums over long groups are split: a rule of static shapes.

Rows of groups are known on the device only. A split that helps one group of nearly all rows should cost balanced groups
little, so `choose_split` weighs both: sums of less than two parts' rows stay whole, and then cost up to 2 us more
(waves.csv of an H100's results in profiles/, 2026-11-27).
"""

import dataclasses

from jaxops._lib.ragged.work_list import STEP_ROWS, least_rows_of_part

_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
_MOST_BYTES = 128 << 20  # of all parts in float32
_LEAST_STEPS = 4  # of a part: a shorter one takes no longer to multiply than to store and to add
_LEAST_GAIN = 0.05  # of more parts: with 2 % some of a few long groups took up to 12 % longer (waves.csv)


@dataclasses.dataclass(frozen=True)
class Sums:
    """wgrad's tiles, as far as the rule needs them. Times are clocks of a multiprocessor.

    Attributes:
      G, M, K, N: groups and rows; a group's result is [K, N].
      bm, bn: of a tile.
      step: time of a step of STEP_ROWS rows, if the multiprocessor is the only one that loads.
      loads: time in which L2 delivers a step's operands, if all multiprocessors load.
      store: time to write a tile in 16 bits.
      overlaps: whether what follows the steps overlaps the next tile's (ping-pong).
      whole: no sum can be split.
      cores: multiprocessors, or clusters of them that compute a tile together.
    """

    G: int
    M: int
    K: int
    N: int
    bm: int
    bn: int
    step: float
    loads: float
    store: float
    overlaps: bool
    whole: bool
    cores: int

    @property
    def tiles(self) -> int:
        """Of a group."""
        return -(-self.K // self.bm) * -(-self.N // self.bn)

    @property
    def part(self) -> float:
        """Time to write or to read a part in float32: few programs do it at the end. Fitted to nine such times of
        an H200, which were 1.2 to 2 times those of the bytes."""
        return 10 * self.store

    @property
    def delivery(self) -> float:
        """Time in which L2 delivers all operands."""
        return self.tiles * self.M / STEP_ROWS * self.loads

    def time(self, longest: int, split: int) -> float:
        """If one group has `longest` rows and the others share the rest equally."""
        least, rest = least_rows_of_part(self.M, split), (self.M - longest) / max(self.G - 1, 1)
        parts = longest // least if longest >= 2 * least else 1
        of_rest = int(rest // least) if rest >= 2 * least else 1
        long, short = self._tile(longest, parts), self._tile(rest, of_rest)
        like = longest <= 1.1 * rest  # balanced: all groups' tiles are equally long
        count = self.tiles * parts * (self.G if like else 1)
        others = 0 if like else (self.G - 1) * self.tiles * of_rest * short
        # The last part of a tile reads all parts. Earlier tiles' last parts do so while others still multiply.
        add = parts * self.part + self.store if parts > 1 else 0
        waves = -(-count // self.cores)
        work = count * long + others + self.tiles * add
        return max(waves * long, work / self.cores, self.delivery) + add

    def _tile(self, rows: float, parts: int) -> float:
        steps, after = -(-rows // (STEP_ROWS * parts)) * self.step, self.part if parts > 1 else self.store
        return max(steps, after) if self.overlaps else steps + after

    def legal(self, split: int) -> bool:
        small = 4 * split * self.tiles * self.bm * self.bn <= _MOST_BYTES
        return split == 1 or (small and not self.whole and split * _LEAST_STEPS * STEP_ROWS <= self.M)


def choose_split(sums: Sums) -> int:
    """The least split within 5 % of the best, counting balanced groups and one group of nearly all rows alike."""
    if 0 in (sums.G, sums.M, sums.tiles):
        return 1
    times = _times(sums)
    least = [min(column) for column in zip(*times.values(), strict=True)]
    cost = {split: sum(t / best for t, best in zip(row, least, strict=True)) for split, row in times.items()}
    good = (1 + _LEAST_GAIN) * min(cost.values())
    return next(split for split in times if cost[split] <= good)


def time_of_best_split(sums: Sums) -> float:
    """Of balanced groups and of one of nearly all rows, together."""
    return sum(_times(sums)[choose_split(sums)])


def _times(sums: Sums) -> dict[int, tuple[float, ...]]:
    cases = (-(-sums.M // sums.G), max(1, sums.M - sums.G + 1))
    return {split: tuple(sums.time(rows, split) for rows in cases) for split in _TRIED if sums.legal(split)}
