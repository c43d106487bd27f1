"""`torch._grouped_mm`, and torch's dense matmul: what torch's process prepares for the grouped matmul benchmark."""

from collections.abc import Callable

import numpy as np

from benchmarks.peers import torch_process
from benchmarks.peers.torch_process import Worst
from benchmarks.shapes import GroupedShape, group_offsets, group_sizes, sampled_rows

_ROWS = 16384


class Worker(torch_process.Worker):
    def prepare(self, **request) -> dict:
        """In the fastest legal layout of the weights. "dense" is one plain matmul."""
        if request["pass"] == "dense":
            self.release()
            x, w = self.card.randn(request["M"], request["K"]), self.card.randn(request["K"], request["N"])
            self.call = lambda: x @ w
            return {"us": min(self.card.time_us(self.call, 2)), "recipe": f"torch {self.torch.__version__}"}
        shape, pass_name = GroupedShape("", *(request[key] for key in "GMKN")), request["pass"]
        if self.of_shape(shape):
            sizes = {"lhs": (shape.M, shape.K), "dout": (shape.M, shape.N), "N-major": (shape.G, shape.K, shape.N)}
            self.tensors = {name: self.card.randn(*dims) for name, dims in sizes.items()}
        offsets = group_offsets(group_sizes(request["dist"], shape.G, shape.M))
        ends = self.torch.tensor(offsets[1:], dtype=self.torch.int32, device=self.card.device)
        errors = lambda out: self._errors(out, pass_name, shape, offsets)
        return self.fastest(lambda took: self._ways(pass_name, ends), errors, request["limits"])

    def _ways(self, pass_name: str, ends) -> list[tuple[str, Callable]]:
        lhs, dout, rhs = self.tensors["lhs"], self.tensors["dout"], self.tensors["N-major"]
        multiply = lambda a, b: lambda: self.torch._grouped_mm(a, b, offs=ends, out_dtype=self.torch.bfloat16)
        if pass_name == "wgrad":
            self.tensors.pop("K-major", None)  # the result is as large
            self.call = lambda: None  # it may hold them
            return [("as given", lambda: multiply(lhs.t(), dout))]
        if "K-major" not in self.tensors:
            self.tensors["K-major"] = rhs.transpose(1, 2).contiguous().transpose(1, 2)
        weights = {layout: self.tensors[layout] for layout in ("N-major", "K-major")}
        if pass_name == "fwd":
            return [(f"rhs {layout}", lambda w=w: multiply(lhs, w)) for layout, w in weights.items()]
        return [(f"rhs {layout}", lambda w=w: multiply(dout, w.transpose(1, 2))) for layout, w in weights.items()]

    def _errors(self, out, pass_name: str, shape: GroupedShape, offsets: np.ndarray) -> tuple[float, float]:
        """As checks.grouped_errors."""
        lhs, dout, rhs = (self.tensors[name] for name in ("lhs", "dout", "N-major"))
        worst = Worst()
        for g, r in zip(*(index.tolist() for index in sampled_rows(pass_name, shape, offsets)), strict=True):
            if pass_name == "fwd":
                worst.see(out[r], (lhs[r].float()[:, None] * rhs[g].float()).sum(0))
            elif pass_name == "dgrad":
                worst.see(out[r], (dout[r].float()[None, :] * rhs[g].float()).sum(1))
            else:
                mine = slice(int(offsets[g]), int(offsets[g + 1]))
                # In parts: float32 of all rows would be larger than the operands.
                parts = zip(lhs[mine, r].split(_ROWS), dout[mine].split(_ROWS), strict=True)
                worst.see(out[g, r], sum((a.float()[:, None] * b.float()).sum(0) for a, b in parts))
        return worst.errors
