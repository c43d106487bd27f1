"""torch as a peer, in its own process: torch needs the Triton it came with, jaxops may use another on PYTHONPATH.

The process reads requests from stdin, one JSON line each: cases to prepare and numbers of calls to time, so that torch
is interleaved with JAX's variants. torch_<op>.py prepares an op's cases and checks their results.

By hand: `python -m benchmarks.peers.torch_process`, then the lines
{"do": "prepare", "op": "grouped_matmul", "G": 8, "M": 4096, "K": 1024, "N": 1024, "pass": "fwd", "dist": "skewed"}
{"do": "time", "iterations": 5}
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WORKERS = {
    "grouped_matmul": "grouped_matmul",
    "adaln": "adaln",
    "gated_residual_adaln": "adaln",
    "packed_attention": "attention",
    "linear_cross_entropy": "loss",
    "quantize": "fp8",
    "fp8_matmul": "fp8",
    "fp8_grouped_matmul": "fp8",
    "all_gather_matmul": "collective",
    "matmul_reduce_scatter": "collective",
}
_HELD_SECONDS = 0.1  # at most, per question


class TorchProcess:
    """The client. Every failure is a RuntimeError. A dead process is started again by the next request."""

    def __init__(
        self, python: str = sys.executable, root: str = ".", answer_seconds: float = 180
    ):  # importing torch on a cold disk takes a minute
        self._command, self._root, self._answer_seconds = (
            [python, "-m", "benchmarks.peers.torch_process"],
            root,
            answer_seconds,
        )
        self._process: subprocess.Popen | None = None

    def ask(self, **request) -> dict:
        if self._process is None:
            env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            self._process = subprocess.Popen(
                self._command, cwd=self._root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(self._answer_seconds, self._process.kill)
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
        """Times of the case that was prepared last."""
        return self.ask(do="time", iterations=iterations)["us"]

    def kill(self) -> None:
        """Ends the process at once; a request that waits for it fails."""
        if (process := self._process) is not None:
            process.kill()

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


class Card:
    """The worker's torch, device and clock."""

    def __init__(self):
        import torch  # pyright: ignore[reportMissingImports]  # another environment's

        self.torch: Any = torch
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"

    def randn(self, *shape: int) -> Any:
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device=self.device)

    def empty_cache(self) -> None:
        if self.cuda:
            self.torch.cuda.empty_cache()

    def time_us(self, call: Callable, iterations: int) -> list[float]:
        """Event to event around each call, with the gaps between its kernels (1 to 2 us; JAX's side sums kernel times).

        The stream sleeps until the host has queued all calls: autograd takes longer to launch small kernels than they
        run. The first call warms up. Nothing flushes the caches: as on JAX's side, operands are several times larger
        than L2.
        """
        torch = self.torch
        start = time.perf_counter()
        call()
        queued_seconds = time.perf_counter() - start
        if not self.cuda:
            times = []
            for _ in range(iterations):
                start = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - start))
            return times
        torch.cuda.synchronize()
        torch.cuda._sleep(
            int(2e9 * min(_HELD_SECONDS, 1.5 * queued_seconds * (iterations + 1)))
        )  # cycles, at about 2 GHz
        call()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)
        ]
        for before, after in events:
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in events]


class Worst:
    """(largest error, RMS error) over the row's RMS, the worst of all rows; as checks.py, for torch's tensors.

    NaN counts as infinite.
    """

    def __init__(self):
        self.errors = (0.0, 0.0)

    def see(self, got, want, *, least: float = 0.0) -> None:
        """got and want: a row, or rows along the first axis; want in float32. An error counts over at least `least`."""
        diff = got.float() - want
        rms = want.square().mean(-1).sqrt().clamp(min=least)
        max_err, rms_err = diff.abs().amax(-1), diff.square().mean(-1).sqrt()
        # Infinite for a nonzero row that must be 0; zero for one that is 0.
        relative = [
            (error / rms).where(rms > 0, error.where(error == 0, float("inf"))).nan_to_num(float("inf"), float("inf"))
            for error in (max_err, rms_err)
        ]
        self.errors = (max(self.errors[0], relative[0].max().item()), max(self.errors[1], relative[1].max().item()))


class Worker:
    """Base class of torch_<op>.py's: the tensors of a shape, and one prepared call.

    Attributes:
      shape: what `tensors` and `compiled` are of.
      compiled: by torch.compile, by name.
      call: what is timed.
    """

    def __init__(self, card: Card):
        self.card, self.torch = card, card.torch
        self.shape: tuple | None = None
        self.tensors: dict[str, Any] = {}
        self.compiled: dict[str, Callable] = {}
        self.call: Callable = lambda: None

    def prepare(self, **request) -> dict:
        """Makes the call that is timed, and checks its result against request's limits (largest, RMS)."""
        raise NotImplementedError

    def release(self) -> None:
        self.call = lambda: None
        self.shape, self.tensors, self.compiled = None, {}, {}
        self.torch._dynamo.reset()
        self.card.empty_cache()

    def of_shape(self, *shape) -> bool:
        """Releases what is of another shape; whether it was."""
        if shape == self.shape:
            return False
        self.release()
        self.torch.manual_seed(0)
        self.shape = shape
        return True

    def fastest(
        self, ways: Callable[[dict], Iterable[tuple[str, Callable[[], Callable]]]],
        errors: Callable[[Any], tuple[float, float]], limits: Sequence[float],
    ) -> dict:  # fmt: skip
        """Fixes the fastest way with a right result as the call, and answers for it.

        Args:
          ways: (times of the ways so far) -> each way's name, and what makes its call.
          errors: of a call's result, as `Worst.errors`.

        Raises:
          RuntimeError: none works.
        """
        took: dict[str, tuple[float, Callable]] = {}
        refusals = []
        for name, make in ways(took):
            try:
                call = make()
                self.card.time_us(call, 1)
                took[name] = min(self.card.time_us(call, 2)), call
            except Exception as error:  # torch's compiler raises its own kinds
                refusals.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        for name in sorted(took, key=lambda name: took[name][0]):
            us, self.call = took[name]
            max_err, rms_err = errors(self.call())
            if max_err <= limits[0] and rms_err <= limits[1]:
                recipe = f"torch {self.torch.__version__}, {name}"
                return {"us": us, "recipe": recipe, "max_err": max_err, "rms_err": rms_err, "refusals": refusals}
            refusals.append(f"{name}: wrong result: {max_err:.2e}, RMS {rms_err:.2e}")
        raise RuntimeError("; ".join(refusals))


class _Answers:
    """Keeps one worker at a time, because another op's tensors take memory."""

    def __init__(self):
        self.card = Card()
        self.worker: Worker | None = None
        self.kind = ""

    def answer(self, do: str, **request) -> dict:
        if do == "prepare":
            kind = WORKERS[request["op"]]
            worker = self.worker
            if worker is None or kind != self.kind:
                if worker is not None:
                    worker.release()
                worker = importlib.import_module(f"benchmarks.peers.torch_{kind}").Worker(self.card)
                self.worker, self.kind = worker, kind
            return worker.prepare(**request)
        if do != "time" or self.worker is None:
            raise ValueError(f"do={do!r}: prepare first, then time.")
        return {"us": self.card.time_us(self.worker.call, request["iterations"])}


def main() -> None:
    answers = None
    for line in sys.stdin:
        request = json.loads(line)
        broken = False
        try:
            answers = answers or _Answers()
            answer = answers.answer(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            try:
                if answers is not None and answers.card.cuda:
                    answers.card.torch.cuda.synchronize()
            except RuntimeError:
                broken = True  # the context is lost; the asking side starts a new process
        print(json.dumps({"answer": answer}), flush=True)
        if broken:
            sys.exit(1)


if __name__ == "__main__":
    main()
