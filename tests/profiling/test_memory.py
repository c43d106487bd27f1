"""Programs whose memory can be counted by hand, and XLA's record of it, written by hand."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxops import offload
from jaxops.offload.reports import needed_bytes
from jaxops.profiling import memory, trace
from jaxops.profiling.assignment import Held, held_at_peak, in_profile

pytestmark = pytest.mark.versions

ONE = 64 * 64 * 4  # bytes of a matrix
LAYERS, ROWS, WIDTH, HIDDEN = 5, 256, 32, 128


def three_sorts(x, y, z):
    """XLA fuses no sort, so three matrices are there at once."""
    return jnp.sum(jnp.sort(x, 0) * jnp.sort(y, 0) * jnp.sort(z, 0))


def matrices(count):
    return [jnp.ones((64, 64)) for _ in range(count)]


def test_three_matrices_at_once():
    peak = memory(jax.jit(three_sorts), *matrices(3))
    assert (peak.argument_bytes, peak.output_bytes, peak.host_bytes) == (3 * ONE, 4, 0)
    temporaries = [each.scope for each in peak.holders if each.kind == "temporary" and each.bytes == ONE]
    assert temporaries == ["sort"] * 3
    assert abs(peak.unexplained_bytes) < 0.01 * peak.peak_bytes
    arguments = [each for each in peak.holders if each.kind == "argument"]
    assert sorted(each.scope for each in arguments) == ["x", "y", "z"]
    assert all((each.shape, each.bytes, each.stage) == ("f32[64,64]", ONE, None) for each in arguments)


def test_a_donated_argument_counts_once():
    step = lambda x, y: x + y
    kept = memory(jax.jit(step), *matrices(2))
    donated = memory(jax.jit(step, donate_argnums=0), *matrices(2))
    assert (kept.peak_bytes, donated.peak_bytes) == (3 * ONE, 2 * ONE)
    assert sorted(each.kind for each in kept.holders) == ["argument", "argument", "output"]
    assert [each.kind for each in donated.holders] == ["argument", "argument"]
    assert kept.unexplained_bytes == donated.unexplained_bytes == 0


@pytest.mark.parametrize("kept", [(), ("gate",), ("gate", "up")])
def test_stacks_of_kept_residuals_are_largest(kept):
    """A gradient through a scan, where no compiler removes a recomputation."""

    def layer(x, w):
        gate = checkpoint_name(x @ w["gate"], "gate")
        up = checkpoint_name(x @ w["up"], "up")
        return x + (jnp.tanh(gate) * up) @ w["down"], None

    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    step = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0] ** 2))
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}
    peak = memory(jax.jit(step), weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    stacks = [each for each in peak.holders if each.shape == f"f32[{LAYERS},{ROWS},{HIDDEN}]"]
    assert len(stacks) == len(kept)
    assert all(each.kind == "temporary" for each in stacks)
    assert abs(peak.unexplained_bytes) < 0.01 * peak.peak_bytes


def test_named_scopes():
    def step(x, y, z):
        with jax.named_scope("model"), jax.named_scope("mlp"):
            return three_sorts(x, y, z)

    peak = memory(jax.jit(step), *matrices(3))
    assert peak.by_scope()["model/mlp/sort"] == 3 * ONE
    assert peak.by_scope(2)["model/mlp"] >= 3 * ONE
    assert list(peak.by_scope().values()) == sorted(peak.by_scope().values(), reverse=True)


def test_as_json_and_beside_the_offload_report():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    peak = memory(compiled)
    assert (peak.peak_bytes, peak.host_bytes) == needed_bytes(compiled)
    assert offload.report(compiled).device_bytes == peak.peak_bytes
    stored = json.loads(json.dumps(peak.to_dict()))
    held = sum(each["bytes"] for each in stored["holders"])
    assert stored["peak_bytes"] == peak.peak_bytes == held + stored["unexplained_bytes"]


def test_long_reports_end_with_sums():
    printed = str(memory(jax.jit(lambda *x: sum(jnp.sum(a) for a in x)), *(jnp.ones(1000 + i) for i in range(40))))
    assert " others" in printed
    assert len(printed.splitlines()) < 30
    assert max(map(len, printed.splitlines())) <= 130


def test_bad_arguments():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    with pytest.raises(TypeError, match="a compiled program alone"):
        memory(compiled, 1)
    with pytest.raises(TypeError, match=r"a function from jax\.jit or a compiled program, not function"):
        memory(three_sorts, *matrices(3))


def test_a_profile_has_the_record_of_each_loaded_program(tmp_path):
    executable = jax.jit(three_sorts).lower(*matrices(3)).compile().runtime_executable()
    with trace.recording(tmp_path):
        pass
    record = in_profile(tmp_path, "jit_three_sorts", {"x.1"})
    assert record is not None
    direct = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    assigned = executable.get_compiled_memory_stats().serialized_buffer_assignment_proto
    assert sorted(held_at_peak(*record)) == sorted(held_at_peak(direct, assigned))
    assert in_profile(tmp_path, "jit_three_sorts", {"of another program"}) is None


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(*parts):
    """Bytes of a message: pairs of a field number and an int, a string or bytes."""
    made = b""
    for field, value in parts:
        value = value.encode() if isinstance(value, str) else value
        made += varint(field << 3) + varint(value) if isinstance(value, int) else (
            varint(field << 3 | 2) + varint(len(value)) + value
        )  # fmt: skip
    return made


def buffer(id, size, *index, color=0):
    """A value that the instruction 70 + id computes."""
    return 1, message((1, id), (2, size), (3, message((3, b"".join(map(varint, index))), (4, 70 + id))), (4, color))


def block(*places, **fields):
    """An allocation of (value, offset, bytes)."""
    numbers = {"bytes": 2, "thread_local": 3, "argument": 5, "output": 7, "color": 8, "constant": 12}
    assigned = [(9, message((1, value), (2, offset), (3, size))) for value, offset, size in places]
    return 3, message(*((numbers[name], value) for name, value in fields.items()), *assigned)


def event(kind, id, shared_with=0):
    return 1, message((1, kind), (2, id), (5, shared_with))


ALLOC, FREE, SHARE = range(3)
MODULE = message((3, message(*((2, message((1, f"made.{id}"), (35, 70 + id))) for id in range(1, 8)))))


def test_the_heap_trace_decides():
    """At the peak 2 has the memory of 1, whose life is over; the host's buffer and a later one do not count."""
    record = message(
        buffer(1, 300), buffer(2, 300, 1), buffer(3, 500), buffer(4, 1000, color=5), buffer(5, 700),
        block((1, 0, 300), (2, 0, 300), (3, 300, 500), (5, 0, 700), bytes=800),
        (4, message(
            event(ALLOC, 1), event(ALLOC, 4), event(SHARE, 2, 1), event(FREE, 1), event(ALLOC, 3), event(FREE, 2),
            event(FREE, 3), event(ALLOC, 5), event(FREE, 5),
        )),
    )  # fmt: skip
    assert held_at_peak(MODULE, record) == [Held(300, "temporary", "made.2", 1), Held(500, "temporary", "made.3", 0)]


def test_without_a_trace_values_beside_each_other_stand_for_the_peak():
    record = message(
        buffer(1, 300), buffer(2, 300), buffer(3, 500), buffer(4, 90), buffer(5, 40), buffer(6, 8), buffer(7, 9),
        block((1, 0, 300), (2, 200, 300), (3, 300, 500), bytes=800),
        block((4, 0, 90), bytes=100, argument=1, output=1),
        block((5, 0, 40), (6, 0, 8), bytes=40, output=1),
        block((7, 0, 9), bytes=9, constant=1), block((7, 0, 9), bytes=9, thread_local=1),
        block((7, 0, 9), bytes=9, color=5),
    )  # fmt: skip
    assert held_at_peak(MODULE, record) == [
        Held(100, "argument", "made.4", 0), Held(40, "output", "made.5", 0), Held(500, "temporary", "made.3", 0),
        Held(300, "temporary", "made.1", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (b"\x0a\x7f\x01", "is cut off"),
        (b"\xff", "is cut off"),
        (b"\x0b", "the wire type 3"),
        (message((4, message(event(ALLOC, 9)))), "names the buffer 9"),
        (message(buffer(1, 3), (4, message(event(FREE, 1)))), "frees or shares the buffer 1"),
    ],
)
def test_an_unreadable_record_is_an_error(record, error):
    with pytest.raises(ValueError, match=error):
        held_at_peak(MODULE, record)
