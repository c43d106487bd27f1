"""The last layer and its loss by torch: what torch's process prepares for the benchmark of linear_cross_entropy.

plain: a product and `torch.nn.functional.cross_entropy` of bfloat16 logits; compiled: the same by torch.compile; liger:
`LigerFusedLinearCrossEntropyLoss` (Hsu et al. 2024, arXiv:2410.10989), where its package can be imported. w is [V, D],
as in torch's layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers import torch_process
from benchmarks.peers.torch_process import Worst

ROWS = 24


class Worker(torch_process.Worker):
    def prepare(self, **request) -> dict:
        T, D, V = (request[key] for key in "TDV")
        torch, card = self.torch, self.card
        if self.of_shape(T, D, V):
            targets = torch.randint(0, V, (T,), device=card.device)
            self.tensors = {"x": card.randn(T, D), "w": card.randn(V, D) * D**-0.5, "targets": targets}
        backward = request["pass"] == "fwd+bwd"
        x, w = (self.tensors[name].detach().requires_grad_(backward) for name in "xw")
        losses = {"plain": self._plain, "compiled": torch.compile(self._plain, dynamic=False)}

        def ways(took: dict) -> Iterator[tuple[str, Callable[[], Callable]]]:
            for name, loss in losses.items():
                yield name, lambda loss=loss: self._call(loss, x, w, backward)
            yield "liger", lambda: self._call(self._liger(), x, w, backward)

        return self.fastest(ways, self._errors, request["limits"])

    def _plain(self, x, w, targets) -> Any:
        return self.torch.nn.functional.cross_entropy(x @ w.t(), targets)

    def _liger(self) -> Callable:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda x, w, targets: loss(w, x, targets)

    def _call(self, loss: Callable, x, w, backward: bool) -> Callable:
        def call() -> dict[str, Any]:
            if not backward:
                with self.torch.no_grad():
                    return {"loss": loss(x, w, self.tensors["targets"])}
            value = loss(x, w, self.tensors["targets"])
            dx, dw = self.torch.autograd.grad(value, (x, w))
            return {"loss": value.detach(), "dx": dx, "dw": dw}

        return call

    def _errors(self, results: dict[str, Any]) -> tuple[float, float]:
        """Of sampled rows of both gradients, and of the loss."""
        torch, (x, w, targets) = self.torch, (self.tensors[name] for name in ("x", "w", "targets"))
        T, V = len(x), len(w)
        rows, words = (
            torch.tensor(np.unique(np.linspace(0, n - 1, ROWS).astype(np.int64)), device=x.device) for n in (T, V)
        )
        log_sums = torch.cat([(part.float() @ w.float().t()).logsumexp(1) for part in x.split(512)])
        chosen = (x.float() * w[targets].float()).sum(1)
        worst, loss = Worst(), abs(results["loss"].item() / (log_sums - chosen).mean().item() - 1)
        worst.errors = (loss, loss)
        if "dx" in results:
            d = (x[rows].float() @ w.float().t() - log_sums[rows, None]).exp()
            d[torch.arange(len(rows), device=x.device), targets[rows]] -= 1
            worst.see(results["dx"][rows], d @ w.float() / T)
            d = (x.float() @ w[words].float().t() - log_sums[:, None]).exp()
            d -= (targets[:, None] == words[None]).float()
            worst.see(results["dw"][words], d.t() @ x.float() / T)
        return worst.errors
