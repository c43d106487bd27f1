"""`torch._grouped_mm`, in a process of its own: torch needs the Triton it came with, jaxops may bring another one on PYTHONPATH.

The process is started once and told, line by line in JSON, what to prepare and how many calls to time, so that torch takes its turn between JAX's variants.
By hand: `python -m benchmarks.peers_torch`, then
{"do": "prepare", "G": 8, "M": 4096, "K": 1024, "N": 1024, "pass": "fwd", "dist": "skewed"} and {"do": "time", "iterations": 5}.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.shapes import GroupedShape, group_offsets, group_sizes, sampled_rows

_ANSWER_SECONDS = 180  # importing torch on a cold disk takes a minute


class TorchProcess:
    """The asking side. Every failure is a RuntimeError. A process that died is started anew by the next question."""

    def __init__(self, python: str = sys.executable, root: str = "."):
        self._command, self._root = [python, "-m", "benchmarks.peers_torch"], root
        self._process: subprocess.Popen | None = None

    def ask(self, **request) -> dict:
        if self._process is None:
            env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            self._process = subprocess.Popen(self._command, cwd=self._root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(_ANSWER_SECONDS, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"answer": '):  # anything else is torch talking
                    answer = json.loads(line)["answer"]
                    if "error" in answer:
                        raise RuntimeError(answer["error"])
                    return answer
        except OSError as error:
            raise RuntimeError(f"torch's process: {error}; it ended with {self.close()}") from error
        finally:
            watch.cancel()
        raise RuntimeError(f"torch's process ended with {self.close()}")

    def times_us(self, iterations: int) -> list[float]:
        """Of what was prepared last."""
        return self.ask(do="time", iterations=iterations)["us"]

    def close(self) -> int | None:
        """Ends the process, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.communicate(timeout=30)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return process.returncode


class _Worker:
    """The answering side: holds one shape's tensors and one prepared call."""

    def __init__(self):
        import torch  # pyright: ignore[reportMissingImports]  # another environment's

        self.torch = torch
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.shape: GroupedShape | None = None
        self.lhs: Any = None
        self.dout: Any = None
        self.weights: dict[str, Any] = {}
        self.call: Callable = lambda: None

    def prepare(self, **request) -> dict:
        """Fixes the call that `time` repeats, in the fastest legal layout of the weights, and checks its result. "dense" is one plain matmul."""
        if request["pass"] == "dense":
            return self._prepare_dense(request["M"], request["K"], request["N"])
        shape, pass_name = GroupedShape("", *(request[key] for key in "GMKN")), request["pass"]
        self._allocate(shape)
        offsets = group_offsets(group_sizes(request["dist"], shape.G, shape.M))
        ends = self.torch.tensor(offsets[1:], dtype=self.torch.int32, device=self.device)
        fastest: tuple[float, str, Callable] | None = None
        refusals = []
        for layout, call in self._calls(pass_name, ends):
            try:
                self.call = call
                us = min(self.time(2)["us"])
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

    def time(self, iterations: int) -> dict:
        """Event to event around each call, gaps between a call's kernels included (JAX's side sums kernel times; a gap is a microsecond or two).

        The call before the first keeps the card busy while the host queues the rest. Nothing flushes the caches in between: as on JAX's side, the
        operands are several times as large as they are.
        """
        torch = self.torch
        self.call()
        if not self.cuda:
            times = []
            for _ in range(iterations):
                start = time.perf_counter()
                self.call()
                times.append(1e6 * (time.perf_counter() - start))
            return {"us": times}
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
        for before, after in events:
            before.record()
            self.call()
            after.record()
        torch.cuda.synchronize()
        return {"us": [1e3 * before.elapsed_time(after) for before, after in events]}

    def _randn(self, *shape: int):
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device=self.device)

    def _release(self) -> None:
        self.call = lambda: None
        self.shape = self.lhs = self.dout = None
        self.weights = {}
        if self.cuda:
            self.torch.cuda.empty_cache()

    def _allocate(self, shape: GroupedShape) -> None:
        if shape == self.shape:
            return
        self._release()
        self.torch.manual_seed(0)
        self.lhs, self.dout = self._randn(shape.M, shape.K), self._randn(shape.M, shape.N)
        n_major = self._randn(shape.G, shape.K, shape.N)
        self.weights = {"rhs N-major": n_major, "rhs K-major": n_major.transpose(1, 2).contiguous().transpose(1, 2)}
        self.shape = shape

    def _prepare_dense(self, m: int, k: int, n: int) -> dict:
        self._release()
        x, w = self._randn(m, k), self._randn(k, n)
        self.call = lambda: x @ w
        return {"us": min(self.time(2)["us"]), "recipe": f"torch {self.torch.__version__}"}

    def _calls(self, pass_name: str, ends) -> list[tuple[str, Callable]]:
        grouped_mm, bf16 = self.torch._grouped_mm, self.torch.bfloat16
        lhs, dout = self.lhs, self.dout
        if pass_name == "wgrad":
            return [("as given", lambda: grouped_mm(lhs.t(), dout, offs=ends, out_dtype=bf16))]
        if pass_name == "fwd":
            return [(name, lambda w=w: grouped_mm(lhs, w, offs=ends, out_dtype=bf16)) for name, w in self.weights.items()]
        return [(name, lambda w=w: grouped_mm(dout, w.transpose(1, 2), offs=ends, out_dtype=bf16)) for name, w in self.weights.items()]

    def _errors(self, pass_name: str, shape: GroupedShape, offsets: np.ndarray) -> tuple[float, float]:
        """As checks.grouped_errors."""
        out, rhs = self.call(), self.weights["rhs N-major"]
        lhs, dout = self.lhs, self.dout
        worst = [0.0, 0.0]
        for g, r in zip(*(index.tolist() for index in sampled_rows(pass_name, shape, offsets)), strict=True):
            if pass_name == "fwd":
                want, got = (lhs[r].float()[:, None] * rhs[g].float()).sum(0), out[r]
            elif pass_name == "dgrad":
                want, got = (dout[r].float()[None, :] * rhs[g].float()).sum(1), out[r]
            else:
                mine = slice(int(offsets[g]), int(offsets[g + 1]))
                want, got = (lhs[mine, r].float()[:, None] * dout[mine].float()).sum(0), out[g, r]
            diff = got.float() - want
            rms = float(want.square().mean().sqrt())
            errors = [float(diff.abs().max()), float(diff.square().mean().sqrt())]
            if rms > 0:
                errors = [error / rms for error in errors]
            elif errors[0] > 0:
                errors = [float("inf")] * 2
            worst = [max(pair) if pair[1] == pair[1] else float("inf") for pair in zip(worst, errors, strict=True)]
        return worst[0], worst[1]


def main() -> None:
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        broken = False
        try:
            worker = worker or _Worker()
            answer = {"prepare": worker.prepare, "time": worker.time}[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            try:
                if worker is not None and worker.cuda:
                    worker.torch.cuda.synchronize()
            except RuntimeError:
                broken = True  # the context is lost; the asking side starts a new process
        print(json.dumps({"answer": answer}), flush=True)
        if broken:
            sys.exit(1)


if __name__ == "__main__":
    main()
