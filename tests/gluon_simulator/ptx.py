"""Inline assembly: the PTX instructions that jaxops' kernels use, over all elements or threads at once.

A snippet runs once for each group of `pack` elements; of numbers once for each thread of the partition, which may
leave different numbers in them (`Tensor.lanes`). An instruction that is not in the table is an error.
"""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.gluon_simulator import machine
from tests.gluon_simulator.machine import SimulationError
from tests.gluon_simulator.tensors import Tensor, Type, joined_halves

_F32, _BF16, _E4M3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def _f(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(_F32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, _F32).view(np.uint32)


def _flushed(x: np.ndarray) -> np.ndarray:
    """.ftz: a subnormal number is zero."""
    return np.where(np.abs(x) < np.finfo(_F32).tiny, np.copysign(_F32(0), x), x).astype(_F32)


def _floats(function: Callable, ftz: bool = False) -> Callable:
    def apply(*operands):
        numbers = [_f(x) for x in operands]
        found = function(*map(_flushed, numbers)) if ftz else function(*numbers)
        return _bits(_flushed(found) if ftz else found)

    return apply


def _fma(a, b, c):
    return (a.astype(np.float64) * b + c).astype(_F32)


def _fma_down(a, b, c):
    exact = a.astype(np.float64) * b + c
    near = exact.astype(_F32)
    return np.where(near > exact, np.nextafter(near, _F32(-np.inf)), near)


def _halves(x: np.ndarray) -> np.ndarray:
    """The two bfloat16 of 32 bits, the lower first."""
    return np.ascontiguousarray(x, np.uint32)[..., None].view(np.uint16).view(_BF16)


def _of_pairs(function: Callable) -> Callable:
    def apply(*operands):
        found = function(*(_halves(x).astype(_F32) for x in operands)).astype(_BF16)
        return np.ascontiguousarray(found).view(np.uint32)[..., 0]

    return apply


def _to_bf16x2(high, low):
    pair = np.stack([_f(low), _f(high)], axis=-1).astype(_BF16)
    return np.ascontiguousarray(pair).view(np.uint32)[..., 0]


def _to_e4m3x2(high, low):
    """Saturates; NaN stays NaN."""
    pair = np.clip(np.stack([_f(low), _f(high)], axis=-1), -448, 448).astype(_E4M3)
    return np.ascontiguousarray(pair).view(np.uint16)[..., 0].astype(np.uint32)


def _signed(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.int32)


# By name; their results and operands are registers' bits.
INSTRUCTIONS: dict[str, Callable] = {
    "mov.b32": lambda x: x, "mov.u32": lambda x: x, "mov.b16": lambda x: x, "mov.f32": lambda x: x,
    "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "setp.eq.u32": lambda a, b: a == b, "setp.lt.u32": lambda a, b: a < b,
    "setp.le.s32": lambda a, b: _signed(a) <= _signed(b), "selp.f32": lambda a, b, p: np.where(p, a, b),
    "mad.wide.u32": lambda a, b, c: a.astype(np.uint64) * b + c,
    "add.f32": _floats(np.add), "add.rn.f32": _floats(np.add), "sub.rn.f32": _floats(np.subtract),
    "mul.f32": _floats(np.multiply), "mul.rn.f32": _floats(np.multiply), "neg.f32": _floats(np.negative),
    "abs.f32": _floats(np.abs), "div.full.f32": _floats(np.divide), "fma.rn.f32": _floats(_fma),
    "fma.rm.f32": _floats(_fma_down), "ex2.approx.ftz.f32": _floats(np.exp2, True),
    "rcp.approx.ftz.f32": _floats(np.reciprocal, True),
    "tanh.approx.f32": _floats(np.tanh),
    "rsqrt.approx.ftz.f32": _floats(lambda x: 1 / np.sqrt(x), True),
    "cvt.sat.f32.f32": _floats(lambda x: np.where(np.isnan(x), _F32(0), np.clip(x, 0, 1))),
    "cvt.rn.bf16x2.f32": _to_bf16x2, "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3x2,
    "max.bf16x2": _of_pairs(np.fmax), "fma.rn.bf16x2": _of_pairs(_fma),
    "shfl.sync.idx.b32": lambda x, lane, _clamp, _mask: x.reshape(-1, 32)[:, lane[0]].repeat(32),
}  # fmt: skip
# Threads of a warp and of a partition are simulated together: these order nothing more.
_NOTHING = ("fence.", "bar.warp.sync", "nanosleep.u32")


def atomic(address: int, change: Callable[[int], int], order: str = "relaxed") -> int:
    """Changes 32 bits of global memory and returns what was there. Orders of memory pass clocks on."""
    agent = machine.current()
    agent.pause()
    array, offset = agent.machine.memory.find(np.array([address]), 4)
    numbers = array.numbers.view(np.int32)
    before = int(numbers[offset[0] // 4])
    after = change(before)
    if after != before:
        array.check_written()
    if order in ("acq_rel", "acquire") and address in agent.machine.atomics:
        agent.acquire(*agent.machine.atomics[address])
    if order in ("acq_rel", "release"):
        if agent.stored:
            raise SimulationError("one thread releases what other threads stored: no barrier between them")
        clock, published = agent.release()
        old = agent.machine.atomics.get(address)
        agent.machine.atomics[address] = (
            (np.maximum(clock, old[0]), np.maximum(published, old[1])) if old else (clock, published)
        )
    numbers[offset[0] // 4] = np.int64(after).astype(np.int32)
    return before


class _Run:
    def __init__(self, registers: dict[str, np.ndarray], count: int, threads: bool):
        self.registers, self.count, self.threads = registers, count, threads

    def value(self, text: str) -> np.ndarray:
        if text.startswith("{"):  # the lower half first
            low, high = (self.value(x.strip()) for x in text.strip("{}").split(","))
            return (low & 0xFFFF) | (high << 16)
        if text in self.registers:
            return self.registers[text]
        if text == "%laneid":
            if not self.threads:
                raise SimulationError("%laneid in a snippet over elements")
            return np.arange(self.count, dtype=np.uint32) % 32
        if text == "%cluster_ctarank":
            return np.full(self.count, machine.current().rank, np.uint32)
        if text.startswith("0f"):
            return np.full(self.count, int(text[2:], 16), np.uint32)
        if re.fullmatch(r"0x[0-9a-f]+|\d+", text):
            return np.full(self.count, int(text, 0), np.uint64 if int(text, 0) >> 32 else np.uint32)
        raise SimulationError(f"what is {text!r} in inline assembly?")

    def run(self, text: str) -> None:
        body = text.strip()
        body = body[1:-1] if body.startswith("{") else body
        lines, labels = [], {}
        for line in (x.strip() for x in re.sub(r"(\w+):", r"\1:;", body).split(";")):
            if line.endswith(":"):
                labels[line[:-1]] = len(lines)
            elif line and not line.startswith(".reg"):
                lines.append(line)
        at = spins = 0
        while at < len(lines):
            at = self.step(lines[at], at, labels)
            spins += 1
            if spins > 100_000:
                raise SimulationError(f"a loop in inline assembly that does not end: {lines[at]}")

    def step(self, line: str, at: int, labels: dict[str, int]) -> int:
        match = re.fullmatch(r"(?:@(\w+)\s+)?(\S+)\s*(.*)", line, re.DOTALL)
        assert match is not None
        active = self.registers[match[1]].astype(bool) if match[1] else np.ones(self.count, bool)
        name, operands = match[2], re.findall(r"\{[^}]*\}|[^,\s]+", match[3])
        if name.startswith("bra"):
            if active.any() != active.all():
                raise SimulationError("threads that branch apart")
            if active.all() and labels[operands[0]] <= at:  # it waits for others
                agent = machine.current()
                agent.machine.switch(agent)
            return labels[operands[0]] if active.all() else at + 1
        if name.startswith(_NOTHING):
            if "proxy.async" in name:
                machine.current().fence()
            if name == "bar.warp.sync":
                machine.current().stored = False
        elif name.startswith(("atom.", "red.", "ld.", "st.")):
            self.access(name, operands, active)
        elif name not in INSTRUCTIONS:
            raise SimulationError(f"the instruction {name} of inline assembly is not in the simulator's table")
        else:
            with np.errstate(all="ignore"):
                found = INSTRUCTIONS[name](*(self.value(x) for x in operands[1:]))
            self.put(operands[0], found, active)
        return at + 1

    def put(self, register: str, value: np.ndarray, active: np.ndarray) -> None:
        before = self.registers.get(register, value)
        self.registers[register] = value if active.all() else np.where(active, value, before)

    def access(self, name: str, operands: list[str], active: np.ndarray) -> None:
        order = next((x for x in ("acq_rel", "acquire", "release") if f".{x}" in name), "relaxed")
        into = operands.pop(0) if name.startswith(("atom.", "ld.")) else None
        addresses = self.value(operands[0].strip("[]"))
        given = self.value(operands[1]) if len(operands) > 1 else None
        found = np.zeros(self.count, np.uint32)
        for i in np.flatnonzero(active):
            number = 0 if given is None else int(_signed(given)[i])
            kind = name.partition(".")[0]
            change = lambda old, kind=kind, number=number: {"ld": old, "st": number}.get(kind, old + number)
            found[i] = np.int64(atomic(int(addresses[i]), change, order)) & 0xFFFFFFFF
            if name.startswith("ld.") and (addresses == addresses[i]).all():
                found[:] = found[i]  # one load for all threads, as a warp does
                break
        if into is not None:
            self.put(into, found, active)


def run(text: str, constraints: str, args: list[Tensor], type: Type, pack: int) -> Tensor:
    kinds = [x.strip(" =&") for x in constraints.split(",")]
    results = sum("=" in x for x in constraints.split(","))
    shape = np.broadcast_shapes(*(x.data.shape for x in args))
    threads = not shape or any(x.lanes is not None for x in args)
    count = 32 * machine.current().warps if threads else int(np.prod(shape)) // pack
    registers: dict[str, np.ndarray] = {}
    number = results
    for arg in args:
        data = arg.used() if arg.lanes is None else arg.lanes
        data = np.broadcast_to(data, (count,) if threads else shape)
        for register in _registers(data.reshape(count, -1)):
            registers[f"${number}"] = register
            number += 1
    if number != len(kinds):
        raise SimulationError(f"{number} registers for the constraints {constraints!r}")
    run = _Run(registers, count, threads)
    run.run(text)
    found = np.stack([registers[f"${i}"] for i in range(results)], axis=-1).astype(np.uint32)
    size = pack * type.itemsize
    if size > 4 * results:
        raise SimulationError(f"{results} registers for {pack} results of {type.name}")
    raw = np.ascontiguousarray(found).view(np.uint8)[:, :size]
    numbers = np.ascontiguousarray(raw).view(type.numpy)
    if not threads:
        return Tensor(numbers.reshape(shape), type, joined_halves(*args))
    numbers = numbers.reshape(count)
    if (numbers.view(np.uint32) == numbers.view(np.uint32)[0]).all():
        return Tensor(numbers[0], type)
    return Tensor(0, type, lanes=numbers)


def _registers(data: np.ndarray) -> list[np.ndarray]:
    """Of each group of elements its registers of 32 bits, or 64."""
    data = np.ascontiguousarray(data)
    if data.dtype.itemsize == 8:
        return [data[:, i].view(np.uint64) for i in range(data.shape[1])]
    raw = data.view(np.uint8)
    raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
    words = np.ascontiguousarray(raw).view(np.uint32)
    return [words[:, i].copy() for i in range(words.shape[1])]
