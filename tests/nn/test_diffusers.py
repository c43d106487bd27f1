"""AdaLN by the code of docs/coming_from_diffusers.md: diffusers' values and gradients (tests/parity_diffusers.py).

By XLA alone: tests/ops/adaln compares the kernels."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxops
from jaxops.nn import AdaLayerNorm, AdaLNZeroBlock, AdaRMSNorm
from tests.house.test_docs import TEXTS, blocks_of

DATA = pathlib.Path(__file__).parents[1] / "data" / "diffusers"
NAMES = sorted(file.stem for file in DATA.iterdir())
WIDTH, HEADS = 16, 2


@functools.cache
def guide() -> dict:
    """What the guide's blocks define."""
    name = "docs/coming_from_diffusers.md"
    namespace: dict = {"__name__": "guide"}
    for block in blocks_of(TEXTS[name], "python"):
        exec(compile(block[2], name, "exec"), namespace)
    return namespace


def stored(name: str) -> tuple[dict, dict, dict, dict]:
    """Parameters, inputs, outputs and gradients, by their names."""
    found: dict[str, dict] = {"": {}, "input": {}, "output": {}, "gradient": {}}
    for key, value in safetensors.numpy.load_file(DATA / f"{name}.safetensors").items():
        kind, _, rest = key.rpartition(":")
        found[kind][rest] = value
    return found[""], found["input"], found["output"], found["gradient"]


def packed(inputs: dict) -> tuple[jax.Array, jax.Array]:
    """x [B, N, D] as rows, and the offsets."""
    B, N, D = inputs["x"].shape
    return jnp.asarray(inputs["x"].reshape(B * N, D)), N * jnp.arange(B + 1, dtype=jnp.int32)


def compare(got: dict, want: dict) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        # Softmax takes no notice of a key's bias: its gradient is rounding alone, and is held against the kernel's.
        scale = want[(*name[:-1], "kernel")] if name[-2:] == ("to_k", "bias") else value
        error = np.abs(np.asarray(got[name]) - value.reshape(got[name].shape)).max()
        assert error <= 1e-4 * np.abs(scale).max(), f"{name}: {error} of {np.abs(scale).max()}"


def run(module: nnx.Module, call, inputs: dict) -> tuple[dict, dict, nnx.State]:
    """The results of call(module, inputs); inputs' and parameters' gradients of the sum of their sines."""
    graphdef, params = nnx.split(module)

    def loss(params, inputs):
        results = call(nnx.merge(graphdef, params), inputs)
        return sum(jnp.sum(jnp.sin(value)) for value in results.values()), results

    with jax.default_matmul_precision("highest"):
        (_, results), (dparams, dinputs) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
            params, inputs
        )
    return results, dinputs, dparams


def check(name: str, module: nnx.Module, put, call) -> None:
    """put(module, weights) carries parameters over, and so gradients."""
    weights, inputs, outputs, gradients = stored(name)
    put(module, weights)
    results, dinputs, dparams = run(module, call, {key: jnp.asarray(value) for key, value in inputs.items()})
    compare(results, outputs)
    compare(dinputs, {key: gradients[key] for key in inputs})
    graphdef, params = nnx.split(module)
    wanted = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, params))
    put(wanted, {key: gradients[key] for key in weights})
    flat = {
        key: nnx.traversals.flatten_mapping(nnx.to_pure_dict(state))
        for key, state in (("got", dparams), ("want", nnx.state(wanted)))
    }
    assert len(flat["want"]) > 0
    compare(flat["got"], {path: np.asarray(value) for path, value in flat["want"].items()})


def put_norm(order, module, weights) -> None:
    guide()["put"](module.modulation, weights, "linear", order)
    for mine, theirs in ((module.weight, "norm.weight"), (module.bias, "norm.bias")):
        assert (mine is not None) == (theirs in weights)
        if mine is not None:
            mine[...] = jnp.asarray(weights[theirs])


WITHOUT_BIAS = functools.partial(nnx.Linear, use_bias=False)
AFFINE = {"use_weight": True, "use_bias": True}
NORMS = {
    "AdaLayerNorm": (AdaLayerNorm, (1, 0), {"epsilon": 1e-5}),
    "AdaLayerNormContinuous": (AdaLayerNorm, (0, 1), {"epsilon": 1e-5, **AFFINE}),
    "AdaLayerNormContinuous_no_bias": (
        AdaLayerNorm,
        (0, 1),
        {"epsilon": 1e-5, "use_weight": True, "linear": WITHOUT_BIAS},
    ),
    "AdaLayerNormContinuous_plain": (AdaLayerNorm, (0, 1), {"epsilon": 1e-6}),
    "AdaLayerNormContinuous_rms": (AdaRMSNorm, (0, 1), {"epsilon": 1e-5, "use_weight": True, "linear": WITHOUT_BIAS}),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    layer, order, options = NORMS[name]
    _, inputs, _, _ = stored(name)
    module = layer(WIDTH, inputs["cond"].shape[1], **options, backend="xla", rngs=nnx.Rngs(0))

    def call(module, inputs):
        x, offsets = packed(inputs)
        return {"y": module(x, inputs["cond"], offsets).reshape(inputs["x"].shape)}

    check(name, module, functools.partial(put_norm, order), call)


class Head(nnx.Module):
    """A head alone, and a weight for the norm behind it."""

    def __init__(self, parts: int, *, use_bias: bool, use_weight: bool, rngs: nnx.Rngs):
        self.modulation = nnx.Linear(WIDTH, parts * WIDTH, use_bias=use_bias, rngs=rngs)
        self.weight = nnx.Param(jnp.ones(WIDTH)) if use_weight else nnx.data(None)
        self.bias = nnx.data(None)


# Results of diffusers' modules in the order of their columns; "shift" and "scale" modulate y, "shift2" and "scale2" y2.
ZERO = ("shift", "scale", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")
HEADS_ALONE = {
    "AdaLayerNormZero": ZERO,
    "AdaLayerNormZero_no_bias": ZERO,
    "AdaLayerNormZeroSingle": ("shift", "scale", "gate"),
    "SD35AdaLayerNormZeroX": (*ZERO, "shift2", "scale2", "gate_msa2"),
    "LuminaRMSNormZero": ("scale", "gate_msa", "scale_mlp", "gate_mlp"),
}


@pytest.mark.parametrize("name", HEADS_ALONE)
def test_heads(name):
    """The guide's table says in which order their columns lie."""
    columns, is_rms = HEADS_ALONE[name], name == "LuminaRMSNormZero"
    module = Head(len(columns), use_bias=not name.endswith("no_bias"), use_weight=is_rms, rngs=nnx.Rngs(0))
    how = {"norm": "rms", "epsilon": 1e-5} if is_rms else {"epsilon": 1e-6}

    def call(module, inputs):
        x, offsets = packed(inputs)
        made = dict(
            zip(columns, jnp.split(module.modulation(jax.nn.silu(inputs["cond"])), len(columns), axis=1), strict=True)
        )
        results = {}
        for y, scale, shift in (("y", "scale", "shift"), ("y2", "scale2", "shift2")):
            if scale in made:
                scale = made.pop(scale)
                shift = made.pop(shift, jnp.zeros_like(scale))
                weight = None if module.weight is None else module.weight[...]
                results[y] = jaxops.adaln(x, scale, shift, offsets, weight=weight, backend="xla", **how).reshape(
                    inputs["x"].shape
                )
        return results | made

    check(name, module, functools.partial(put_norm, tuple(range(len(columns)))), call)


def test_latte_block():
    """adaLN-single: a table, and cond is the modulation."""
    code, order = guide(), np.array(guide()["SHIFT_FIRST"])
    rngs = nnx.Rngs(0)
    parts = code["Attention"](WIDTH, HEADS, rngs), code["feed_forward"](WIDTH, rngs)
    module = AdaLNZeroBlock(WIDTH, None, *parts, backend="xla", rngs=rngs)

    def put(module, weights):
        module.modulation[...] = jnp.asarray(weights["scale_shift_table"][order])
        code["put_attention"](module.mixer, weights, "attn1")
        code["put_feed_forward"](module.mlp, weights, "ff")

    def call(module, inputs):
        x, offsets = packed(inputs)
        cond = inputs["cond"].reshape(-1, 6, WIDTH)[:, order].reshape(-1, 6 * WIDTH)
        return {"x": module(x, cond, offsets).reshape(inputs["x"].shape)}

    check("latte_block", module, put, call)


class DiT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([guide()["dit_block"](WIDTH, HEADS, rngs) for _ in range(2)])
        self.norm = guide()["dit_norm"](WIDTH, rngs)
        for part in (*self.blocks, self.norm):
            part.backend = "xla"


def test_dit():
    """Two blocks and the last norm; the blocks' two epsilons are 1e-6 and 1e-5."""

    def put(module, weights):
        for i, block in enumerate(module.blocks):
            guide()["put_dit_block"](block, weights, f"transformer_blocks.{i}")
        guide()["put_dit_norm"](module.norm, weights)

    def call(module, inputs):
        x, offsets = packed(inputs)
        for i, block in enumerate(module.blocks):
            x = block(x, inputs[f"cond{i}"], offsets)
        return {"y": module.norm(x, inputs["cond0"], offsets).reshape(inputs["x"].shape)}

    check("dit", DiT(nnx.Rngs(0)), put, call)


class PixArt(nnx.Module):
    """From rows and embedded timesteps [B, D] to the input of the last product."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.head = nnx.Linear(WIDTH, 6 * WIDTH, rngs=rngs)
        self.blocks = nnx.List([guide()["PixArtBlock"](WIDTH, HEADS, rngs) for _ in range(layers)])
        self.norm = AdaLayerNorm(WIDTH, None, per="sequence", epsilon=1e-6, rngs=rngs)

    def __call__(self, x, embedded, offsets, captions, caption_offsets):
        cond = self.head(jax.nn.silu(embedded))
        for block in self.blocks:
            x = block(x, cond, offsets, captions, caption_offsets)
        return self.norm(x, jnp.tile(embedded, (1, 2)), offsets)


def test_pixart():
    """The whole of it, captions included, by the ops."""
    code = guide()

    def put(model, weights):
        code["put"](model.head, weights, "adaln_single.linear", code["SHIFT_FIRST"])
        model.norm.modulation[...] = jnp.asarray(code["parts"](weights["scale_shift_table"], (1, 0)))
        for i, block in enumerate(model.blocks):
            code["put_pixart_block"](block, weights, f"transformer_blocks.{i}")

    def call(module, inputs):
        x, offsets = packed(inputs)
        captions, caption_offsets = packed({"x": inputs["captions"]})
        return {"y": module(x, inputs["embedded"], offsets, captions, caption_offsets).reshape(inputs["x"].shape)}

    check("pixart", PixArt(2, nnx.Rngs(0)), put, call)


def test_all_data_is_compared():
    assert {*NORMS, *HEADS_ALONE, "latte_block", "dit", "pixart"} == set(NAMES)
