"""How rows are split: groups of ragged arguments, and offsets that break the contract."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxops.inspecting.calls import Call
from jaxops.ops.quantize import Quantized
from jaxops.ops.route import Routing

OFFSETS = ("group_offsets", "sequence_offsets")


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A split of rows.

    Attributes:
      name: of the offsets (or sizes), as "group_offsets" or "routing.group_offsets".
      groups, empty: how many there are, and how many have no row.
      rows: how many the offsets divide.
      outside: rows in no group.
      largest: rows of the largest group.
      dropped: choices of tokens that have no row in a group; None where there is no `Routing`.
      problems: why the offsets are not valid; the op then gives unspecified rows.
    """

    name: str
    groups: int
    empty: int
    rows: int
    outside: int
    largest: int
    dropped: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def skew(self) -> float:
        """Rows of the largest group over those of the mean one; NaN without rows in groups."""
        inside = self.rows - self.outside
        return self.largest * self.groups / inside if inside > 0 else float("nan")


def ragged_of(call: Call, results: Any) -> tuple[Ragged, ...]:
    """Of a call's arguments, and of a Routing that it returns."""
    given = call.parameters(call.arrays)
    found = list(_of_parameters(given))
    if isinstance(results, Routing):
        found.append(_of_routing("result", results))
    return tuple(found)


def _of_parameters(given: dict[str, Any]) -> Iterator[Ragged]:
    for name, value in given.items():
        if isinstance(value, Routing):
            yield _of_routing(name, value)
        elif name in OFFSETS and value is not None:
            yield split(name, np.asarray(value), _rows_of(given))
        elif name == "group_sizes":
            sizes = np.asarray(value, np.int64)
            offsets = np.concatenate([[0], np.cumsum(sizes)])
            negative = tuple(f"size {size} of group {g} is negative" for g, size in enumerate(sizes) if size < 0)
            if given["group_offset"] is not None:  # this shard's groups
                first = int(np.asarray(given["group_offset"])[0])
                offsets = offsets[np.clip(first + np.arange(given["rhs"].shape[0] + 1), 0, len(sizes))]
            yield split(name, offsets, _rows_of(given), negative)


def _rows_of(given: dict[str, Any]) -> int:
    """What offsets divide: the rows of an op's first argument, [M, K] or a `Quantized`."""
    first = next(iter(given.values()))
    if not isinstance(first, Quantized):
        return first.shape[0]
    x = first.values_t if first.values is None else first.values.T
    return 0 if x is None else x.shape[1]


def _of_routing(name: str, routing: Routing) -> Ragged:
    offsets, positions = np.asarray(routing.group_offsets), np.asarray(routing.row_positions)
    there = (positions >= offsets[0]) & (positions < offsets[-1])
    return dataclasses.replace(
        split(f"{name}.group_offsets", offsets, routing.row_indices.shape[0]), dropped=int(np.sum(~there))
    )


def split(name: str, offsets: np.ndarray, rows: int, problems: Sequence[str] = ()) -> Ragged:
    """The split of `rows` rows by offsets [G + 1], as the kernels see it: clipped and without negative sizes."""
    offsets = offsets.astype(np.int64)
    found = [*problems]
    # Sizes that are negative have been named by themselves.
    found += [
        f"offset {i + 1} is {offsets[i + 1]}, less than the {offsets[i]} before it"
        for i in np.flatnonzero(np.diff(offsets) < 0)
        if not problems
    ]
    if offsets.min(initial=0) < 0:
        found.append(f"the least offset, {offsets.min()}, is negative")
    if offsets.max(initial=0) > rows:
        found.append(f"the largest offset, {offsets.max()}, is past the {rows} rows")
    clipped = np.clip(offsets, 0, rows)
    sizes = np.maximum(np.diff(clipped), 0)
    outside = max(0, rows - int(np.sum(sizes)))
    largest = int(sizes.max(initial=0))
    return Ragged(name, len(sizes), int(np.sum(sizes == 0)), rows, outside, largest, problems=tuple(found))
