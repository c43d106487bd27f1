"""Several arrays of weights in one product, one a modality: which modalities share a launch, and which rows each one
writes."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxops._lib.planning.costs import bytes_of
from jaxops.ops.grouped_matmul.plan import Tiles

Shapes = tuple[tuple[int, int, int], ...]  # of each modality's weights: groups, rows, columns
Arrays = Sequence[jax.Array | jax.ShapeDtypeStruct]
MOST = 4  # modalities of a triton launch, whose kernel has as many results


@dataclasses.dataclass(frozen=True)
class Part:
    """A modality in a launch.

    Attributes:
      number: of the modality.
      groups: its first group, and the end.
      runs: its first run (`ragged.runs`), and the end: its groups', and adjacent runs that no modality multiplies,
        whose rows it writes as zeros. Every run belongs to one modality, so every row is written once.
    """

    number: int
    groups: tuple[int, int]
    runs: tuple[int, int]


def shapes_of(rhs: tuple[jax.Array, ...], transpose: bool = False) -> Shapes:
    """transpose: of the transposes."""
    return tuple((w.shape[0], w.shape[1 + transpose], w.shape[2 - transpose]) for w in rhs)


def first_groups(shapes: Shapes) -> list[int]:
    """Each modality's first group, then the number of all groups."""
    firsts = [0]
    for count, _, _ in shapes:
        firsts.append(firsts[-1] + count)
    return firsts


def parts_of(shapes: Shapes) -> list[Part]:
    """The modalities whose product is not empty, in order."""
    firsts = first_groups(shapes)
    numbers = [i for i, shape in enumerate(shapes) if 0 not in shape]
    # Run 0 lies before all groups, run 1 + g is group g. A modality also has the runs up to the next one's first group.
    starts = [0, *(1 + firsts[i] for i in numbers[1:]), firsts[-1] + 2]
    return [Part(i, (firsts[i], firsts[i + 1]), (starts[n], starts[n + 1])) for n, i in enumerate(numbers)]


def launches(shapes: Shapes, tiles: Sequence[Tiles]) -> list[tuple[Tiles, tuple[Part, ...]]]:
    """One launch for all modalities of equal tiles."""
    parts_by_tiles: dict[Tiles, list[Part]] = {}
    for part in parts_of(shapes):
        parts_by_tiles.setdefault(tiles[part.number], []).append(part)
    return [
        (tiles, tuple(parts[i : i + MOST] if tiles.kernel == "triton" else parts))
        for tiles, parts in parts_by_tiles.items()
        for i in range(0, len(parts), MOST if tiles.kernel == "triton" else len(parts))
    ]


def cost_of(
    parts: Sequence[Part] | None, own: Sequence[tuple[int, int, int]], G: int, rows: Arrays, weights: Arrays
) -> dict[str, int]:
    """`flops`, and with parts `bytes_accessed`, of a launch, as its keyword arguments.

    How many rows each modality has is known on the device only. Modalities of several launches share the rows as they
    share the runs, so that launches of one product count each row once. Inside a launch every row counts as one of the
    largest weights.

    Args:
      own: shapes of the launch's own weights.
      G: number of all groups.
      rows: the arrays of M rows: lhs, and the result or dout.
      weights: the launch's own, or their gradients.
    """
    M, largest = rows[0].shape[0], max(K * N for _, K, N in own)
    if parts is None:
        return {"flops": 2 * M * largest}
    runs = sum(part.runs[1] - part.runs[0] for part in parts)
    return {
        "flops": 2 * M * largest * runs // (G + 2),
        "bytes_accessed": bytes_of(*rows) * runs // (G + 2) + bytes_of(*weights),
    }
