"""What every test of a benchmark runs under."""

import json
import math
import sys
import types

import jax
import numpy as np
import pytest
from jax._src.nn import initializers

from benchmarks import harness
from benchmarks.peers import torch_collective
from benchmarks.peers.torch_process import TorchProcess
from tests.arrays import put

LARGEST = 1 << 18  # numbers: larger models are traced, and never drawn
FAKE_TORCH = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print("torch says something else first")
    if asked["do"] == "time":
        answer = {"us": [7000.0] * asked["iterations"]}
    elif asked.get("dist") == "skewed" and asked["pass"] == "wgrad":
        sys.exit(3)
    elif asked.get("dist") == "skewed" or asked.get("mask") == "text_and_images":
        answer = {"error": "RuntimeError: strides"}
    else:
        assert asked.get("pass") == "dense" or len(asked["limits"]) == 2
        answer = {"us": 5.0, "recipe": "torch 0", "max_err": 0.01, "refusals": ["repeat: no"]}
    print(json.dumps({"answer": answer}), flush=True)
"""


@pytest.fixture(autouse=True)
def _caches_stay(monkeypatch):
    """A benchmark empties JAX's caches between its cases: all other tests' programs would be compiled again."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.fixture(autouse=True)
def _numpy_draws(request, monkeypatch):
    """XLA compiles random numbers for a tenth of a second a shape, and a model's first state for a second."""
    if request.node.get_closest_marker("gpu"):
        return
    random, normal = initializers.random, harness.normal

    def drawn(seed: int, shape: tuple[int, ...], dtype) -> jax.Array:
        if math.prod(shape) > LARGEST:
            return normal(seed, shape, dtype)
        return put(np.random.default_rng(seed).normal(size=shape), dtype)

    first = lambda key, shape, dtype, **_: drawn(0, shape, dtype)
    cut = lambda key, low, high, shape, dtype, **_: drawn(0, shape, dtype).clip(low, high)
    numbers = types.SimpleNamespace(**(vars(random) | {"normal": first, "truncated_normal": cut}))
    monkeypatch.setattr(initializers, "random", numbers)
    monkeypatch.setattr(harness, "normal", drawn)


@pytest.fixture
def torch_answers(monkeypatch):
    """(source of a process) -> None: it answers in torch's place."""

    def use(source: str = FAKE_TORCH) -> None:
        class Fake(TorchProcess):
            def __init__(self, **options):
                super().__init__(**options)
                self._command = [sys.executable, "-c", source]

        for module in (harness, torch_collective):
            monkeypatch.setattr(module, "TorchProcess", Fake)

    return use


def rows_of(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
