"""torch's products across devices: what torch's processes, one a card, measure for the collective matmul benchmark.

`torch_symmetric` is `torch.ops.symm_mem`'s fused op, `torch_nccl` NCCL's collective and cuBLAS' product.
"""

import importlib
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from benchmarks.peers.torch_process import Card, TorchProcess, Worst

SIDES = ("torch_symmetric", "torch_nccl")
GATHER = "all_gather_matmul"
CALLS = 10  # in a row, between two events
COLUMNS = 64  # about, that are compared with float32
_MULTICAST_ROWS = 2048  # up to here torch may multicast where the gathered rows are not asked for
_HELD_SECONDS = 0.1  # at most, a round


class TorchCards:
    """The client of a process a card. Every failure is a RuntimeError, and the next request starts new processes."""

    def __init__(self, devices: int, root: str):
        self._processes = [TorchProcess(root=root, answer_seconds=120) for _ in range(devices)]
        self._pool = ThreadPoolExecutor(devices)
        self._port = 0
        # Importing torch and starting NCCL take a while, in which JAX compiles.
        self._started = ThreadPoolExecutor(1).submit(self._ask, op=GATHER, side="torch_nccl", M=256, K=64, N=256)

    def measure(self, **request) -> dict:
        """The fastest of a side's ways: its microseconds a call, of each round those of the slower card.

        Args:
          request: op, side, M, K, N, rounds.

        Returns:
          us, host_us, max_err, rms_err, recipe.
        """
        self._started.result()
        answers = self._ask(**request)
        ways = [_slowest([answer["ways"][way] for answer in answers]) for way in answers[0]["ways"]]
        best = min(ways, key=lambda way: statistics.median(way["us"]))
        return best | {"recipe": f"{answers[0]['torch']}, {best['recipe']}"}

    def wait_started(self) -> None:
        """Until nothing of the start runs beside what is measured."""
        self._started.exception()

    def close(self) -> None:
        self.wait_started()
        self._end()

    def _end(self) -> None:
        list(self._pool.map(TorchProcess.close, self._processes))
        self._port = 0

    def _ask(self, **request) -> list[dict]:
        if not self._port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._port = free.getsockname()[1]
        group = {"devices": len(self._processes), "port": self._port}
        answers: list[Future[dict]] = [
            self._pool.submit(process.ask, do="prepare", rank=rank, **group, **request)
            for rank, process in enumerate(self._processes)
        ]
        done = wait(answers, return_when=FIRST_EXCEPTION).done
        error = next((answer.exception() for answer in done if answer.exception()), None)
        if error is not None:
            for process in self._processes:
                process.kill()  # one may wait for the other for ever
            wait(answers)
            self._end()
            raise error
        return [answer.result() for answer in answers]


def _slowest(cards: list[dict]) -> dict:
    """Of all cards' answers on one way."""
    slowest = {key: max(card[key] for card in cards) for key in ("host_us", "max_err", "rms_err")}
    return cards[0] | slowest | {"us": [max(us) for us in zip(*(card["us"] for card in cards), strict=True)]}


class Worker:
    def __init__(self, card: Card):
        self.card, self.torch = card, card.torch
        self.call: Callable = lambda: None
        self.rank, self.devices = 0, 1

    def prepare(self, **request) -> dict:
        """Checks and times every way of a side; nothing is left to be timed."""
        self._join(request["rank"], request["devices"], request["port"])
        M, K, N = (request[key] for key in "MKN")
        gathers = request["op"] == GATHER
        self.torch.manual_seed(self.rank)
        if gathers:
            x, w = self.card.randn(M // self.devices, K), self.card.randn(K, N // self.devices)
        else:
            x, w = self.card.randn(M, N // self.devices), self.card.randn(N // self.devices, K)
        w *= w.shape[0] ** -0.5
        want = self._wanted(gathers, x, w)
        ways = {}
        for layout, laid_out in (("w [in, out]", w), ("w [out, in]", w.t().contiguous().t())):
            for way, call in self._calls(request["side"], gathers, x, laid_out):
                us, host_us = self._times(call, request.get("rounds", 1))
                worst, columns = Worst(), sampled(w.shape[1])
                worst.see(call()[:, columns], want)
                found = {"us": us, "host_us": host_us, "max_err": worst.errors[0], "rms_err": worst.errors[1]}
                recipe = ", ".join(filter(None, (layout, way)))
                ways[recipe] = found | {"recipe": recipe}
        return {"ways": ways, "torch": f"torch {self.torch.__version__}"}

    def release(self) -> None:
        self.card.empty_cache()

    def _join(self, rank: int, devices: int, port: int) -> None:
        """This process' card and the group of all; the first request says which."""
        distributed = self.torch.distributed
        if distributed.is_initialized():
            return
        self.rank, self.devices = rank, devices
        how: dict[str, Any] = {"backend": "gloo"}
        if self.card.cuda:
            self.torch.cuda.set_device(rank)
            how = {"backend": "nccl", "device_id": self.torch.device("cuda", rank)}
        distributed.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=devices, **how)

    def _calls(self, side: str, gathers: bool, x: Any, w: Any) -> list[tuple[str, Callable]]:
        """(what distinguishes it, () -> the product) of each way of a side."""
        torch, rows = self.torch, x.shape[0]
        distributed, name = torch.distributed, torch.distributed.group.WORLD.group_name
        if side == "torch_symmetric":
            importlib.import_module("torch.distributed._symmetric_memory")  # defines the ops
            if not gathers:
                return [("", lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, name))]

            def fused(rows_too: bool) -> Any:
                found = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, name, return_A=rows_too)
                return found[1][0]

            multicasts = rows * self.devices <= _MULTICAST_ROWS
            more = [] if multicasts else [("without the gathered rows", lambda: fused(False))]
            return [("", lambda: fused(True)), *more]
        if gathers:
            everyone = x.new_empty(rows * self.devices, x.shape[1])

            def gather_first() -> Any:
                distributed.all_gather_into_tensor(everyone, x)
                return everyone @ w

            return [("", gather_first)]
        own = x.new_empty(rows // self.devices, w.shape[1])

        def product_first() -> Any:
            distributed.reduce_scatter_tensor(own, x @ w)
            return own

        return [("", product_first)]

    def _wanted(self, gathers: bool, x: Any, w: Any) -> Any:
        """Some columns of the result, from products in float32."""
        distributed, columns = self.torch.distributed, w[:, sampled(w.shape[1])].float()
        if gathers:
            everyone = x.new_empty(x.shape[0] * self.devices, x.shape[1])
            distributed.all_gather_into_tensor(everyone, x)
            return everyone.float() @ columns
        own = columns.new_empty(x.shape[0] // self.devices, columns.shape[1])
        distributed.reduce_scatter_tensor(own, x.float() @ columns)
        return own

    def _times(self, call: Callable, rounds: int) -> tuple[list[float], float]:
        """(microseconds a call of each round, host microseconds a call), of CALLS calls in a row.

        The stream sleeps until the host has queued them, as in `Card.time_us`; the call before the first event ends on
        all cards together.
        """
        torch, cuda = self.torch, self.card.cuda
        self._queue(call)  # the first call allocates, compiles, connects
        torch.distributed.barrier()
        sent = self._queue(call)
        us, host = [], []
        for _ in range(rounds):
            if not cuda:
                sent = self._queue(call)
                us.append(1e6 * sent / CALLS)
                host.append(sent)
                continue
            torch.cuda.synchronize()
            torch.distributed.barrier()
            torch.cuda._sleep(int(2e9 * min(_HELD_SECONDS, 1.5 * sent)))  # cycles, at about 2 GHz
            call()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            sent = self._queue(call)
            after.record()
            torch.cuda.synchronize()
            us.append(1e3 * before.elapsed_time(after) / CALLS)
            host.append(sent)
        return us, 1e6 * statistics.median(host) / CALLS

    def _queue(self, call: Callable) -> float:
        """The host's seconds for CALLS calls."""
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return time.perf_counter() - start


def sampled(count: int) -> slice:
    """The columns, of so many, that are compared with float32."""
    return slice(None, None, count // COLUMNS | 1)
