"""The named workloads of several modalities. Imports numpy and shapes.py only."""

import dataclasses

import numpy as np

from benchmarks.shapes import GroupedShape, by_name, group_sizes


@dataclasses.dataclass(frozen=True)
class ModalityShape:
    """A grouped product a modality, their rows one after another."""

    name: str
    parts: tuple[GroupedShape, ...]

    @property
    def dims(self) -> dict[str, int]:
        """All groups and rows, and the widest."""
        return {
            "modalities": len(self.parts),
            **{name: sum(part.dims[name] for part in self.parts) for name in "GM"},
            **{name: max(part.dims[name] for part in self.parts) for name in "KN"},
        }

    @property
    def flops(self) -> int:
        """Of any pass: each row's own product, without padding."""
        return sum(part.flops for part in self.parts)

    def sizes(self, dist: str) -> np.ndarray:
        """Rows of each group: `group_sizes` within each modality."""
        return np.concatenate([group_sizes(dist, part.G, part.M) for part in self.parts])


MODALITIES = by_name(
    ModalityShape(
        "vision_text", (GroupedShape("vision", 8, 24576, 2048, 4096), GroupedShape("text", 64, 8192, 2048, 1024))
    ),
    ModalityShape(
        "text_image_audio",
        (
            GroupedShape("text", 32, 12288, 2048, 1408),
            GroupedShape("image", 8, 16384, 4096, 4096),
            GroupedShape("audio", 16, 4096, 1024, 768),
        ),
    ),
)
