"""A diffusion transformer over packed images of different sizes."""

from models.dit.model import DiT, DiTConfig, generate, loss_fn

__all__ = ["DiT", "DiTConfig", "generate", "loss_fn"]
