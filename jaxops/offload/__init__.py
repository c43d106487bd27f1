"""Activations and optimizer state in the host's memory."""

from jaxops.offload.policies import Policy, policy
from jaxops.offload.proposals import Proposal, Residual, propose
from jaxops.offload.reports import Copy, OffloadError, Report, compiler_options, report
from jaxops.offload.residuals import named, residual_bytes
from jaxops.offload.scanning import scan

__all__ = [
    "Copy",
    "OffloadError",
    "Policy",
    "Proposal",
    "Report",
    "Residual",
    "compiler_options",
    "named",
    "policy",
    "propose",
    "report",
    "residual_bytes",
    "scan",
]
