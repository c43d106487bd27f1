"""Where a step's time goes, what holds its memory, what the card could do, and times on the device."""

from jaxops.profiling.comparison import Comparison, compare
from jaxops.profiling.device_times import device_times_us
from jaxops.profiling.machine import Ceilings, ceilings
from jaxops.profiling.memory import Holder, Memory, memory
from jaxops.profiling.profiled import Profiled, profile
from jaxops.profiling.report import Report

__all__ = [
    "Ceilings", "Comparison", "Holder", "Memory", "Profiled", "Report", "ceilings", "compare", "device_times_us",
    "memory", "profile",
]  # fmt: skip
