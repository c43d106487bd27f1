"""The meshes of a benchmark's option."""

import jax

from benchmarks import harness
from models.distributed.mesh import AXES, make_mesh


def meshes_of(text: str) -> list[str]:
    """Meshes as of `make_mesh`, from such as "data,fsdp=2+tensor=2": an axis alone is over all devices.

    Raises:
      typer.BadParameter: as of `make_mesh`.
    """
    devices, found = jax.device_count(), []
    for name in harness.names(text):
        mesh = make_mesh(f"{name}={devices}" if name in AXES else name.replace("+", ","))
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1} or {AXES[0]: 1}
        found.append(",".join(f"{axis}={size}" for axis, size in sizes.items()))
    return list(dict.fromkeys(found))


def axes_of(mesh: str) -> list[str]:
    return [part.partition("=")[0] for part in mesh.split(",")]


def file_name(mesh: str) -> str:
    """A mesh in a file's name: "data" for data=4 of four devices, "fsdp2_tensor2" for a mixture."""
    return axes_of(mesh)[0] if "," not in mesh else mesh.replace("=", "").replace(",", "_")
