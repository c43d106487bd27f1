"""Training by several processes, such as one a host: `jax.distributed` from options, JAX's own variables or a cluster's."""

import jax
import typer
from rich.console import Console


def initialize(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Lets the processes of a run find each other; before anything else asks JAX for its devices, in every one of them.

    What is None comes from the environment: under SLURM, Open MPI, Kubernetes and on Cloud TPU everything does.

    Args:
      coordinator: HOST:PORT, where process 0 can be reached by the others; also $JAX_COORDINATOR_ADDRESS.
      processes, process_id: how many there are, and this one's number from 0.

    Raises:
      typer.BadParameter: neither the options nor the environment say who takes part.
    """
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except ValueError as error:
        raise typer.BadParameter(
            f"{error} No cluster was found that says it: write --coordinator HOST:PORT --processes N --process-id I, with the same HOST:PORT in every process.",
            param_hint="--distributed",
        ) from error


def is_first() -> bool:
    """Whether this process is the one that writes pictures, logs and the model."""
    return jax.process_index() == 0


def make_console() -> Console:
    """Of the first process, or what prints nothing; made after `initialize`."""
    return Console(highlight=False, soft_wrap=True, quiet=not is_first())
