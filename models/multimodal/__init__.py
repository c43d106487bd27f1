"""One transformer over documents of text and images."""

from models.multimodal.model import Multimodal, MultimodalConfig

__all__ = ["Multimodal", "MultimodalConfig"]
