"""Activations and optimizer state in the host's memory."""

from jaxops.offload.policy import Policy, policy, residual_bytes
from jaxops.offload.scan import scan

__all__ = ["Policy", "policy", "residual_bytes", "scan"]
