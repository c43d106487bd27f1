"""FLOPs and bytes of one instruction of a compiled program.

XLA counts whole programs, so a program is made that has only the instruction and what it calls. XLA does not know what
custom calls do: kernels of jaxops state their cost (`jaxops._lib.planning.costs`); that of cuBLAS' and cuDNN's calls
follows from their shapes.
"""

import functools
import math
import re
from typing import NamedTuple

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jaxlib import (
    _hlo,  # pyright: ignore[reportAttributeAccessIssue]
    xla_client,
)

from jaxops.profiling.hlo import Array, Instruction, Module

# They launch nothing themselves.
# fmt: off
_FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "add-dependency", "while", "call", "conditional", "async-start", "async-done", "fusion-done",
    "copy-done", "all-reduce-done", "all-gather-done", "collective-permute-done", "send-done", "recv-done",
    "rng-get-and-update-state",
))
# fmt: on
_NO_WORK = re.compile(r"AllocateBuffer|PinBuffer|UnpinBuffer|Sharding|ShardShape|FullShape|annotate")
_METADATA = re.compile(r', (?:metadata=\{(?:"(?:[^"\\]|\\.)*"|[^"}])*\}|control-predecessors=\{[^}]*\})')


class Cost(NamedTuple):
    """Of one execution of an instruction.

    Attributes:
      flops, bytes: bytes are read and written ones; None if nobody can say.
      dtype: of the products' operands, in JAX's words; None without products.
    """

    flops: int | None
    bytes: int | None
    dtype: str | None = None


def cost_of(name: str, module: Module) -> Cost:
    """The cost of an instruction of the module. KeyError for an unknown name."""
    instruction, inside = module.instructions[name]
    operands = [array for each in instruction.operands if each in inside for array in inside[each].arrays]
    if instruction.opcode in _FREE:
        return Cost(0, 0)
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, operands)
    try:
        alone = _hlo.hlo_module_from_text(_alone(instruction, inside, module))
        counted = _jax.hlo_module_cost_analysis(_counting_client(), alone)
    except (RuntimeError, ValueError):  # an instruction that means nothing outside of its program
        return Cost(None, None)
    flops, moved = (int(counted.get(key, 0)) for key in ("flops", "bytes accessed"))
    return Cost(flops, moved, _product_dtype(instruction, inside, module))


@functools.cache
def _counting_client() -> _jax.Client:
    """A CPU's: those of plugins, as a GPU's, count nothing."""
    return xla_client.make_cpu_client()


def _alone(instruction: Instruction, inside: dict[str, Instruction], module: Module) -> str:
    """The text of a program of one instruction, whose operands are parameters."""
    called = {name for each in (instruction, *module.inner(instruction)) for name in each.calls}
    texts = [text for name, text in module.texts.items() if name in called]
    operands = dict.fromkeys(instruction.operands)
    parameters = [f"  %{name} = {inside[name].type} parameter({i})" for i, name in enumerate(operands)]
    line = f"  ROOT {instruction.line.removeprefix('ROOT ')}"
    text = "\n\n".join(["HloModule alone", *texts, "\n".join(["ENTRY %alone_ {", *parameters, line, "}"])])
    return _METADATA.sub("", text)


def _product_dtype(instruction: Instruction, inside: dict[str, Instruction], module: Module) -> str | None:
    """Of the operands of the largest product in it."""
    products: list[tuple[int, Array]] = []
    for each in (instruction, *module.inner(instruction)):
        if each.opcode in ("dot", "convolution"):
            around = inside if each is instruction else module.instructions[each.name][1]
            products.append((each.arrays[0].size, around[each.operands[0]].arrays[0]))
    return _jax_dtype(max(products, key=lambda product: product[0])[1]) if products else None


def _jax_dtype(array: Array) -> str:
    words = {"bf16": "bfloat16", "pred": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
    kinds = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
    return words.get(array.dtype) or kinds.get(array.dtype[0], array.dtype[0]) + array.dtype[1:]


def _custom_call(call: Instruction, operands: list[Array]) -> Cost:
    stated = [re.search(rf'\bjaxops_{what}="(\d+)"', call.attributes) for what in ("flops", "bytes")]
    largest = max(operands, key=lambda array: array.bytes, default=None)
    if stated[0] and stated[1]:
        return Cost(int(stated[0][1]), int(stated[1][1]), _jax_dtype(largest) if largest else None)
    if _NO_WORK.search(call.target):
        return Cost(0, 0)
    workspaces = [each for each in call.arrays[1:] if each.dtype in ("s8", "u8") and len(each.dims) == 1]
    moved = sum(array.bytes for array in (*call.arrays, *operands)) - sum(array.bytes for array in workspaces)
    if re.search(r"cublas|\$gemm|\$matmul", call.target) and operands:
        axes = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', call.attributes)
        contracted = math.prod(operands[0].dims[int(axis)] for axis in re.findall(r"\d+", axes[1] if axes else ""))
        return Cost(2 * call.arrays[0].size * contracted, moved, _jax_dtype(operands[0]))
    if "fmha" in call.target and len(operands) > 1:
        return Cost(_attention_flops(call, operands[0]), moved, _jax_dtype(operands[0]))
    return Cost(None, moved)


def _attention_flops(call: Instruction, q: Array) -> int | None:
    """cuDNN's: two products forward, five backward, over half of the pairs with a causal mask. Sequence lengths are
    values of the program, so padding counts as if it were attended to."""
    scores = re.search(r'"intermediate_tensor_shape":\{"dimensions":\[([\d",]+)\]', call.attributes)
    if scores is None or not q.dims:
        return None
    pairs = math.prod(int(size) for size in re.findall(r"\d+", scores[1]))
    causal = re.search(r'"mask_type":"\w*CAUSAL', call.attributes) is not None
    return 2 * (5 if "Backward" in call.target else 2) * pairs * q.dims[-1] // (2 if causal else 1)
