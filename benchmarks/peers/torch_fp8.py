"""torch's FP8: what torch's process prepares for the FP8 benchmarks.

torch: rowwise scales, casts by torch.compile, `torch._scaled_mm` and `torch._scaled_grouped_mm` with fast accumulation.
Weights have the layout of torch's layers, [N, K].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import torch_process
from benchmarks.peers.torch_process import Card, Worst
from benchmarks.shapes import group_offsets, group_sizes, sampled_packed_rows

BLOCK = 128
_MOST = 448.0  # of e4m3
_LEAST = 1e-12
_CHECKED_ROWS = 32
Prepared = tuple[str, Callable, Callable[[Any], tuple[float, float]]]  # how, the call, the errors of its result


def casts(torch) -> dict[str, Callable]:
    """x [rows, columns] -> (values in e4m3, float32 scales), scaled along the columns.

    Plain functions: torch.compile reads them.
    """

    def cast(x, axis):
        x = x.float()
        scale = x.abs().amax(axis, keepdim=True).clamp(min=_LEAST) / _MOST
        return (x / scale).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn), scale

    def rows(x):
        return cast(x, -1)

    def block_1x128(x):
        values, scale = cast(x.view(x.shape[0], -1, BLOCK), -1)
        return values.view(x.shape), scale.squeeze(-1)

    return {"rows": rows, "block_1x128": block_1x128}


class Worker(torch_process.Worker):
    def __init__(self, card: Card):
        super().__init__(card)
        self.casts = casts(card.torch)

    def prepare(self, **request) -> dict:
        self.of_shape(*(request.get(key) for key in ("op", "G", "M", "K", "N")))
        of_op = {"quantize": self._quantize, "fp8_matmul": self._dense, "fp8_grouped_matmul": self._grouped}
        name, call, errors = of_op[request["op"]](request)
        return self.fastest(lambda took: [(name, lambda: call)], errors, request["limits"])

    def _tensor(self, name: str, *dims: int) -> Any:
        if name not in self.tensors:
            self.tensors[name] = self.card.randn(*dims)
        return self.tensors[name]

    def _compile(self, name: str, function: Callable) -> Callable:
        """Once a shape."""
        if name not in self.compiled:
            self.compiled[name] = self.torch.compile(function, dynamic=False, fullgraph=True)
        return self.compiled[name]

    def _quantize(self, request: dict) -> Prepared:
        x = self._tensor("x", request["M"], request["K"])
        cast = self._compile("cast", self.casts["block_1x128"])

        def errors(result) -> tuple[float, float]:
            (values, scale), rows, worst = result, self._some_rows(request["M"]), Worst()
            blocks = values[rows].float().view(len(rows), -1, BLOCK) * scale[rows][:, :, None]
            worst.see(blocks.flatten(1), x[rows].float())
            return worst.errors

        return "torch.compile", lambda: cast(x), errors

    def _some_rows(self, count: int):
        return self.torch.tensor(
            np.unique(np.linspace(0, count - 1, _CHECKED_ROWS).astype(np.int64)), device=self.card.device
        )

    def _dense(self, request: dict) -> Prepared:
        M, K, N = (request[key] for key in "MKN")
        x, w, dy = self._tensor("x", M, K), self._tensor("w", N, K), self._tensor("dy", M, N)

        def errors(results) -> tuple[float, float]:
            worst, w32, x32 = Worst(), w.float(), x.float()
            for r in self._some_rows(M).tolist():
                worst.see(results["y"][r], w32 @ x32[r])
                if "dx" in results:
                    worst.see(results["dx"][r], dy[r].float() @ w32)
            for n in self._some_rows(N).tolist() if "dw" in results else ():
                worst.see(results["dw"][n], dy[:, n].float() @ x32)
            return worst.errors

        return "rowwise, casts of both compiled", self._torch_dense(request["pass"], x, w, dy), errors

    def _torch_dense(self, pass_name: str, x, w, dy) -> Callable:
        torch, cast = self.torch, self.casts["rows"]

        def product(a, b):
            """a [m, k] by b[n, k], transposed, each quantised along k."""
            (a, scale_a), (b, scale_b) = cast(a), cast(b)
            return torch._scaled_mm(
                a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )

        def fwd_bwd(x, w, dy):
            w_t, dy_t, x_t = (tensor.t().contiguous() for tensor in (w, dy, x))
            return product(x, w), product(dy, w_t), product(dy_t, x_t)

        if pass_name == "fwd":
            forward = self._compile("fwd", product)
            return lambda: {"y": forward(x, w)}
        both = self._compile("fwd+bwd", fwd_bwd)
        return lambda: dict(zip(("y", "dx", "dw"), both(x, w, dy), strict=True))

    def _grouped(self, request: dict) -> Prepared:
        """fwd: lhs [M, K] by weights [G, N, K]; dgrad: dout [M, N] by weights [G, K, N].

        Weights are quantised before.
        """
        if (pass_name := request["pass"]) not in ("fwd", "dgrad"):
            raise NotImplementedError("no wgrad with its casts: torch.compile knows no ragged maximum")
        G, M, inner, outer = (request[key] for key in ("GMKN" if pass_name == "fwd" else "GMNK"))
        # "x" and "w" of a pass: the other pass's are given back first.
        for name in [name for name in self.tensors if not name.endswith(pass_name)]:
            del self.tensors[name]
        x, w = self._tensor(f"x {pass_name}", M, inner), self._tensor(f"w {pass_name}", G, outer, inner)
        offsets = group_offsets(group_sizes(request["dist"], G, M))

        def errors(out) -> tuple[float, float]:
            worst = Worst()
            for g, r in zip(*(index.tolist() for index in sampled_packed_rows(offsets)), strict=True):
                worst.see(out[r], w[g].float() @ x[r].float())
            return worst.errors

        return "rowwise, cast compiled", self._torch_grouped(pass_name, x, w, offsets), errors

    def _quantized_weights(self, pass_name: str, w, cast: Callable) -> tuple[Any, Any]:
        """A group at a time, once a pass: all of them in float32 would take several times the memory."""
        if f"q {pass_name}" not in self.tensors:
            first_values, first_scale = cast(w[0])
            values, scale = (
                self.torch.empty(len(w), *part.shape, dtype=part.dtype, device=part.device)
                for part in (first_values, first_scale)
            )
            for g in range(len(w)):
                values[g], scale[g] = cast(w[g])
            self.tensors[f"q {pass_name}"] = values, scale
        return self.tensors[f"q {pass_name}"]

    def _torch_grouped(self, pass_name: str, x, w, offsets: np.ndarray) -> Callable:
        torch = self.torch
        ends = torch.tensor(offsets[1:], dtype=torch.int32, device=self.card.device)
        values, scale = self._quantized_weights(pass_name, w, self.casts["rows"])
        values, scale = values.transpose(1, 2), scale.squeeze(-1)
        cast = self._compile(pass_name, self.casts["rows"])

        def call():
            rows, row_scale = cast(x)
            return torch._scaled_grouped_mm(
                rows, values, row_scale.squeeze(-1), scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return call
