"""Reports of programs compiled for an H200 (tests/data/offload, by jaxlib 0.11.2) and for a CPU."""

import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from jaxops._lib.hlo import Module
from jaxops.offload import Copy, OffloadError, Policy, compiler_options, report, scan
from jaxops.offload.reports import copies_of

TEXTS = {
    file.name.split(".")[0]: file.read_text()
    for file in (pathlib.Path(__file__).parents[1] / "data" / "offload").glob("*.hlo.txt")
}
SIZE = 256 * 128 * 2


def test_copies_of_our_scan():
    """Two residuals a layer: all copies have work behind them.

    The last layer's come back before the backward's loop.
    """
    copies = [
        Copy("host", SIZE, True, 3, 0),
        Copy("host", SIZE, True, 2, 0),
        Copy("device", SIZE, True, 9, 0),
        Copy("device", SIZE, True, 10, 0),
    ]
    assert copies_of(Module(TEXTS["scan"])) == [
        *copies,
        Copy("device", SIZE, False, 2, 0),
        Copy("device", SIZE, False, 2, 0),
    ]


def test_copies_of_lax_scan():
    """The same layers with `jax.checkpoint` in `jax.lax.scan`: the backward waits for its residuals."""
    assert [(copy.to, copy.behind) for copy in copies_of(Module(TEXTS["lax_scan"]))] == [
        ("host", 1),
        ("host", 1),
        ("device", 0),
        ("device", 0),
    ]


SYNCHRONOUS = """
%wrapped (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:S(5)} parameter(0)
  ROOT %c = f32[4]{0} copy(%p)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %there = f32[4]{0:S(5)} copy(%a)
  %start = (f32[4]{0}, f32[4]{0:S(5)}, u32[]) copy-start(%there)
  %work = f32[4]{0} fusion(%a), kind=kLoop, calls=%wrapped
  %product = f32[4]{0} custom-call(%a), custom_call_target="__cublas$gemm"
  %other = f32[4]{0} fusion(%a), kind=kCustom, calls=%wrapped, backend_config={"kind":"__triton_gemm"}
  %done = f32[4]{0} copy-done(%start)
  ROOT %back = f32[4]{0} copy(%there)
}
"""


def test_copies_that_are_waited_for():
    assert copies_of(Module(SYNCHRONOUS)) == [
        Copy("host", 16, False, 0, 0),
        Copy("device", 16, False, 3, 2),
        Copy("device", 16, False, 0, 0),
    ]


def fake(text, host_temp):
    """A fake compiled function of an absent machine."""
    what = dict.fromkeys(("argument", "output", "temp", "alias"), 0)
    used = {f"{where}{each}_size_in_bytes": 0 for where in ("", "host_") for each in what} | {
        "argument_size_in_bytes": 500, "output_size_in_bytes": 300, "temp_size_in_bytes": 70,
        "alias_size_in_bytes": 300, "host_temp_size_in_bytes": host_temp,
    }  # fmt: skip
    sharding = types.SimpleNamespace(device_set=[types.SimpleNamespace(platform="gpu")])
    return types.SimpleNamespace(
        memory_analysis=lambda: types.SimpleNamespace(**used),
        input_shardings=[sharding], output_shardings=[], as_text=lambda: text,
    )  # fmt: skip


def test_verify():
    found = report(fake(TEXTS["scan"], 8 * SIZE), verify=True)
    assert (found.device_bytes, found.host_bytes, len(found.copies)) == (570, 8 * SIZE, 6)
    assert "2 copies to the host, 2 of them in loops; 0 are waited for" in str(found)
    assert "; the largest has 0.00 GB, and 0 products beside it" in str(found)
    assert "2 copies to the device, 2 of them in loops; 2 are waited for" in str(
        report(fake(TEXTS["lax_scan"], 8 * SIZE))
    )
    with pytest.raises(OffloadError, match="no byte is on the host"):
        report(fake(TEXTS["scan"], 0), verify=True)
    with pytest.raises(OffloadError, match="nothing is copied there"):
        report(fake("", 8), verify=True)
    assert report(fake("", 0)).copies == (), "without verify it only reports"


def test_on_a_cpu():
    """Nothing moves, the report says so, and verify does not raise."""
    step = jax.jit(
        jax.grad(
            lambda x: jnp.sum(
                scan(lambda x, w: (jnp.sin(x) * w, None), x, jnp.ones(3), policy=Policy(offload=("carry",)))[0]
            )
        )
    )
    compiled = step.lower(jnp.ones(4)).compile()
    found = report(compiled, verify=jax.default_backend() == "cpu")
    if jax.default_backend() == "cpu":
        assert (found.platform, found.host_bytes, found.copies, compiler_options()) == ("cpu", 0, (), {})
        assert "nothing is offloaded there" in str(found)
