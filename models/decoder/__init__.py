"""A decoder language model whose blocks are made of parts that the configuration chooses.

`config` names the choices, `weights`, `rope`, `attention` and `experts` have the parts, `block` puts them together, and
`model` stacks the blocks. models/hf/checkpoint.py reads and writes checkpoints of Hugging Face's architectures.
"""

from models.decoder.config import DecoderConfig, Latent, RopeScaling
from models.decoder.experts import Experts, Routed
from models.decoder.model import Cache, Decoder, document_starts, positions_in

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "Latent",
    "RopeScaling",
    "Routed",
    "document_starts",
    "positions_in",
]
