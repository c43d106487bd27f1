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
from models.data.tokenizer import Bytes
from models.decoder import Decoder, DecoderConfig, model
from models.decoder.rope import turns
from models.hf import config as hf_config
from models.hf.unread import MEANINGLESS, READ_FOR_ALL
from models.training import lm as train_lm
from models.training.config import read, write
from tests.models.hf_checkpoints import DATA, NAMES, changed, loaded, say

CONFIGS: dict[str, dict] = json.loads((DATA.parent / "hf_configs.json").read_text())
READS: dict[str, list[str]] = json.loads((DATA.parent / "hf_reads.json").read_text())
KNOWN = json.loads((DATA.parent / "hf_known.json").read_text())
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 6, "rope_theta": 30}
DYNAMIC = {"rope_type": "dynamic", "factor": 2}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


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


def test_what_transformers_reads_is_read_or_known():
    """Of its own records: a key that a later version reads, too, is seen when the records are made again."""
    vision = {"vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy", "_rope_type_labels"}
    assert set(READS) == set(hf.MODELS)
    for name, keys in READS.items():
        fields = hf.MODELS[name].reads
        assert set(keys) - fields - MEANINGLESS - {*READ_FOR_ALL, *hf_config.EXPERTS, *vision} == set(), name
        assert not fields & MEANINGLESS - {"max_window_layers"}, name
        read_for_no_logits = {"attention_dropout", "initializer_range", "pad_token_id", "router_jitter_noise"}
        read_for_no_logits |= {"output_router_logits", "router_aux_loss_coef", "gradient_checkpointing", "use_cache"}
        assert set(keys) & MEANINGLESS - {"max_window_layers"} <= read_for_no_logits, name


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("llama", {"hidden_size": 16.0, "vocab_size": 29.0, "num_hidden_layers": 2e0}, {}),
        ("llama", {"rope_theta": None, "mlp_bias": None, "rope_scaling": None}, {}),
        ("llama", {"layer_types": [FULL] * 2, "use_sliding_window": False, "sliding_window": 4}, {}),
        ("llama", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 7}}, {"rope_parameters": {"rope_theta": 7.0}}),
        ("qwen2", {"rope_parameters": YARN | {"attn_factor": 2.0, "type": "linear"}}, {"rope_parameters": YARN}),
        ("qwen2", {"rope_parameters": None, "rope_scaling": YARN | {"rope_theta": None}, "rope_theta": 30}, {}),
        ("mistral", {"layer_types": [SLIDING] * 2}, {}),
        ("llama", {"rope_scaling": DYNAMIC | {"original_max_position_embeddings": 3}}, {"rope_scaling": DYNAMIC}),
        ("gpt_oss", {"rope_scaling": {}, "rope_parameters": {}}, {"rope_parameters": None}),
        ("mixtral", {"num_experts": 4.0, "norm_topk_prob": True, "n_group": 1}, {}),
    ],
)
def test_two_spellings(name, one, other, tmp_path):
    def read(keys):
        (tmp_path / "config.json").write_text(json.dumps(json.loads((DATA / name / "config.json").read_text()) | keys))
        return hf.read_config(tmp_path)

    assert read(one) == read(other)


CAUSAL = "no LlamaForCausalLM known here has it."
UNREAD = "the decoder does not have this checkpoint's "


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("llama", {"a_new_key": False}, f"a_new_key = false: {UNREAD}a_new_key"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' lacks its numbers: factor, low, high"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2, "other": 1}}, "rope_parameters.other = 1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4, which only GptOssForCausalLM has"),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "expected tags: 'fp8', 'mxfp4'"),
        ("llama", {"quantization": {"bits": 4}}, "--ignore-config quantization "),
        ("llama", {"attention_multiplier": 0.01, "new": None, "b": 1}, "--ignore-config attention_multiplier"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}}, "-config rope_scaling.alpha "),
        ("llama", {"layer_types": [SLIDING] * 2}, CAUSAL),
        ("llama", {"is_causal": False}, CAUSAL),
        ("llama", {"sliding_window": 4}, CAUSAL),
        ("llama", {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
        ("llama", {"hidden_size": "16"}, "hidden_size is '16'"),
        ("llama", {"hidden_size": 16.5}, "hidden_size is 16.5"),
        ("llama", {"mlp_bias": 0}, "mlp_bias is 0"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta is inf"),
        ("deepseek_v3_fp8", {"quantization_config": FP8 | {"new_thing": 1}}, "quantization_config.fp8.new_thing is 1"),
        (
            "deepseek_v3_fp8",
            {"quantization_config": FP8 | {"activation_scheme": "static"}},
            "should be 'dynamic'",
        ),
        (
            "gpt_oss_mxfp4",
            {"quantization_config": {"quant_method": "mxfp4", "fmt": "e4m3"}},
            "mxfp4.fmt is",
        ),
        ("gpt_oss", {"swiglu_alpha": 1.7}, "swiglu_alpha is 1.7"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention"]}, "layer_types is"),
        ("qwen2", {"layer_types": [SLIDING] * 2, "use_sliding_window": False}, "use_sliding_window is false"),
        ("qwen3_moe_mixed", {"mlp_only_layers": [0, 1, 2, 3]}, "has experts, by decoder_sparse_step and mlp_only"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "no layer has experts, by first_k_dense_replace"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"head_dim": 5}, "head_dim is 5"),
        ("deepseek_v3", {"num_local_experts": 5}, "num_local_experts is 5 and n_routed_experts is 6"),
        ("deepseek_v3", {"model_type": "kimi_k2"}, "model_type is 'kimi_k2'"),
    ],
)
def test_refused_in_one_line(name, keys, says, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        hf.read_config(changed(tmp_path, name, **keys))
    assert len(str(caught.value).splitlines()) == 1
    if says == CAUSAL:
        assert "--ignore-config" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "layer_types", "is_causal", "num_experts", "not_there", "rope_scaling.factor"]
)
def test_what_counts_cannot_be_ignored(key, tmp_path):
    rope = {"factor": 2.0, "type": "linear"}
    folder = changed(tmp_path, "mixtral", layer_types=[FULL], is_causal=False, num_experts=4, rope_scaling=rope)
    with pytest.raises(ValueError, match=re.escape(f"ignore_config has {key}: no key of this file, or one that")):
        hf.read_config(folder, ignore_config=[key])


@pytest.mark.parametrize("name", KNOWN)
def test_checkpoints_that_people_have(name, tmp_path):
    """Every key is accepted, and there are as many parameters as the checkpoint's page says."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name]["config"]))
    _, config = hf.read_config(tmp_path)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == KNOWN[name]["parameters"]


def test_a_training_run_ignores_keys_by_name_and_says_so(tmp_path):
    folder = changed(tmp_path, "llama", a_key=3, rope_parameters={"rope_theta": 9.0, "alpha": 2})
    keys = ["a_key", "rope_parameters.alpha"]
    with pytest.raises(ValueError, match=r"pass --ignore-config a_key --ignore-config rope_parameters\.alpha"):
        train_lm.choose(train_lm.LmOptions(init_from=str(folder)))
    with pytest.raises(ValueError, match="ignore_config is about the config"):
        train_lm.choose(train_lm.LmOptions(ignore_config=keys))
    preset = train_lm.choose(train_lm.LmOptions(init_from=str(folder), ignore_config=keys))
    assert preset.model.rope_base == 9
    write(preset, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml")["ignore_config"] == keys
    assert train_lm.choose(train_lm.LmOptions(config=tmp_path / "config.yaml")) == preset
    graphdef, _, create = train_lm.LmTask(preset).start(None)
    state = create()
    model = nnx.merge(graphdef, state.params, state.histories)
    assert train_lm.save_checkpoint(tmp_path / "out", preset, model, Bytes()) == "LlamaForCausalLM"
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    _, again = hf.load(tmp_path / "out", ignore_config=keys)
    np.testing.assert_array_equal(again.embed.embedding[...], model.embed.embedding[...])
