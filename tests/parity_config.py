"""What transformers does with a checkpoint whose config.json lacks a key or has an odd one.

`pip install -r tests/parity.txt`, then `python tests/parity_config.py`. Writes tests/data/hf_configs.json: by
checkpoint of tests/data/hf and by change, "same" where transformers computes the same logits as with the whole
config.json, "refused" where it raises or misses tensors, else some of the last logits of the first row.
"""

import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "data"
FILE = HERE / "hf_configs.json"
SHOWN = 9  # logits
# Of checkpoints whose architecture has another one already.
LEFT_OUT = ("llama31_biased", "qwen3_moe_mixed", "gpt_oss_mxfp4", "deepseek_v3_fp8")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 30.0}
# Besides each key left out: keys of such a checkpoint, by the beginning of its name. None leaves a key out.
ODD: dict[str, list[dict[str, Any]]] = {
    "": [
        {"head_dim": None, "hidden_size": None},
        {"rope_parameters": None, "rope_theta": 300.0},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}, "rope_theta": 300.0},
        {"rope_parameters": {"rope_theta": 70.0}, "rope_scaling": {"rope_type": "default", "rope_theta": 90.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 70.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "swish"},
        {"hidden_act": "gelu"},
        {"sliding_window": 3},
        {"sliding_window": 3, "use_sliding_window": False},
        {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 1.5},
        {"rms_norm_eps": "small"},
        {"tie_word_embeddings": "yes"},
        {"architectures": ["LlamaForCausalLM", "MixtralForCausalLM"]},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 5},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 9}},
        {"rope_parameters": YARN, "max_position_embeddings": 24},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 40, "beta_fast": 1.2, "beta_slow": 0.1}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
        {"a_new_key": 3},
        {"a_new_key": None},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 6}, {"layer_types": ["full_attention"] * 2}],
    "qwen2": [
        {"use_sliding_window": False},
        {"max_window_layers": 0, "layer_types": None},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["sliding_attention"], "use_sliding_window": True},
        {"rope_parameters": YARN | {"beta_fast": 1.5, "beta_slow": 0.5, "attention_factor": 1.1, "truncate": False}},
    ],
    "qwen2_moe": [{"qkv_bias": False}, {"norm_topk_prob": True}, {"mlp_only_layers": []}, {"decoder_sparse_step": 2}],
    "olmoe": [{"clip_qkv": 0.3}, {"clip_qkv": None}, {"norm_topk_prob": True}],
    "gpt_oss": [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"swiglu_limit": 0.7},
        {"swiglu_alpha": 1.0},
        {"num_experts_per_tok": 1},
    ],
    "deepseek_v3": [
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 2},
        {"n_group": 2, "topk_group": 1},
        {"n_group": 1, "topk_group": 1},
        {"routed_scaling_factor": 0.5},
        {"norm_topk_prob": False},
        {"rope_interleave": False},
        {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"q_lora_rank": None},
        {"scoring_func": "softmax"},
        {"num_nextn_predict_layers": 3},
    ],
    "qwen3": [{"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 3}],
    "qwen3_moe": [{"mlp_only_layers": [0]}, {"mlp_only_layers": [7]}, {"decoder_sparse_step": 2}],
    "mixtral": [{"num_experts": 2}, {"num_local_experts": 4, "num_experts": 4}],
}


def changes(name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Each as what config.json's keys become."""
    odd = [change for begin, some in ODD.items() if name.startswith(begin) for change in some]
    return [{key: None} for key in config] + odd


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config | change).items() if change.get(key, value) is not None}


def logits_of(folder: pathlib.Path, architecture: str, tokens: np.ndarray) -> np.ndarray:
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
    model, info = getattr(transformers, architecture).from_pretrained(folder, **how)
    if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(str(info))
    with torch.no_grad():
        return model.float().eval()(torch.tensor(tokens)).logits.numpy()


def outcome(source: pathlib.Path, change: dict[str, Any], whole: np.ndarray) -> str | list[float]:
    config = json.loads((source / "config.json").read_text())
    tokens = safetensors.numpy.load_file(source / "expected.safetensors")["tokens"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(shutil.copytree(source, pathlib.Path(scratch) / source.name))
        (folder / "config.json").write_text(json.dumps(changed(config, change)))
        try:
            found = logits_of(folder, config["architectures"][0], tokens)
        except Exception as error:  # of any type
            print(f"{source.name:32} {json.dumps(change):70} {type(error).__name__}: {error}"[:240])
            return "refused"
    same = found.shape == whole.shape and np.allclose(found, whole, atol=1e-5, rtol=0)
    return "same" if same else np.round(found[0, -1, :SHOWN], 5).tolist()


def main() -> None:
    found = {}
    for source in sorted(path for path in (HERE / "hf").iterdir() if path.name not in LEFT_OUT):
        config = json.loads((source / "config.json").read_text())
        whole = safetensors.numpy.load_file(source / "expected.safetensors")["logits"]
        assert outcome(source, {}, whole) == "same"
        found[source.name] = {
            json.dumps(change): outcome(source, change, whole) for change in changes(source.name, config)
        }
    lines = (f" {json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
