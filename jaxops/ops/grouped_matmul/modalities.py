"""Which modalities a kernel launch multiplies, and which rows of the result it writes."""

import dataclasses

import jax

from jaxops.ops.grouped_matmul.plan import Tiles

Shapes = tuple[tuple[int, int, int], ...]  # of each modality's matrices: number, rows, columns
MOST = 4  # of a triton launch, whose kernel has as many results


@dataclasses.dataclass(frozen=True)
class Part:
    """A modality, as a launch sees it.

    Attributes:
      number: among all modalities.
      groups: its first group, and the end.
      runs: its rows' first run (`ragged.runs`) and the end: its groups', and next to them those that nobody multiplies, whose rows are zeros. So every run
        is one modality's, and every row is written once.
    """

    number: int
    groups: tuple[int, int]
    runs: tuple[int, int]


def shapes_of(rhs: tuple[jax.Array, ...], transpose: bool = False) -> Shapes:
    """transpose: of the transposes."""
    return tuple(
        (w.shape[0], w.shape[2], w.shape[1]) if transpose else (w.shape[0], w.shape[1], w.shape[2]) for w in rhs
    )


def first_groups(shapes: Shapes) -> list[int]:
    """Of each modality; then how many groups there are."""
    found = [0]
    for count, _, _ in shapes:
        found.append(found[-1] + count)
    return found


def parts_of(shapes: Shapes) -> list[Part]:
    """The modalities whose product is not empty, in order."""
    firsts = first_groups(shapes)
    found = [i for i, shape in enumerate(shapes) if 0 not in shape]
    # Run 1 + g is group g's, run 0 what lies before all of them; each modality also has what lies behind its groups and before the next one's.
    starts = [0, *(1 + firsts[i] for i in found[1:]), firsts[-1] + 2]
    return [Part(i, (firsts[i], firsts[i + 1]), (starts[n], starts[n + 1])) for n, i in enumerate(found)]


def launches(shapes: Shapes, tiles: tuple[Tiles, ...]) -> list[tuple[Tiles, tuple[Part, ...]]]:
    """One for all modalities of equal tiles."""
    found: dict[Tiles, list[Part]] = {}
    for part in parts_of(shapes):
        found.setdefault(tiles[part.number], []).append(part)
    most = {tiles: MOST if tiles.kernel == "triton" else len(parts) for tiles, parts in found.items()}
    return [
        (tiles, tuple(parts[i : i + most[tiles]]))
        for tiles, parts in found.items()
        for i in range(0, len(parts), most[tiles])
    ]
