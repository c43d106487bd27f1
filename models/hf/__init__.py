"""Checkpoints of Hugging Face's transformers (safetensors), to and from `models.decoder.Decoder`.

docs/checkpoints.md lists architectures and features.
"""

from models.hf.checkpoint import load, save
from models.hf.config import MODELS, read_config

__all__ = ["MODELS", "load", "read_config", "save"]
