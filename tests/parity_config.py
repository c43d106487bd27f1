"""What transformers does with a checkpoint whose config.json lacks a key or has an odd one.

`pip install -r tests/parity.txt`, then `python tests/parity_config.py`. Writes tests/data/hf_configs.json: by
checkpoint of tests/data/hf and by change, "same" where transformers computes the same logits as with the whole
config.json, "refused" where it raises or misses tensors, else some of the last logits of the first row. And
tests/data/hf_reads.json: by architecture the keys that it reads while it makes and runs the model.
"""

import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "data"
FILE = HERE / "hf_configs.json"
READS = HERE / "hf_reads.json"
SHOWN = 9  # logits
# Of checkpoints whose architecture has another one already.
LEFT_OUT = ("llama31_biased", "qwen3_moe_mixed", "gpt_oss_mxfp4", "deepseek_v3_fp8")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 30.0}
NULL = "null"  # becomes null; None leaves a key out
FULL, SLIDING = "full_attention", "sliding_attention"
# Keys that change no logits, with values that are seen if they do.
NOTHING = {
    **dict.fromkeys(("_name_or_path", "name_or_path", "model_name", "_commit_hash", "transformers_version"), "x"),
    **dict.fromkeys(("unsloth_version", "tokenizer_class", "prefix", "tokenizer_padding_side"), "x"),
    **dict.fromkeys(("finetuning_task", "xla_device"), "x"),
    **dict.fromkeys(("tokenizer_model_max_length", "model_max_length", "max_sequence_length", "max_seq_length"), 3),
    **dict.fromkeys(("max_seq_len", "seq_length", "max_length", "max_new_tokens", "min_length", "min_new_tokens"), 3),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"), 0),
    **dict.fromkeys(("mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"), 0),
    **dict.fromkeys(
        ("use_cache", "gradient_checkpointing", "output_router_logits", "seq_aux", "tf_legacy_loss"), False
    ),
    **dict.fromkeys(("unsloth_fixed", "is_llama_config", "do_sample", "early_stopping", "output_scores"), True),
    **dict.fromkeys(("remove_invalid_values", "return_dict_in_generate", "output_hidden_states", "is_decoder"), True),
    **dict.fromkeys(("return_dict", "tie_last_hidden_states", "rescale_prenorm_residual"), True),
    **dict.fromkeys(("_flash_attn_2_enabled", "use_flash_attn", "use_flash_attention", "use_flash_attention_2"), True),
    **dict.fromkeys(("use_mla", "torchscript", "use_bfloat16", "_attn_implementation_autoset"), True),
    **dict.fromkeys(("num_beams", "num_beam_groups", "top_k", "chunk_size_feed_forward"), 3),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pretraining_tp", "ep_size"), 3),
    **dict.fromkeys(
        ("max_window_layers", "num_mtp_layers", "num_nextn_predict_layers", "cross_attention_hidden_size"), 3
    ),
    **dict.fromkeys(("initial_context_length", "experts_per_token", "qk_head_dim"), 3),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"), 0.3),
    **dict.fromkeys(("diversity_penalty", "initializer_range", "attention_dropout", "hidden_dropout"), 0.3),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout", "resid_pdrop"), 0.3),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "embedding_dropout", "classifier_dropout"), 0.3),
    **dict.fromkeys(("router_jitter_noise", "neftune_noise_alpha", "router_aux_loss_coef", "router_z_loss_coef"), 0.3),
    **{key: [1] for key in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")},
    "aux_loss_alpha": 0.3,
    "num_return_sequences": 1,
    "num_labels": 1,
    "output_attentions": True,
    "cache_implementation": "static",
    "id2label": {"0": "x"},
    "label2id": {"x": 0},
    "task_specific_params": {"x": 1},
    "exponential_decay_length_penalty": [1, 2.0],
    "problem_type": "regression",
    "auto_map": {"AutoConfig": "x"},
    "transformers.js_config": {"dtype": "q4"},
    "dtype": "float32",
    "torch_dtype": "float16",
}
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
        NOTHING,
        # Keys that usually agree, and two places for one number.
        {"rope_scaling": {}},
        {"rope_scaling": NULL, "rope_theta": NULL},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 30.0}, "max_position_embeddings": 24},
        {"rope_parameters": YARN | {"factor": None}, "max_position_embeddings": 24},
        {"rope_parameters": YARN, "original_max_position_embeddings": 40},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 9}, "original_max_position_embeddings": 30},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 9.0}},
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "attn_factor": 3.0}},
        {"rope_parameters": {"rope_type": "linear", "type": "default", "factor": 2.0, "rope_theta": 70.0}},
        {"rms_norm_eps": 0.3},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"vocab_size": 28},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
        {"sliding_window": NULL},
        {"is_causal": False},
        {"is_causal": True},
        {"attention_chunk_size": 2},
        {"num_local_experts": 2, "num_experts": 3},
        {"norm_topk_prob": True},
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "first_k_dense_replace": 0, "moe_layer_freq": 1},
    ],
    "mistral": [
        {"sliding_window": None},
        {"sliding_window": 6},
        {"sliding_window": 6, "use_sliding_window": False},
        {"layer_types": [FULL] * 2},
        {"layer_types": [SLIDING] * 2},
        {"sliding_window": NULL, "layer_types": [FULL] * 2},
    ],
    "llama": [{"layer_types": [FULL] * 2}, {"layer_types": [FULL]}],
    "qwen2": [
        {"use_sliding_window": False},
        {"max_window_layers": 0, "layer_types": None},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["sliding_attention"], "use_sliding_window": True},
        {"layer_types": [FULL, SLIDING], "sliding_window": 3, "max_window_layers": 0},
        {"layer_types": [FULL] * 2, "sliding_window": 3, "use_sliding_window": False},
        {"layer_types": NULL, "sliding_window": NULL},
        {"rope_parameters": YARN | {"beta_fast": 1.5, "beta_slow": 0.5, "attention_factor": 1.1, "truncate": False}},
    ],
    "qwen2_moe": [
        {"layer_types": [FULL, SLIDING], "sliding_window": 2},
        {"num_experts_per_tok": 1},
        {"qkv_bias": False},
        {"norm_topk_prob": True},
        {"mlp_only_layers": []},
        {"decoder_sparse_step": 2},
    ],
    "olmoe": [{"clip_qkv": 0.3}, {"clip_qkv": None}, {"clip_qkv": NULL}, {"num_experts_per_tok": 1}],
    "gpt_oss": [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"swiglu_limit": 0.7},
        {"swiglu_alpha": 1.0},
        {"num_experts_per_tok": 1, "experts_per_token": 2},
        {"sliding_window": 2},
    ],
    "deepseek_v3": [
        {"num_experts_per_tok": 1, "num_local_experts": 6},
        {"head_dim": 4, "qk_head_dim": 7},
        {"num_key_value_heads": 2},
        {"rope_parameters": YARN | {"mscale_all_dim": 1.3, "factor": 2.0}},
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
    "qwen3_moe": [
        {"num_experts_per_tok": 2},
        {"mlp_only_layers": [0]},
        {"mlp_only_layers": [7]},
        {"decoder_sparse_step": 2},
    ],
    "mixtral": [{"num_experts_per_tok": 1}, {"num_experts": 2}, {"num_local_experts": 4, "num_experts": 4}],
}


def changes(name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Each as what config.json's keys become."""
    odd = [change for begin, some in ODD.items() if name.startswith(begin) for change in some]
    return [{key: None} for key in config] + odd


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in (config | change).items() if change.get(key, value) is not None}
    return {key: None if value == NULL else value for key, value in kept.items()}


def keys_read(folder: pathlib.Path) -> list[str]:
    """The keys that a configuration is asked for by the code of transformers, but its own."""
    base, found = transformers.PreTrainedConfig, set()
    get, own = base.__getattribute__, set(dir(base()))

    def record(config: Any, key: str) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if "/transformers/" in file and "configuration_utils" not in file and "/generation/" not in file:
            found.add(key)
        return get(config, key)

    base.__getattribute__ = record
    try:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        logits_of(folder, architecture, safetensors.numpy.load_file(folder / "expected.safetensors")["tokens"])
    finally:
        base.__getattribute__ = get
    return sorted(found - own)


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
    found, reads = {}, {}
    for source in sorted(path for path in (HERE / "hf").iterdir() if path.name not in LEFT_OUT):
        config = json.loads((source / "config.json").read_text())
        whole = safetensors.numpy.load_file(source / "expected.safetensors")["logits"]
        assert outcome(source, {}, whole) == "same"
        reads[config["architectures"][0]] = keys_read(source)
        found[source.name] = {
            json.dumps(change): outcome(source, change, whole) for change in changes(source.name, config)
        }
    lines = (f" {json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    lines = (f" {json.dumps(name)}: {json.dumps(of)}" for name, of in reads.items())
    READS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
