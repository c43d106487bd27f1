"""Training by several processes, such as one a host: `jax.distributed` from options, JAX's variables or a cluster's."""

import os

import jax
import numpy as np
import typer
from jax.experimental import multihost_utils

MOST_BYTES = 8192  # of a text that processes exchange: twice the longest path


def initialize(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Connects the processes of a run. Call it in each of them before anything asks JAX for its devices.

    None is taken from the environment of SLURM or Open MPI, or asked from Kubernetes (with `pip install jax[k8s]`) or
    Cloud TPU. The coordinator is HOST:PORT of process 0; also $JAX_COORDINATOR_ADDRESS.

    Under SLURM and Open MPI a process that is alone on its host has all its GPUs. Otherwise it has one: that with its
    number on the host, or the only one that the cluster lets it see. $JAX_LOCAL_DEVICE_IDS, such as 0,1, says others.
    """
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except ValueError as error:
        raise typer.BadParameter(
            f"{error} No cluster was found that says it: write --coordinator HOST:PORT --processes N --process-id I, "
            "with the same HOST:PORT in every process.",
            param_hint="--distributed",
        ) from error
    if _has_all():
        jax.config.update("jax_cuda_visible_devices", "all")


def _has_all() -> bool:
    """Whether the process has all GPUs that it sees; by JAX's rule a cluster's process has the one with its number."""
    said = os.environ
    if said.get("JAX_LOCAL_DEVICE_IDS"):
        return False
    one_a_host = "SLURM_NTASKS" in said and said["SLURM_NTASKS"] == said.get("SLURM_STEP_NUM_NODES")
    alone = one_a_host or said.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    visible = said.get("CUDA_VISIBLE_DEVICES", "")
    return alone or (visible != "" and "," not in visible)


def is_first() -> bool:
    """Whether this process writes pictures, logs and the model."""
    return jax.process_index() == 0


def exchanged(text: str) -> str:
    """The first text that is not "", in the order of processes. All of them call it, and get the same one.

    An error that one process finds must end the others too, which would wait for it in the next collective.
    """
    if jax.process_count() == 1:
        return text
    padded = text.encode(errors="surrogateescape")[:MOST_BYTES].ljust(MOST_BYTES, b"\0")
    found = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return next(filter(None, (bytes(each).rstrip(b"\0").decode(errors="surrogateescape") for each in found)), "")
