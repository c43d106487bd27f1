"""How products over groups of rows are tuned."""

import dataclasses

import numpy as np

from jaxops._lib.planning.description import Tuning, random, split
from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.plan import PLANNER, Problem, runs_triton


class ProductTuning(Tuning):
    """A product of [M, K] rows with [G, K, N]; those of fp8_matmul have G = 0 where there are no groups."""

    planner, problem, shape, unit = PLANNER, Problem, ("G", "M", "K", "N"), "tflops"

    def splits(self, problem):
        """An even split of M over G groups, and a Zipf split in shuffled order."""
        if not problem.G:
            return [None]
        even = np.diff(np.arange(problem.G + 1) * problem.M // problem.G)
        return [even, split(problem.M, np.random.default_rng(0).permutation(1 / np.arange(1, problem.G + 1)))]

    def kernels(self, problem, device) -> tuple[str, ...]:
        return ("pallas", "triton") if runs_triton(problem, device) else ("pallas",)

    def tensors(self, problem):
        p = problem
        rhs = (p.G, p.N, p.K) if _transposed(p) else (p.G, p.K, p.N)
        shapes = {"lhs": (p.M, p.K), "rhs": rhs if p.G else rhs[1:], "dout": (p.M, p.N)}
        return {name: random(seed, shape, p.dtype) for seed, (name, shape) in enumerate(shapes.items())}

    def operands(self, name, problem, tensors, offsets):
        a, b = {"fwd": ("lhs", "rhs"), "dgrad": ("dout", "rhs"), "wgrad": ("lhs", "dout")}[name]
        if name == "wgrad" and _transposed(problem):  # the gradient has rhs' shape, [G, N, K]
            a, b = b, a
        return tensors[a], tensors[b], offsets

    def run(self, name, problem, plan, a, b, offsets):
        if name == "wgrad":
            return grouped_wgrad(a, b, offsets, plan=plan)
        # dgrad alone: the forward pass of a transposed rhs runs the same kernel.
        plan = dataclasses.replace(plan, fwd=getattr(plan, name))
        transpose_rhs = (name == "dgrad") != _transposed(problem)
        return grouped_matmul(a, b, offsets, transpose_rhs=transpose_rhs, plan=plan)

    def work(self, name, problem, a, b, offsets):
        return 2 * (problem.M if offsets is None else int(offsets[-1])) * problem.K * problem.N


def _transposed(problem) -> bool:
    """Whether rhs is [G, N, K]; a `Problem` of fp8_matmul has no such form."""
    return getattr(problem, "transpose_rhs", False)
