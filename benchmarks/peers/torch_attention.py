"""FlashAttention over packed sequences in torch: what torch's process prepares for the attention benchmark.

Of FlashAttention-3, FlashAttention-2 and torch's own `varlen_attn`, the fastest that can be imported and is right.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import torch_process
from benchmarks.peers.torch_process import Worst
from benchmarks.shapes import group_offsets, sequence_lengths

WAYS = ("flash_attn_interface", "flash_attn", "torch.nn.attention.varlen")
_NAMES = ("q", "k", "v", "dout")


class Worker(torch_process.Worker):
    def prepare(self, **request) -> dict:
        T, N, K, H = (request[key] for key in "TNKH")
        if request["mask"] not in ("whole", "causal"):
            raise NotImplementedError(f"torch's flash attention has no mask {request['mask']!r}")
        if self.of_shape(T, N, K, H):
            for name, heads in zip(_NAMES, (N, K, K, N), strict=True):
                self.tensors[name] = self.card.randn(T, heads, H).requires_grad_(name != "dout")
        offsets = group_offsets(sequence_lengths(request["dist"], request["sequences"], T))
        causal, backward = request["mask"] == "causal", request["pass"] != "fwd"
        ways = [(way, lambda way=way: self._call_of(way, offsets, causal, backward)) for way in WAYS]
        errors = lambda results: self._errors(results, offsets, causal)
        return self.fastest(lambda took: ways, errors, request["limits"])

    def _call_of(self, way: str, offsets: np.ndarray, causal: bool, backward: bool) -> Callable[[], list]:
        """() -> [out], and with backward the gradients of q, k and v."""
        module = importlib.import_module(way)
        q, k, v, dout = (self.tensors[name] for name in _NAMES)
        ends = self.torch.tensor(offsets, dtype=self.torch.int32, device=self.card.device)
        where = (ends, ends, *[int(np.diff(offsets).max())] * 2)
        if way == "torch.nn.attention.varlen":
            # Its arguments differ between torch's versions.
            known = inspect.signature(module.varlen_attn).parameters
            how: dict[str, Any] = {}
            if causal:
                how = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
            if "enable_gqa" in known and q.shape[1] != k.shape[1]:
                how["enable_gqa"] = True
            attend = lambda: module.varlen_attn(q, k, v, *where, **how)
        else:
            attend = lambda: module.flash_attn_varlen_func(q, k, v, *where, causal=causal)

        def call() -> list:
            with self.torch.set_grad_enabled(backward):
                out = attend()
                out = out[0] if isinstance(out, tuple) else out
            return [out, *self.torch.autograd.grad(out, (q, k, v), dout)] if backward else [out]

        return call

    def _errors(self, results: list, offsets: np.ndarray, causal: bool) -> tuple[float, float]:
        """Of the shortest nonempty sequence, against float32, as checks.attention_errors: a row is a token with all its
        heads, and an error counts over at least the RMS of all rows."""
        torch, worst, lengths = self.torch, Worst(), np.diff(offsets)
        shortest = int(np.argmin(np.where(lengths > 0, lengths, lengths.max() + 1)))
        mine = slice(int(offsets[shortest]), int(offsets[shortest + 1]))
        q, k, v, dout = (self.tensors[name][mine].detach().float() for name in _NAMES)
        (_, N, H), K = q.shape, k.shape[1]
        after = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
        wanted = []  # of each head of keys
        for head in range(K):
            shared = slice(head * (N // K), (head + 1) * (N // K))
            qkv = [x.clone().requires_grad_() for x in (q[:, shared], k[:, head], v[:, head])]
            outs = []
            for i in range(N // K):
                logits = qkv[0][:, i] @ qkv[1].T * H**-0.5
                outs.append((logits.masked_fill(after, float("-inf")) if causal else logits).softmax(-1) @ qkv[2])
            out = torch.stack(outs, 1)
            wanted.append([out.detach(), *torch.autograd.grad(out, qkv, dout[:, shared])])
        for result, of_heads in zip(results, zip(*wanted, strict=True), strict=False):
            want = torch.stack(of_heads, 1).flatten(1)
            worst.see(result[mine].flatten(1), want, least=want.square().mean().sqrt().item())
        return worst.errors
