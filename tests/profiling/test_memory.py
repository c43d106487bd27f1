"""Programs whose memory can be counted by hand."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxops
from jaxops import offload
from jaxops.offload.reports import needed_bytes
from jaxops.profiling import assignment, liveness, memory
from jaxops.profiling.hlo import parse
from jaxops.profiling.protobuf_wire import WireError, fields, number, numbers, text

ONE = 64 * 64 * 4  # bytes of a matrix
LAYERS, ROWS, WIDTH, HIDDEN = 5, 256, 32, 128


@pytest.fixture(autouse=True)
def lines():
    """A program's operations keep their Python lines, by which names are matched with values."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


def three_sorts(x, y, z):
    """XLA fuses no sort, so three matrices are there at once."""
    return jnp.sum(jnp.sort(x, 0) * jnp.sort(y, 0) * jnp.sort(z, 0))


def matrices(count):
    return [jnp.ones((64, 64)) for _ in range(count)]


def scanned(policy):
    """A gradient through a scan, where no compiler removes a recomputation."""

    def layer(x, w):
        x = checkpoint_name(x, "carry")
        gate = checkpoint_name(x @ w["gate"], "gate")
        up = checkpoint_name(x @ w["up"], "up")
        return x + (jnp.tanh(gate) * up) @ w["down"], None

    return jax.jit(
        jax.grad(lambda w, x: jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0] ** 2)),
    )


def scan_arguments():
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}
    return weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def temporaries(found, size):
    return [each for each in found.holders if each.kind == "temporary" and each.bytes == size]


def test_three_matrices_at_once():
    found = memory(jax.jit(three_sorts), *matrices(3))
    assert (found.argument_bytes, found.output_bytes, found.host_bytes) == (3 * ONE, 4, 0)
    assert [each.scope for each in temporaries(found, ONE)] == ["sort"] * 3
    assert abs(found.unexplained_bytes) < 0.01 * found.peak_bytes
    arguments = [each for each in found.holders if each.kind == "argument"]
    assert sorted(each.scope for each in arguments) == ["x", "y", "z"]
    assert all((each.shape, each.bytes, each.stage) == ("f32[64,64]", ONE, None) for each in arguments)
    assert "no value of the step has a name" in str(found)


def test_a_donated_argument_counts_once():
    step = lambda x, y: x + y
    kept = memory(jax.jit(step), *matrices(2))
    donated = memory(jax.jit(step, donate_argnums=0), *matrices(2))
    assert (kept.peak_bytes, donated.peak_bytes) == (3 * ONE, 2 * ONE)
    assert [each.kind for each in kept.holders] == ["argument", "argument", "output"]
    assert [each.kind for each in donated.holders] == ["argument", "argument"]
    assert kept.unexplained_bytes == donated.unexplained_bytes == 0


@pytest.mark.parametrize("kept", [(), ("gate",), ("gate", "up"), ("carry", "up")])
def test_kept_residuals_are_named_and_others_are_not_there(kept):
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    found = memory(scanned(policy), *scan_arguments())
    stacks = {name: LAYERS * ROWS * (WIDTH if name == "carry" else HIDDEN) * 4 for name in ("carry", "gate", "up")}
    # The scan's carry is a residual of the loop, whether a policy names it or not.
    assert {name: found.by_name().get(name, 0) >= size for name, size in stacks.items()} == {
        name: name in kept or name == "carry" for name in stacks
    }
    for name in kept:
        (stack,) = (each for each in found.holders if each.name == name and each.bytes == stacks[name])
        assert (stack.stage, stack.kind, stack.shape[:6]) == ("forward", "temporary", f"f32[{LAYERS},")
    assert not any(each.maybe for each in found.holders)
    assert sum(found.by_name().values()) == found.peak_bytes - found.unexplained_bytes
    assert abs(found.unexplained_bytes) < 0.01 * found.peak_bytes


def test_nothing_saveable_keeps_no_name():
    names = memory(scanned(jax.checkpoint_policies.nothing_saveable), *scan_arguments()).by_name()
    assert set(names) <= {None, "carry"}


def test_values_of_one_line_are_not_told_apart():
    """Two products of one expression, one in each iteration of a comprehension: their metadata are equal."""

    def loss(x, y, z):
        kept = [jnp.sort(checkpoint_name(jnp.sort(a, 0), name), 1) for a, name in ((x, "one"), (y, "two"), (z, "one"))]
        return jnp.sum(kept[0] * kept[1] * kept[2])

    found = memory(jax.jit(loss), *matrices(3))
    assert {(each.name, each.maybe) for each in found.holders if each.kind == "temporary"} >= {(None, ("one", "two"))}
    assert not any(each.name for each in found.holders)
    assert "one or two?" in found.by_name()
    assert "one or two?" in str(found)
    assert "are uncertain" in str(found)


def test_a_program_from_a_cache_has_no_names_of_an_older_source(tmp_path):
    """A line further down, `one` stands where `two` stood."""
    source = [
        "def loss(x, y):",
        "    a = jnp.sort(checkpoint_name(jnp.sort(x, 0), 'one'), 1)",
        "    b = jnp.sort(checkpoint_name(jnp.sort(y, 0), 'two'), 1)",
        "    return jnp.sum(a * b) + jnp.sum(b)",
    ]
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, key)
    jax.config.update(key, 0)
    try:
        found = []
        for lines in (source, ["", *source]):
            scope = {"jnp": jnp, "checkpoint_name": checkpoint_name}
            exec(compile("\n".join(lines), str(tmp_path / "of_a_user.py"), "exec"), scope)
            found.append(memory(jax.jit(scope["loss"]), *matrices(2)))
    finally:
        jax.config.update(key, before)
    assert found[0] == found[1]
    assert {"one", "two"} <= set(found[0].by_name())


@pytest.mark.gpu
def test_xlas_heap_trace_agrees_with_the_schedule():
    policy = jax.checkpoint_policies.save_only_these_names("gate")
    compiled = scanned(policy).lower(*scan_arguments()).compile()
    text = compiled.as_text() or ""
    held = assignment.live_at_peak(assignment.from_profile(parse(text)))
    live = liveness.live_at_peak(liveness.buffers(parse(text), text))
    assert held is not None
    assert abs(sum(each.bytes for each in held) - sum(each.bytes for each in live)) < 0.01 * needed_bytes(compiled)[0]


def test_residuals_of_jaxops():
    x, router = jnp.ones((64, 16)), jnp.ones((16, 4))
    gate, up, down = jnp.ones((4, 16, 32)), jnp.ones((4, 16, 32)), jnp.ones((4, 32, 16))

    def layer(x):
        return x + jaxops.moe_mlp(x, gate, up, down, jaxops.route(x @ router, k=2))

    def names(policy):
        found = memory(jax.jit(jax.grad(lambda x: jnp.sum(jax.checkpoint(layer, policy=policy)(x) ** 2))), x)
        assert abs(found.unexplained_bytes) < 0.01 * found.peak_bytes
        return {name for each in found.holders for name in (each.name, *each.maybe)}

    # On a CPU both products are alike: only their sum is certain.
    assert names(offload.Policy(keep=("moe_mlp", "route"))) >= {"moe_mlp.gate", "moe_mlp.up"}


def test_scopes_are_modules_and_named_scopes():
    def step(x, y, z):
        with jax.named_scope("model"), jax.named_scope("mlp"):
            return three_sorts(x, y, z)

    found = memory(jax.jit(step), *matrices(3))
    assert found.by_scope()["model/mlp/sort"] == found.by_scope(2)["model/mlp"] - 4 == 3 * ONE
    assert list(found.by_scope().values()) == sorted(found.by_scope().values(), reverse=True)


def test_as_json_and_beside_the_offload_report():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    found = memory(compiled)
    assert (found.peak_bytes, found.host_bytes) == needed_bytes(compiled)
    assert offload.report(compiled).device_bytes == found.peak_bytes
    stored = json.loads(json.dumps(found.to_dict()))
    assert (
        stored["peak_bytes"]
        == found.peak_bytes
        == sum(each["bytes"] for each in stored["holders"]) + stored["unexplained_bytes"]
    )
    assert "names of residuals are unknown: pass the jitted function" in str(found)


def test_long_reports_end_with_sums():
    printed = str(memory(jax.jit(lambda *x: sum(jnp.sum(a) for a in x)), *(jnp.ones(1000 + i) for i in range(40))))
    assert " others" in printed
    assert "not explained" in printed or "counted twice" in printed
    assert len(printed.splitlines()) < 30
    assert max(map(len, printed.splitlines())) <= 130


def test_bad_arguments():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    with pytest.raises(TypeError, match="a compiled program alone"):
        memory(compiled, 1)
    with pytest.raises(TypeError, match=r"a function from jax\.jit or a compiled program, not function"):
        memory(three_sorts, *matrices(3))


# XLA's record.


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(*parts):
    """Bytes of a message: pairs of a field number and an int, a string or bytes."""
    found = b""
    for field, value in parts:
        value = value.encode() if isinstance(value, str) else value
        found += varint(field << 3) + varint(value) if isinstance(value, int) else (
            varint(field << 3 | 2) + varint(len(value)) + value
        )  # fmt: skip
    return found


def buffer(id, size, *index, color=0):
    return 1, message((1, id), (2, size), (3, message((3, b"".join(map(varint, index))))), (4, color))


def event(kind, id, name, shared_with=0):
    return 1, message((1, kind), (2, id), (4, name), (5, shared_with))


ALLOC, FREE, SHARE = range(3)


def faked(compiled, record, text=None):
    """The compiled program, with another record or text."""
    used = compiled.memory_analysis()
    names = (name for name in dir(used) if name.endswith("_in_bytes"))
    used = types.SimpleNamespace(
        **{name: getattr(used, name) for name in names}, serialized_buffer_assignment_proto=record
    )
    return types.SimpleNamespace(
        memory_analysis=lambda: used, as_text=lambda: compiled.as_text() if text is None else text
    )  # fmt: skip


def test_the_heap_trace_decides():
    """At the peak `b` has the memory of `a`, whose life is over; the host's buffer and a later one do not count."""
    record = message(
        buffer(1, 300), buffer(2, 300, 1), buffer(3, 500), buffer(4, 1000, color=5), buffer(5, 700),
        (4, message(
            event(ALLOC, 1, "a"), event(ALLOC, 4, "host"), event(FREE, 1, "a"), event(SHARE, 2, "b", 1),
            event(ALLOC, 3, "c"), event(FREE, 2, "b"), event(FREE, 3, "c"), event(ALLOC, 5, "d"), event(FREE, 5, "d"),
        )),
    )  # fmt: skip
    held = assignment.live_at_peak(record) or []
    assert sorted((each.bytes, each.places) for each in held) == [(300, (("a", 0), ("b", 1))), (500, (("c", 0),))]

    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    found = memory(faked(compiled, record))
    assert [each.bytes for each in found.holders if each.kind == "temporary"] == [500, 300]
    assert found.unexplained_bytes == found.temporary_bytes - 800
    assert "those of XLA's heap trace" in str(found)


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (b"", "hands out no heap trace"),
        (message(buffer(1, 300)), "hands out no heap trace"),
        (b"\x0a\x7f\x01", "unreadable (field 1 ends 126 bytes behind"),
        (b"\xff", "unreadable (a varint is cut off"),
        (b"\x0b", "unreadable (field 1 has the wire type 3"),
        (message((4, message(event(ALLOC, 9, "a")))), "unreadable (the trace names the buffer 9"),
        (
            message(buffer(1, 3), (4, message(event(FREE, 1, "a")))),
            "unreadable (the trace frees or shares the buffer 1",
        ),
    ],
)
def test_without_a_readable_trace_the_schedule_decides(record, note):
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    found = memory(faked(compiled, record))
    assert len(temporaries(found, ONE)) == 3
    assert any(note in each for each in found.notes)


def test_without_a_text_the_holders_are_unknown():
    found = memory(faked(jax.jit(three_sorts).lower(*matrices(3)).compile(), b"", ""))
    assert found.holders == ()
    assert found.peak_bytes == found.unexplained_bytes > 3 * ONE
    assert "the holders are unknown" in str(found)


def test_a_profile_has_the_record_of_each_loaded_program():
    compiled = jax.jit(three_sorts).lower(*matrices(3)).compile()
    other = jax.jit(lambda x: x).lower(1).compile()
    assert assignment.from_profile(parse(compiled.as_text() or ""))
    renamed = (other.as_text() or "").replace("%", "%other_")
    assert not assignment.from_profile(parse(renamed))


def test_wire_format():
    found = fields(message((1, 300), (2, "name"), (3, varint(1) + varint(500)), (3, 7)) + b"\x25\x00\x00\x80\x3f")
    assert (number(found, 1), text(found, 2), numbers(found, 3)) == (300, "name", (1, 500, 7))
    assert (number(found, 9), text(found, 9), numbers(found, 9), found[4]) == (0, "", (), [b"\x00\x00\x80\x3f"])
    for wrong in (lambda: number(found, 2), lambda: text(found, 1)):
        with pytest.raises(WireError):
            wrong()


# The schedule.


HLO = """HloModule m, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

%update (stack: f32[4,8], row: f32[1,8], i: s32[]) -> f32[4,8] {
  %stack = f32[4,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[4,8]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
}

%condition (c: (s32[], f32[4,8])) -> pred[] {
  %c = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %more = pred[] custom-call(%c), custom_call_target="more"
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %s = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %work = f32[100]{0} custom-call(%n), custom_call_target="work", metadata={op_name="jit(f)/work"}
  %made = f32[1,8]{1,0} custom-call(%work), custom_call_target="make", metadata={op_name="jit(f)/jvp()/make"}
  %stored = f32[4,8]{1,0} fusion(%s, %made, %n), kind=kLoop, calls=%update
  %next = s32[] add(%n, %n)
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%next, %stored)
}

ENTRY %main (x: f32[50], y: f32[10]) -> (f32[50], f32[10], f32[4,8]) {
  %x = f32[50]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %host = (f32[50]{0:S(5)}, f32[50]{0}, u32[]) copy-start(%x)
  %start = f32[4,8]{1,0} broadcast(%y)
  %counter = s32[] copy(%y)
  %init = (s32[], f32[4,8]{1,0}) tuple(%counter, %start)
  %loop = (s32[], f32[4,8]{1,0}) while(%init), condition=%condition, body=%body
  %rows = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %there = f32[50]{0:S(5)} copy-done(%host)
  %back = f32[50]{0} copy(%there)
  %again = f32[50]{0} custom-call(%back), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}
  %square = f32[10]{0} custom-call(%y), custom_call_target="g"
  ROOT %result = (f32[50]{0}, f32[10]{0}, f32[4,8]{1,0}) tuple(%again, %square, %rows)
}
"""


def test_buffers_of_a_schedule():
    """A loop's stack is one buffer from its start to the result, updated in place."""
    found = liveness.buffers(parse(HLO), HLO)
    of = {name: each for each in found for name, leaf in each.places if not leaf}
    # Which names have the memory of another one.
    for one, other, kind in (
        ("start", "stored", "output"),
        ("back", "again", "output"),
        ("y", "square", "argument"),
        ("counter", "next", "temporary"),
    ):
        assert of[one] is of[other]
        assert of[one].kind == kind
    assert ("loop", 1) in of["start"].places
    assert of["start"].bytes == 128
    assert {name for name, each in of.items() if each.on_host} == {"host"}
    # `row` fits into the output that `back` writes later.
    assert sorted(each.places[0][0] for each in liveness.live_at_peak(found)) == ["counter", "work"]


def test_what_fills_a_stack_describes_it():
    size = LAYERS * ROWS * WIDTH * 4
    found = memory(scanned(jax.checkpoint_policies.nothing_saveable), *scan_arguments())
    (stack,) = (each for each in temporaries(found, size) if each.name == "carry")
    assert (stack.scope.split("/")[-1], stack.shape, stack.stage) == ("add", f"f32[{LAYERS},{ROWS},{WIDTH}]", "forward")
