"""One call of an op, examined: what was passed, the plan and why, time, errors, values, and what the backward keeps."""

from jaxops.inspecting.api import inspect
from jaxops.inspecting.inspection import Inspection, SideBySide

__all__ = ["Inspection", "SideBySide", "inspect"]
