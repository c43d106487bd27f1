"""Activations and optimizer state in host memory.

`policy` chooses the values, `scan` hides their copies, `report` checks the compiled program, `propose` finds a policy.
"""

from jaxops._lib.arrays.residual_names import named
from jaxops.offload.policies import Policy, policy
from jaxops.offload.proposals import Proposal, Residual, propose
from jaxops.offload.reports import Copy, OffloadError, Report, compiler_options, report
from jaxops.offload.residuals import residual_bytes
from jaxops.offload.scanning import scan
from jaxops.offload.state import Streamed, offload_state, streamed

__all__ = [
    "Copy",
    "OffloadError",
    "Policy",
    "Proposal",
    "Report",
    "Residual",
    "Streamed",
    "compiler_options",
    "named",
    "offload_state",
    "policy",
    "propose",
    "report",
    "residual_bytes",
    "scan",
    "streamed",
]
