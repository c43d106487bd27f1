"""Whether the devices of a job can write each other's memory."""

import contextlib
import ctypes
import functools
import importlib.util
import os

import jax

LIBRARY, OLDEST = "libnccl.so.2", (2, 29, 2)  # the first NCCL that gives a process the addresses of others' memory


def peer_memory_missing() -> str:
    """Why the GPUs of this job cannot read and write each other's memory over NVLink; "" where they can.

    All of them must be on one host, or in one NVLink domain, as JAX's `Device.partition_index` says. Several processes
    need NCCL 2.29.2 or newer.
    """
    domains = {getattr(device, "partition_index", device.process_index) for device in jax.devices()}
    if len(domains) > 1:
        return f"NVLink must connect all devices of the job, and these are on {len(domains)} hosts"
    if jax.process_count() > 1 and nccl_version() < OLDEST:
        have = "no NCCL was found" if not nccl_version() else f"this is {'.'.join(map(str, nccl_version()))}"
        return (
            f"several processes need NCCL {'.'.join(map(str, OLDEST))} or newer, and {have}: "
            "pip install -U nvidia-nccl-cu13 (or -cu12, as your JAX)"
        )
    return ""


@functools.cache
def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that XLA uses: the loaded one, else NVIDIA's package, else the system's. () where there is none."""
    packages = importlib.util.find_spec("nvidia")
    folders = [] if packages is None else packages.submodule_search_locations or []
    places = [(LIBRARY, os.RTLD_NOLOAD), *((f"{folder}/nccl/lib/{LIBRARY}", 0) for folder in folders), (LIBRARY, 0)]
    for path, mode in places:
        with contextlib.suppress(OSError):
            number = ctypes.c_int()
            ctypes.CDLL(path, os.RTLD_LAZY | mode).ncclGetVersion(ctypes.byref(number))
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    return ()
