"""AdaLN by torch.compile: what torch's process prepares for the AdaLN benchmark.

The function is plain torch in bfloat16, fused by `torch.compile`. It is compiled in several ways, which differ in how a
row gets its sequence's modulation; the fastest one with the right result is timed.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers import torch_process
from benchmarks.peers.torch_process import Worst
from benchmarks.shapes import group_offsets, sampled_packed_rows, sequence_lengths

WAYS = ("index", "repeat", "index_float32", "onehot")
MODES = ("default", "max-autotune-no-cudagraphs")
_BACKWARD_ONLY = ("index_float32", "onehot")  # they differ from "index" in the gradient only
_EPSILON = 1e-6
_CHUNK = 4096


class Worker(torch_process.Worker):
    """case: what `compiled` is of."""

    case: tuple | None = None

    def prepare(self, **request) -> dict:
        """The other modes are tried with the fastest way only. Cases that differ in the sequences' lengths alone share
        what is compiled."""
        case = _, pass_name, T, D, B = tuple(request[key] for key in ("op", "pass", "T", "D", "B"))
        modes = request.get("modes", MODES)
        if self.of_shape(T, D):
            self.tensors = {name: self.card.randn(T, D) for name in ("x", "h", "dy", "dnew_residual")}
        if case != self.case:
            self.compiled, self.case = {}, case
            self.torch._dynamo.reset()
        lengths = sequence_lengths(request["dist"], request["sequences"], T)
        if len(lengths) != B:
            raise ValueError(f"{len(lengths)} sequences, wanted {B}.")
        self._modulations(B, D, lengths)
        known = [way for way in WAYS if pass_name != "fwd" or way not in _BACKWARD_ONLY]

        def ways(took: dict[str, tuple[float, Callable]]) -> Iterator[tuple[str, Callable[[], Callable]]]:
            for way in known:
                yield f"{way}, {modes[0]}", lambda way=way: self._call(way, modes[0])
            best = min(took, key=lambda name: took[name][0]).split(", ")[0] if took else known[0]
            for mode in modes[1:]:
                yield f"{best}, {mode}", lambda mode=mode: self._call(best, mode)

        offsets = group_offsets(lengths)
        return self.fastest(ways, lambda results: self._errors(results, offsets), request["limits"])

    def release(self) -> None:
        super().release()
        self.case = None

    def _modulations(self, B: int, D: int, lengths: np.ndarray) -> None:
        """All inputs that depend on the sequences, including each row's index; made once, not timed."""
        torch, device = self.torch, self.card.device
        self.torch.manual_seed(1)
        self.tensors |= {name: self.card.randn(B, D) for name in ("gate", "scale", "shift")}
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        ids = torch.repeat_interleave(torch.arange(B, device=device), counts)
        self.tensors |= {"lengths": counts, "ids": ids, "onehot": None}

    def _operands(self) -> list:
        """As (x, h, gate, scale, shift); h and gate are None in adaln."""
        assert self.case is not None
        gated = self.case[0] == "gated_residual_adaln"
        return [
            self.tensors[name] if gated or name not in ("h", "gate") else None
            for name in ("x", "h", "gate", "scale", "shift")
        ]

    def _call(self, way: str, mode: str) -> Callable:
        if way == "onehot" and self.tensors["onehot"] is None:
            one_hot = self.torch.nn.functional.one_hot(self.tensors["ids"], len(self.tensors["lengths"]))
            self.tensors["onehot"] = one_hot.to(self.torch.bfloat16)
        if (function := self.compiled.get(f"{way}, {mode}")) is None:
            own, options = _own_code(_forward(self.torch, way)), {"mode": None if mode == "default" else mode}
            function = self.torch.compile(own, dynamic=False, fullgraph=True, **options)
            self.compiled[f"{way}, {mode}"] = function
        torch, sequences = self.torch, [self.tensors[name] for name in ("ids", "lengths", "onehot")]
        assert self.case is not None
        operands, forward_only = self._operands(), self.case[1] == "fwd"
        outputs: tuple[str, ...] = ("y",) if operands[1] is None else ("new_residual", "y")
        if forward_only:

            def call():
                with torch.no_grad():
                    return dict(zip(outputs, function(*operands, *sequences), strict=True))

            return call
        leaves = [None if operand is None else operand.detach().requires_grad_() for operand in operands]
        wanted = {
            f"d{name}": leaf
            for name, leaf in zip(("x", "h", "gate", "scale", "shift"), leaves, strict=True)
            if leaf is not None
        }
        cotangents = [self.tensors[f"d{name}"] for name in outputs]

        def call_with_gradients():
            results = function(*leaves, *sequences)
            grads = torch.autograd.grad(results, list(wanted.values()), cotangents)
            return dict(zip(outputs, results, strict=True)) | dict(zip(wanted, grads, strict=True))

        return call_with_gradients

    def _errors(self, results: dict[str, Any], offsets: np.ndarray) -> tuple[float, float]:
        """As checks.packed_errors: sampled rows of results with rows, and all of dgate, dscale and dshift."""
        torch = self.torch
        results = {name: result.detach() for name, result in results.items()}
        _, rows = sampled_packed_rows(offsets)
        rows = torch.tensor(rows, dtype=torch.int64, device=self.card.device)
        worst = Worst()
        for name, want in self._reference(rows).items():
            if name in results and name not in ("dgate", "dscale", "dshift"):
                worst.see(results[name][rows], want)
        sums = {
            name: torch.zeros_like(result, dtype=torch.float32)
            for name, result in results.items()
            if name in ("dgate", "dscale", "dshift")
        }
        if sums:
            for chunk in torch.arange(len(self.tensors["x"]), device=self.card.device).split(_CHUNK):
                reference = self._reference(chunk)
                for name, total in sums.items():
                    total.index_add_(0, self.tensors["ids"][chunk], reference[name])
        for name, want in sums.items():
            worst.see(results[name], want)
        return worst.errors

    def _reference(self, rows) -> dict[str, Any]:
        """All results for some rows in float32; dgate, dscale and dshift are a row's term of the sum."""
        torch = self.torch
        zeros = torch.zeros_like(self.tensors["x"][rows], dtype=torch.float32)
        gated = self._operands()[1] is not None
        x, h = self.tensors["x"][rows].float(), self.tensors["h"][rows].float() if gated else zeros.clone()
        gate, scale, shift = (
            self.tensors[name][self.tensors["ids"][rows]].float() for name in ("gate", "scale", "shift")
        )
        leaves = [x, h, gate if gated else zeros.clone(), scale, shift]
        x, h, gate, scale, shift = (leaf.requires_grad_() for leaf in leaves)
        new_residual = x + gate * h
        n = new_residual - new_residual.mean(-1, keepdim=True)
        y = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + _EPSILON) * (1 + scale) + shift
        dy, dnew_residual = self.tensors["dy"][rows].float(), self.tensors["dnew_residual"][rows].float()
        cotangents = [dnew_residual if gated else zeros, dy]
        grads = torch.autograd.grad([new_residual, y], [x, h, gate, scale, shift], cotangents)
        named = dict(zip(("dx", "dh", "dgate", "dscale", "dshift"), grads, strict=True))
        return named | {"new_residual": new_residual.detach(), "y": y.detach()}


def _own_code(function: Callable) -> Callable:
    """A copy of the code object: dynamo caches at most eight graphs for one code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _forward(torch, way: str) -> Callable:
    """(x, h, gate, scale, shift, ids, lengths, onehot) -> (y,), or (new_residual, y) with h and gate."""

    class OneHot(torch.autograd.Function):
        """Rows by index; their gradient by a matrix product, which cuBLAS sums in float32."""

        @staticmethod
        def forward(ctx, values, ids, onehot):
            ctx.save_for_backward(onehot)
            return values[ids]

        @staticmethod
        def backward(ctx, *grads):
            return ctx.saved_tensors[0].t() @ grads[0], None, None

    def forward(x, h, gate, scale, shift, ids, lengths, onehot):
        def of_rows(values):
            if way == "repeat":
                return torch.repeat_interleave(values, lengths, dim=0, output_size=x.shape[0])
            if way == "onehot":
                return OneHot.apply(values, ids, onehot)
            return (values.float() if way == "index_float32" else values)[ids]

        new_residual = x if h is None else (x + of_rows(gate) * h).to(x.dtype)
        y = torch.nn.functional.layer_norm(new_residual, (x.shape[-1],), eps=_EPSILON) * (1 + of_rows(scale)) + of_rows(
            shift
        )
        y = y.to(x.dtype)
        return (y,) if h is None else (new_residual, y)

    return forward
