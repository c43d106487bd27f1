"""Lowers a function for an NVIDIA H200 without one."""

import contextlib
import re
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@contextlib.contextmanager
def on_h200(devices: int = 1):
    """Traces and lowers as on one H200, or on several."""
    mesh = AbstractMesh(
        (devices,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H200
    )  # JAX 0.12's default is Explicit
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def lower_for_h200(fn, *shapes) -> str:
    """The StableHLO of fn for an H200, what it calls standing where it is called; shapes are jax.ShapeDtypeStruct."""
    with on_h200():
        return inlined(jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())


def inlined(text: str) -> str:
    """The lines of StableHLO's main function, and for each call those of the function that is called."""
    functions: dict[str, list[str]] = {}
    for line in text.splitlines():
        if header := re.match(r"  func\.func \w+ @([\w.]+)\(", line):
            functions[header[1]] = body = []
        elif functions and line.startswith("    "):
            body.append(line)

    def lines(name: str) -> Iterator[str]:
        for line in functions[name]:
            call = re.search(r"(?:^|[ =]|func\.)call @([\w.]+)\(", line)
            yield from lines(call[1]) if call else [line]

    return "\n".join(lines("main"))


CALL = r"stablehlo\.custom_call @(?:__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi)\("
COST = r'mhlo\.frontend_attributes = \{jaxops_bytes = "(\d+)", jaxops_flops = "(\d+)", latency_metadata = "(\d+)"\}'


def costs_of(text: str) -> list[tuple[str, int, int]]:
    """(name, FLOPs, bytes) of each kernel; the name is empty where the call does not have it."""
    found = []
    for line in text.splitlines():
        if re.search(CALL, line):
            cost, name = re.search(COST, line), re.search(r'name = "(\w+)", num_stages', line)
            assert cost, f"a kernel without a cost: {line[:200]} ... {line[-600:]}"
            found.append((name[1] if name else "", int(cost[2]), int(cost[1])))
    assert text.count("jaxops_flops") == text.count("jaxops_bytes") == len(found), "a cost of what is no kernel"
    return found


def pallas_costs(fn, *shapes) -> list[tuple[str, int, int]]:
    return costs_of(lower_for_h200(fn, *shapes))
