"""config.json: what transformers computes with odd ones (tests/parity_config.py), or a refusal by name."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import safetensors.flax
from flax import nnx

from models import hf
from models.decoder import Decoder, DecoderConfig, model
from models.decoder.rope import turns
from models.hf import config as hf_config
from tests.models.hf_checkpoints import DATA, NAMES, changed, loaded, say

CONFIGS: dict[str, dict] = json.loads((DATA.parent / "hf_configs.json").read_text())


def read_or_refused(read: Callable[[pathlib.Path], Any], folder: pathlib.Path) -> Any:
    """What is read, or the message of the error."""
    try:
        return read(folder)
    except ValueError as error:
        return str(error)


@functools.cache
def last_logits(config: DecoderConfig):
    """A compiled program for any rotary positions, windows and scale, in which most configurations differ."""
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]
    attention = model.soft_attention

    def run(params, tokens, angles, windows, scale):
        scaled = lambda *given, **how: attention(*given, **(how | {"scale": scale}))
        with (
            mock.patch.object(model, "turns", return_value=angles),
            mock.patch.object(model, "soft_attention", scaled),
            mock.patch.object(Decoder, "_windows", return_value=windows),
        ):
            return nnx.merge(graphdef, params)(tokens)[0][0, -1]

    return jax.jit(run)


def same_program(c: DecoderConfig) -> DecoderConfig:
    """Equal where rotary positions, windows and scale alone differ."""
    return dataclasses.replace(c, rope_base=1.0, rope_scaling=None, window=None, sliding=None)


def same_parameters(c: DecoderConfig) -> DecoderConfig:
    """Equal where what is computed with them alone differs."""
    groups = {"top_k": min(1, c.experts), "expert_groups": 1, "top_expert_groups": 1}
    units = {"normalize": True, "weight_scale": 1.0, "clamp": None, "qkv_clip": None}
    return dataclasses.replace(same_program(c), **groups, **units, rope_pairs=False, norm_epsilon=1.0)


def computed(c: DecoderConfig, params: nnx.State, tokens: np.ndarray) -> jax.Array:
    T = tokens.shape[1]
    at = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    found = Decoder._windows(types.SimpleNamespace(config=c), T)  # pyright: ignore[reportArgumentType]
    windows = tuple(np.full(len(of), T, np.int32) if w is None else w for w, of in zip(found, c.stacks(), strict=True))
    return last_logits(same_program(c))(params, tokens, turns(c, at, np.full_like(at, T)), windows, c.scale)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_key_left_out_and_odd_ones(name, tmp_path):
    """transformers' results are reproduced, or refused in a line that names the file."""
    whole = hf.read_config(DATA / name)
    tokens = np.asarray(safetensors.flax.load_file(DATA / name / "expected.safetensors")["tokens"])
    found = json.loads((DATA / name / "config.json").read_text())
    load = functools.partial(hf.load, backend="xla")
    model = loaded(name)[1]
    params, compared = nnx.state(model), 0
    unchanged = functools.cache(lambda: computed(model.config, params, tokens))
    folder = changed(tmp_path, name)
    for said, expected in CONFIGS[name].items():
        say(folder, name, **json.loads(said))
        got = read_or_refused(hf.read_config, folder)
        if got == whole:  # and so is what it computes
            assert expected == "same", said
            continue
        if ("dynamic" in said or "yarn" in said) and found.get("head_dim", 0) is None:
            assert expected == "refused"  # transformers fails where head_dim is null
            continue
        config, of_it = model.config, params
        if not isinstance(got, str):
            config = dataclasses.replace(got[1], backend="xla")
            if same_parameters(config) != same_parameters(model.config):
                got = read_or_refused(load, folder)
                config, of_it = (config, of_it) if isinstance(got, str) else (got[1].config, nnx.state(got[1]))
        if isinstance(got, str):
            assert expected == "refused" or any(key in got for key in re.findall(r"\w+", said)), f"{said}: {got}"
            assert str(folder) in got
            assert len(got.splitlines()) == 1
        elif expected == "same":
            np.testing.assert_allclose(computed(config, of_it, tokens), unchanged(), atol=1e-4, rtol=0, err_msg=said)
        else:
            assert isinstance(expected, list), f"{said} is {expected}, and read here as {hf.read_config(folder)}"
            logits = computed(config, of_it, tokens)[: len(expected)]
            np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0, err_msg=said)
            compared += 1
    assert compared >= 2
    assert set(found) <= {key for said in CONFIGS[name] for key in json.loads(said)}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again(name, tmp_path):
    architecture, config = hf.read_config(DATA / name)
    hf_config.write_config(tmp_path, architecture, config, 7)
    assert hf.read_config(tmp_path) == (architecture, config)
    assert hf_config.end_token(tmp_path) == 7


def test_the_architecture_that_fits():
    fitting = {name: hf_config.fitting(hf.read_config(DATA / name)[1]) for name in NAMES}
    # Without windows and biases several architectures are one.
    alike = {"mistral": "MistralForCausalLM", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}
    assert {name: fitting[name] for name in alike} == alike
    assert all(fitting[name] == hf.read_config(DATA / name)[0] for name in NAMES), fitting
    assert hf_config.fitting(dataclasses.replace(hf.read_config(DATA / "llama")[1], qkv_clip=3.0)) is None


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("llama", {"a_new_key": 3}, "a_new_key = 3: the decoder does not have this checkpoint's a_new_key"),
        ("llama", {"a_new_key": False}, "a_new_key = false"),
        ("llama", {"sliding_window": 4}, "no LlamaForCausalLM known here has it"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope type 'llama3' lacks its numbers: factor, low, high",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2, "other": 1}}, "rope_parameters.other = 1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 of GptOssForCausalLM"),
        ("deepseek_v3_fp8", {"quantization_config": FP8 | {"new_thing": 1}}, "quantization_config.new_thing is 1"),
        ("deepseek_v3_fp8", {"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config.fmt is 'e5m2'"),
        ("deepseek_v3_fp8", {"quantization_config": FP8 | {"activation_scheme": "static"}}, "reads only 'dynamic'"),
        ("deepseek_v3_fp8", {"quantization_config": FP8 | {"weight_block_size": [64, 128]}}, "reads only [128, 128]"),
        ("gpt_oss_mxfp4", {"quantization_config": {"quant_method": "mxfp4", "fmt": "e4m3"}}, "config.fmt is"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "use_sliding_window is false",
        ),
        ("qwen3_moe_mixed", {"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "leaves no layer with experts"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"num_local_experts": 5}, "num_local_experts is 5 and n_routed_experts is 6"),
    ],
)
def test_refusals(name, keys, says, tmp_path):
    folder = changed(tmp_path, name, **keys)
    with pytest.raises(ValueError, match=re.escape(says)):
        hf.read_config(folder)


KNOWN = json.loads((DATA.parent / "hf_known.json").read_text())


@pytest.mark.parametrize("name", KNOWN)
def test_checkpoints_that_people_have(name, tmp_path):
    """Every key is accepted, and there are as many parameters as the checkpoint's page says."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name]["config"]))
    _, config = hf.read_config(tmp_path)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == KNOWN[name]["parameters"]
