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

from jaxops._lib.hlo import Instruction, Module, arrays

# They launch nothing themselves; alone, some of them end XLA's parser and the process.
# fmt: off
_FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "add-dependency", "while", "call", "conditional", "async-start", "rng-get-and-update-state",
))
# fmt: on
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


def cost_of(instruction: Instruction, module: Module) -> Cost:
    """The cost of an instruction of the module."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return Cost(0, 0)
    if instruction.opcode == "custom-call":
        return _custom_call(instruction)
    try:
        alone = _hlo.hlo_module_from_text(_alone(instruction, module))
        counted = _jax.hlo_module_cost_analysis(_counting_client(), alone)
    except (RuntimeError, ValueError):  # an instruction that means nothing outside of its program
        return Cost(None, None)
    flops, moved = (int(counted.get(key, 0)) for key in ("flops", "bytes accessed"))
    return Cost(flops, moved, _product_dtype(instruction, module))


@functools.cache
def _counting_client() -> _jax.Client:
    """A CPU's: those of plugins, as a GPU's, count nothing."""
    return xla_client.make_cpu_client()


def _alone(instruction: Instruction, module: Module) -> str:
    """The text of a program of one instruction, whose operands are parameters."""
    called = {name for each in (instruction, *module.inner(instruction)) for name in each.calls}
    texts = [text for name, text in module.texts.items() if name in called]
    operands = dict.fromkeys(instruction.operands)
    parameters = [f"  %{name} = {kind} parameter({i})" for i, (kind, name) in enumerate(operands)]
    line = f"  ROOT {instruction.line.removeprefix('ROOT ')}"
    text = "\n\n".join(["HloModule alone", *texts, "\n".join(["ENTRY %alone_ {", *parameters, line, "}"])])
    return _METADATA.sub("", text)


def _product_dtype(instruction: Instruction, module: Module) -> str | None:
    """Of the operands of the largest product in it."""
    products = [each for each in (instruction, *module.inner(instruction)) if each.opcode in ("dot", "convolution")]
    largest = max(products, key=lambda product: arrays(product.type)[0].size, default=None)
    return arrays(largest.operands[0][0])[0].dtype if largest else None


def _custom_call(call: Instruction) -> Cost:
    results, operands = arrays(call.type), [array for kind, _ in call.operands for array in arrays(kind)]
    stated = [call.text(f"jaxops_{what}") for what in ("flops", "bytes")]
    if all(stated):
        dtype = max(operands, key=lambda array: array.bytes).dtype if operands else None
        return Cost(int(stated[0]), int(stated[1]), dtype)
    workspaces = [each for each in results[1:] if each.kind in ("s8", "u8") and len(each.dims) == 1]
    moved = sum(array.bytes for array in (*results, *operands)) - sum(array.bytes for array in workspaces)
    target, flops = call.text("custom_call_target"), None
    if re.search(r"cublas|\$gemm|\$matmul", target) and operands:
        axes = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', call.attributes)
        contracted = math.prod(operands[0].dims[int(axis)] for axis in re.findall(r"\d+", axes[1] if axes else ""))
        flops = 2 * results[0].size * contracted
    elif scores := re.search(r'"intermediate_tensor_shape":\{"dimensions":\[([\d",]+)\]', call.attributes):
        # cuDNN's attention: two products forward, five backward, over half of the pairs with a causal mask. Sequence
        # lengths are values of the program, so padding counts as if it were attended to.
        pairs = math.prod(int(size) for size in re.findall(r"\d+", scores[1]))
        causal = re.search(r'"mask_type":"\w*CAUSAL', call.attributes) is not None
        flops = 2 * (5 if "Backward" in target else 2) * pairs * operands[0].dims[-1] // (2 if causal else 1)
    return Cost(flops, moved, operands[0].dtype if flops else None)
