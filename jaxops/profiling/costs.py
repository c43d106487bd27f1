"""FLOPs and bytes of one instruction of a compiled program.

XLA gives them for a whole program only (`compiled.cost_analysis()`), so its rules (xla/service/hlo_cost_analysis.cc)
are applied here to one instruction: a product has two FLOPs a multiplication, an elementwise operation one an element
(exponentials and the like none), a reduction one an addition; bytes are those of operands and results, of slices where
only slices are read or written. Kernels of jaxops state their own (`jaxops._lib.planning.costs`).
"""

import dataclasses
import math
import re

from jaxops.profiling.hlo import Array, Instruction, Module

# fmt: off
_FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "domain", "add-dependency", "iota", "copy-done", "async-done", "fusion-done", "all-reduce-done",
    "all-gather-done", "collective-permute-done", "send-done", "recv-done", "rng-get-and-update-state", "while",
    "call", "conditional", "async-start",
))
# fmt: on
# Elementwise operations that XLA counts apart from FLOPs.
# fmt: off
_TRANSCENDENTAL = frozenset((
    "exponential", "exponential-minus-one", "log", "log-plus-one", "power", "sqrt", "rsqrt", "cbrt", "tanh", "sine",
    "cosine", "tan", "logistic", "atan2", "erf", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
))
# fmt: on
# fmt: off
_MOVES = frozenset((
    "broadcast", "reshape", "transpose", "copy", "copy-start", "slice", "dynamic-slice", "dynamic-update-slice",
    "concatenate", "pad", "reverse", "gather", "reduce-precision", "bitcast-convert", "sort", "rng",
    "rng-bit-generator", "real", "imag", "complex", "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
    "collective-permute", "collective-broadcast", "all-reduce-start", "all-gather-start", "collective-permute-start",
    "reduce-scatter-start", "send", "recv", "infeed", "outfeed", "custom-call", "partition-id",
))
# fmt: on
_SLICES = ("dynamic-slice", "slice", "gather")
_THROUGH = ("bitcast", "reshape", "copy", "convert", "get-tuple-element")
_ALLOCATIONS = ("AllocateBuffer", "PinBuffer", "UnpinBuffer")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one execution of an instruction.

    Attributes:
      flops: None if nobody can say.
      bytes: read and written; None if nobody can say.
      dtype: of the products' operands, in JAX's words; None without products.
    """

    flops: int | None
    bytes: int | None
    dtype: str | None = None


def cost_of(name: str, module: Module) -> Cost:
    """The cost of an instruction of the module. KeyError for an unknown name."""
    found, inside = module.instructions[name]
    if found.estimate is not None:
        operands = [array for each in found.operands for array in inside[each].arrays if each in inside]
        return Cost(*found.estimate, _dtype(max(operands, key=lambda array: array.bytes, default=None)))
    if found.opcode == "custom-call" and found.target in _ALLOCATIONS:
        return Cost(0, 0)
    known, dtype = _flops(found, inside, module)
    return Cost(known, _bytes(found, inside, module), dtype)


def _dtype(array: Array | None) -> str | None:
    """XLA's name of a dtype in JAX's words."""
    if array is None:
        return None
    words = {"bf16": "bfloat16", "pred": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    return words.get(array.dtype) or kinds.get(array.dtype[0], array.dtype[0]) + array.dtype[1:]


def _flops(found: Instruction, inside: dict[str, Instruction], module: Module) -> tuple[int | None, str | None]:
    """FLOPs, and the dtype of the largest product's operands."""
    opcode, size = found.opcode, sum(array.size for array in found.arrays)
    operands = [inside[name].arrays[0] for name in found.operands if name in inside and inside[name].arrays]
    if opcode in ("fusion", "call", "fusion-start", "async-start", "map"):
        return _inner(found, module)
    if opcode == "dot":
        return 2 * found.arrays[0].size * _contracted(found, operands, "lhs_contracting_dims"), _dtype(operands[0])
    if opcode == "convolution":
        return _convolution(found, found.arrays[0], operands[1]), _dtype(operands[0])
    if opcode == "custom-call":
        return _custom_call(found, operands)
    if opcode in ("reduce", "reduce-window", "all-reduce", "reduce-scatter", "select-and-scatter"):
        return _reduction(found, operands, module), None
    if opcode == "scatter":
        updates = operands[-1].size if operands else 0
        return updates * _per_element(found, module), None
    if opcode in _FREE or opcode in _TRANSCENDENTAL or opcode in _MOVES:
        return 0, None
    return size, None  # elementwise


def _inner(found: Instruction, module: Module) -> tuple[int | None, str | None]:
    """The sum over the instructions of a fusion."""
    total, most, dtype = 0, 0, None
    for computation in found.calls:
        inside = module.computations.get(computation, {})
        for each in inside.values():
            flops, kind = _flops(each, inside, module)
            if flops is None:
                return None, dtype
            total += flops
            if kind is not None and flops >= most:
                most, dtype = flops, kind
    return total, dtype


def _contracted(found: Instruction, operands: list[Array], key: str) -> int:
    return math.prod(operands[0].dims[axis] for axis in found.numbers(key))


def _per_element(found: Instruction, module: Module) -> int:
    """Operations of a reduction's or scatter's function, for one element."""
    return sum(
        each.opcode not in _FREE and each.opcode not in _MOVES
        for computation in found.calls
        for each in module.computations.get(computation, {}).values()
    )


def _reduction(found: Instruction, operands: list[Array], module: Module) -> int:
    if not operands:
        return 0
    each, results = _per_element(found, module), found.arrays[0].size
    if found.opcode == "reduce":
        return max(0, operands[0].size - results) * each
    if found.opcode == "reduce-window":
        window = re.search(r"window=\{size=([\dx]+)", found.text)
        sizes = math.prod(map(int, window[1].split("x"))) if window else 1
        return results * max(0, sizes - 1) * each
    return operands[0].size * each if found.opcode == "select-and-scatter" else 0


def _convolution(found: Instruction, result: Array, kernel: Array) -> int:
    """Two for each multiplication, as if nothing were padded."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", found.text)
    out = kernel.dims[labels[1].index("o")] if labels and "o" in labels[1] else 1
    return 2 * result.size * kernel.size // max(out, 1)


def _custom_call(found: Instruction, operands: list[Array]) -> tuple[int | None, str | None]:
    target = found.target
    if re.search(r"cublas|\$gemm|\$matmul", target) and operands:
        inner = _contracted(found, operands, "lhs_contracting_dimensions")
        return 2 * found.arrays[0].size * inner, _dtype(operands[0])
    if "fmha" in target and len(operands) > 1:
        return _attention(found, operands), _dtype(operands[0])
    if "conv" in target and "cudnn" in target and len(operands) > 1:
        backward_filter = "BackwardFilter" in target
        result = operands[1] if backward_filter or "BackwardInput" in target else found.arrays[0]
        result = operands[0] if "BackwardInput" in target else result
        kernel = found.arrays[0] if backward_filter else operands[1]
        return _convolution(found, result, kernel), _dtype(operands[0])
    return (0, None) if re.search(r"Sharding|ShardShape|FullShape|annotate", target) else (None, None)


def _attention(found: Instruction, operands: list[Array]) -> int | None:
    """cuDNN's: two products forward, five backward, over half of the pairs with a causal mask. Sequence lengths are
    values of the program, so padding counts as if it were attended to."""
    scores = re.search(r'"intermediate_tensor_shape":\{"dimensions":\[([\d",]+)\]', found.text)
    if scores is None or not operands[0].dims:
        return None
    pairs = math.prod(int(size) for size in re.findall(r"\d+", scores[1]))
    causal = re.search(r'"mask_type":"\w*CAUSAL', found.text) is not None
    return 2 * (5 if "Backward" in found.target else 2) * pairs * operands[0].dims[-1] // (2 if causal else 1)


def _bytes(found: Instruction, inside: dict[str, Instruction], module: Module) -> int | None:
    if found.opcode in _FREE and found.opcode != "async-start":
        return 0
    operands = [inside[name] for name in found.operands if name in inside]
    sizes = [sum(array.bytes for array in each.arrays) for each in operands]
    result = sum(array.bytes for array in found.arrays)
    if found.opcode in ("fusion", "fusion-start"):
        return _fusion_bytes(found, module, sizes)
    if found.opcode in _SLICES:
        return 2 * result + sum(sizes[1:])
    if found.opcode == "dynamic-update-slice":
        return 2 * sizes[1] + sum(sizes[2:])
    if found.opcode == "scatter":
        return 3 * sizes[-1] + sizes[-2] if len(sizes) > 2 else result + sum(sizes)
    if found.opcode == "custom-call":
        # cuBLAS' and cuDNN's workspaces.
        result -= sum(each.bytes for each in found.arrays[1:] if each.dtype in ("s8", "u8") and len(each.dims) == 1)
    return result + sum(sizes)


def _fusion_bytes(found: Instruction, module: Module, sizes: list[int]) -> int:
    """What the fused instructions read of each operand, and write of each result."""
    inside = module.computations.get(found.calls[0], {}) if found.calls else {}
    users: dict[str, list[Instruction]] = {}
    for each in inside.values():
        for name in each.operands:
            users.setdefault(name, []).append(each)
    total = 0
    for each in inside.values():
        if each.opcode == "parameter":
            number = int(re.findall(r"\d+", each.text)[0])
            full = sizes[number] if number < len(sizes) else sum(array.bytes for array in each.arrays)
            total += min(full, _read(each, users))
        if each.root:
            parts = [inside[name] for name in each.operands] if each.opcode == "tuple" else [each]
            total += sum(_written(part, inside) for part in parts)
    return total


def _read(value: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes that its users read: of slices the slice, of a buffer that is updated in place nothing."""
    total, full = 0, sum(array.bytes for array in value.arrays)
    for user in users.get(value.name, []):
        first = user.operands[0] == value.name
        if user.opcode in _SLICES and first:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode == "dynamic-update-slice" and first:
            total += 0
        elif user.opcode in _THROUGH:
            total += min(full, _read(user, users))
        else:
            return full
    return min(total, full)


def _written(value: Instruction, inside: dict[str, Instruction]) -> int:
    while value.opcode in _THROUGH and value.operands and inside.get(value.operands[0]) is not None:
        if value.opcode == "convert" or inside[value.operands[0]].opcode == "parameter":
            break
        value = inside[value.operands[0]]
    if value.opcode == "dynamic-update-slice":
        return sum(array.bytes for array in inside[value.operands[1]].arrays)
    return sum(array.bytes for array in value.arrays)
