"""`torch._grouped_mm`, and torch's dense matmul: what torch's process prepares for the grouped matmul benchmark."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.torch_process import Card, Worst
from benchmarks.shapes import GroupedShape, group_offsets, group_sizes, sampled_rows


class Worker:
    def __init__(self, card: Card):
        self.card, self.torch = card, card.torch
        self.shape: GroupedShape | None = None
        self.lhs: Any = None
        self.dout: Any = None
        self.weights: dict[str, Any] = {}
        self.call: Callable = lambda: None

    def prepare(self, **request) -> dict:
        """Fixes the call that is timed, in the fastest legal layout of the weights, and checks its result.

        "dense" is one plain matmul.
        """
        if request["pass"] == "dense":
            return self._prepare_dense(request["M"], request["K"], request["N"])
        shape, pass_name = GroupedShape("", *(request[key] for key in "GMKN")), request["pass"]
        self._allocate(shape)
        offsets = group_offsets(group_sizes(request["dist"], shape.G, shape.M))
        ends = self.torch.tensor(offsets[1:], dtype=self.torch.int32, device=self.card.device)
        fastest: tuple[float, str, Callable] | None = None
        refusals = []
        for layout, call in self._calls(pass_name, ends):
            try:
                us = min(self.card.time_us(call, 2))
            except (RuntimeError, NotImplementedError) as error:
                refusals.append(f"{layout}: {error}")
                continue
            if fastest is None or us < fastest[0]:
                fastest = us, layout, call
        if fastest is None:
            raise RuntimeError("; ".join(refusals))
        us, layout, self.call = fastest
        max_err, rms_err = self._errors(pass_name, shape, offsets)
        return {"us": us, "recipe": f"torch {self.torch.__version__}, {layout}", "max_err": max_err, "rms_err": rms_err}

    def release(self) -> None:
        self.call = lambda: None
        self.shape = self.lhs = self.dout = None
        self.weights = {}
        self.card.empty_cache()

    def _allocate(self, shape: GroupedShape) -> None:
        if shape == self.shape:
            return
        self.release()
        self.torch.manual_seed(0)
        self.lhs, self.dout = self.card.randn(shape.M, shape.K), self.card.randn(shape.M, shape.N)
        n_major = self.card.randn(shape.G, shape.K, shape.N)
        self.weights = {"rhs N-major": n_major, "rhs K-major": n_major.transpose(1, 2).contiguous().transpose(1, 2)}
        self.shape = shape

    def _prepare_dense(self, m: int, k: int, n: int) -> dict:
        self.release()
        x, w = self.card.randn(m, k), self.card.randn(k, n)
        self.call = lambda: x @ w
        return {"us": min(self.card.time_us(self.call, 2)), "recipe": f"torch {self.torch.__version__}"}

    def _calls(self, pass_name: str, ends) -> list[tuple[str, Callable]]:
        grouped_mm, bf16 = self.torch._grouped_mm, self.torch.bfloat16
        lhs, dout = self.lhs, self.dout
        if pass_name == "wgrad":
            return [("as given", lambda: grouped_mm(lhs.t(), dout, offs=ends, out_dtype=bf16))]
        if pass_name == "fwd":
            return [
                (name, lambda w=w: grouped_mm(lhs, w, offs=ends, out_dtype=bf16)) for name, w in self.weights.items()
            ]
        return [
            (name, lambda w=w: grouped_mm(dout, w.transpose(1, 2), offs=ends, out_dtype=bf16))
            for name, w in self.weights.items()
        ]

    def _errors(self, pass_name: str, shape: GroupedShape, offsets: np.ndarray) -> tuple[float, float]:
        """As checks.grouped_errors."""
        out, rhs = self.call(), self.weights["rhs N-major"]
        lhs, dout = self.lhs, self.dout
        worst = Worst()
        for g, r in zip(*(index.tolist() for index in sampled_rows(pass_name, shape, offsets)), strict=True):
            if pass_name == "fwd":
                worst.see(out[r], (lhs[r].float()[:, None] * rhs[g].float()).sum(0))
            elif pass_name == "dgrad":
                worst.see(out[r], (dout[r].float()[None, :] * rhs[g].float()).sum(1))
            else:
                mine = slice(int(offsets[g]), int(offsets[g + 1]))
                worst.see(out[g, r], (lhs[mine, r].float()[:, None] * dout[mine].float()).sum(0))
        return worst.errors
