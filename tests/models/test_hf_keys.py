"""Keys of config.json: what each says alone, what says nothing, other spellings, and keys that are ignored by name."""

import json
import re

import numpy as np
import pytest
from flax import nnx

from models import hf
from models.data.tokenizer import Bytes
from models.decoder import DecoderConfig
from models.hf import config as hf_config
from models.hf.unread import MEANINGLESS, READ_FOR_ALL
from models.training import lm as train_lm
from models.training.config import read, write
from tests.models.hf_checkpoints import DATA, changed

READS: dict[str, list[str]] = json.loads((DATA.parent / "hf_reads.json").read_text())
FULL, SLIDING = "full_attention", "sliding_attention"


def config_of(folder, keys: dict, **options) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(keys))
    return hf.read_config(folder, **options)[1]


def test_what_transformers_reads_is_read_or_known():
    """Of its own records: a key that a later version reads, too, is seen when the records are made again."""
    vision = {"vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy", "_rope_type_labels"}
    assert set(READS) == set(hf.MODELS)
    for name, keys in READS.items():
        fields = set(hf.MODELS[name].keys.model_fields)
        assert set(keys) - fields - MEANINGLESS - {*READ_FOR_ALL, *hf_config.EXPERTS, *vision} == set(), name
        assert not fields & MEANINGLESS - {"max_window_layers"}, name
        read_for_no_logits = {"attention_dropout", "initializer_range", "pad_token_id", "router_jitter_noise"}
        read_for_no_logits |= {"output_router_logits", "router_aux_loss_coef", "gradient_checkpointing", "use_cache"}
        assert set(keys) & MEANINGLESS - {"max_window_layers"} <= read_for_no_logits, name


YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 6, "rope_theta": 30}


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("llama", {"hidden_size": 16.0, "vocab_size": 29.0, "num_hidden_layers": 2e0}, {}),
        ("llama", {"rope_theta": None, "mlp_bias": None, "rope_scaling": None}, {}),
        ("llama", {"layer_types": [FULL] * 2, "use_sliding_window": False, "sliding_window": 4}, {}),
        ("llama", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 7}}, {"rope_parameters": {"rope_theta": 7.0}}),
        (
            "qwen2",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 6.0, "attn_factor": 2.0, "type": "linear"}},
            {"rope_parameters": YARN},
        ),
        ("qwen2", {"rope_parameters": None, "rope_scaling": YARN | {"rope_theta": None}, "rope_theta": 30}, {}),
        ("mistral", {"layer_types": [SLIDING] * 2}, {}),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 7}, "rope_scaling": {"rope_theta": 9}},
            {"rope_parameters": {"rope_theta": 9}},
        ),
        (
            "qwen2",
            {"rope_parameters": YARN, "original_max_position_embeddings": 40},
            {"rope_parameters": YARN | {"original_max_position_embeddings": 40}},
        ),
        ("gpt_oss", {"rope_scaling": {}, "rope_parameters": {}}, {"rope_parameters": None}),
        ("mixtral", {"num_experts": 4.0, "norm_topk_prob": True, "n_group": 1}, {}),
    ],
)
def test_two_spellings(name, one, other, tmp_path):
    said = json.loads((DATA / name / "config.json").read_text())
    assert config_of(tmp_path, said | one) == config_of(tmp_path, said | other)


BITS = {"bits": 4, "group_size": 128}
CAUSAL = "no LlamaForCausalLM known here has it."


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantization_config": BITS | {"quant_method": "awq", "version": "gemm"}}, "Read are quant_method fp8"),
        ({"quantization_config": BITS | {"quant_method": "gptq", "sym": True}}, "Read are quant_method fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "Read are quant_method fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "Read are quant_method fp8"),
        ({"quantization": BITS}, "--ignore-config quantization "),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "model_type is 'kimi_k2'"),
        ({"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
        ({"rope_interleaved": True}, "--ignore-config rope_interleaved "),
        (
            {"attention_multiplier": 0.01, "new": None, "b": 1},
            "pass --ignore-config attention_multiplier --ignore-config b",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}}, "--ignore-config rope_scaling.alpha "),
        ({"layer_types": [SLIDING] * 2}, CAUSAL),
        ({"is_causal": False}, CAUSAL),
        ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, CAUSAL),
        ({"sliding_window": 4}, CAUSAL),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"hidden_size": 16.5}, "hidden_size is 16.5"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings is 'true'"),
        ({"mlp_bias": 0}, "mlp_bias is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ],
)
def test_refused_in_one_line(keys, says, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        hf.read_config(changed(tmp_path, "llama", **keys))
    assert len(str(caught.value).splitlines()) == 1
    assert ("--ignore-config" in str(caught.value)) == ("--ignore-config" in says)


@pytest.mark.parametrize(
    "key", ["hidden_size", "layer_types", "is_causal", "num_experts", "not_there", "rope_scaling.factor"]
)
def test_what_counts_cannot_be_ignored(key, tmp_path):
    keys = {
        "layer_types": [FULL],
        "is_causal": False,
        "num_experts": 4,
        "rope_scaling": {"factor": 2.0, "type": "linear"},
    }
    with pytest.raises(ValueError, match=re.escape(f"ignore_config has {key}: no key of this file, or one that")):
        hf.read_config(changed(tmp_path, "mixtral", **keys), ignore_config=[key])


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
    graphdef, state = train_lm.LmTask(preset).start(None)
    model = nnx.merge(graphdef, state.params, state.histories)
    assert train_lm.save_checkpoint(tmp_path / "out", preset, model, Bytes()) == "LlamaForCausalLM"
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    _, again = hf.load(tmp_path / "out", ignore_config=keys)
    np.testing.assert_array_equal(
        nnx.state(again)["embed"]["embedding"][...], nnx.state(model)["embed"]["embedding"][...]
    )
