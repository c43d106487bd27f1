"""Makes the small checkpoints that models.hf is compared with, by transformers itself.

`pip install -r tests/parity.txt`, then `python tests/parity.py [NAME ...]`. For each architecture and some sizes, odd
ones among them, tests/data/hf/<name>/ gets config.json and model.safetensors as transformers saves them, and
expected.safetensors: tokens, their logits, the mean cross-entropy of the next tokens and its gradients by the
checkpoint's names, and the 9 likeliest tokens after the first 7 of one row and the first 4 of the other.
"""

import json
import pathlib
import shutil
import sys

import safetensors.torch
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "data" / "hf"
COMMON = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ODD = {"hidden_size": 15, "intermediate_size": 23, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
MIXTRAL = COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
ODD_MIXTRAL = {
    "hidden_size": 18,
    "intermediate_size": 13,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
}
QWEN3_MOE = COMMON | {
    "head_dim": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 30.0}
GPT_OSS = COMMON | {
    "hidden_size": 14,
    "intermediate_size": 11,
    "head_dim": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 4,
    "rope_parameters": YARN | {"truncate": False, "beta_fast": 2.0},
}
DEEPSEEK = COMMON | {
    "moe_intermediate_size": 7,
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
CASES = {
    "llama": ("LlamaForCausalLM", COMMON | {"rms_norm_eps": 1e-5}),
    "llama_odd_tied": ("LlamaForCausalLM", COMMON | ODD | {"tie_word_embeddings": True, "rope_theta": 500.0}),
    "llama31_biased": (
        "LlamaForCausalLM",
        COMMON
        | {
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 20},
        },
    ),
    "mistral": ("MistralForCausalLM", COMMON | ODD | {"sliding_window": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        COMMON
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", COMMON | {"head_dim": 6}),
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "mixtral_odd": ("MixtralForCausalLM", MIXTRAL | ODD_MIXTRAL | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        QWEN3_MOE | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe_weights_as_they_are": (
        "Qwen3MoeForCausalLM",
        QWEN3_MOE | {"num_experts": 3, "num_experts_per_tok": 1, "norm_topk_prob": False, "num_hidden_layers": 1},
    ),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        QWEN3_MOE
        | {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 4}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "moe_intermediate_size": 5, "intermediate_size": 9},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        COMMON
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [0]}
        | {"shared_expert_intermediate_size": 9, "use_sliding_window": True, "sliding_window": 3},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        COMMON
        | {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 9, "clip_qkv": 1.3}
        | {"pad_token_id": None, "eos_token_id": None},
    ),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "gpt_oss_mxfp4": (
        "GptOssForCausalLM",
        GPT_OSS
        | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
        | {"num_experts_per_tok": 1, "quantization_config": MXFP4},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v3_fp8": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {"q_lora_rank": None, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0}, "rope_interleave": False}
        | {"norm_topk_prob": False, "quantization_config": FP8},
    ),
}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of at most 128 x 128: one scale."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, in, out] -> blocks [experts, out, in / 32, 16] and exponents [experts, out, in / 32]."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    distance = ((grouped.abs() / exponents.exp2()[..., None])[..., None] - FP4).abs()
    codes = distance.argmin(-1) + 8 * (grouped < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize(folder: pathlib.Path, method: str, said: dict) -> None:
    """Rewrites a checkpoint's matrices; transformers reads what is then there."""
    file = folder / "model.safetensors"
    found = safetensors.torch.load_file(file)
    for name, weight in list(found.items()):
        linear = weight.dim() == 2 and "layers" in name and ".gate.weight" not in name
        if method == "fp8" and linear:
            found[name], found[f"{name}_scale_inv"] = to_fp8(weight)
        elif method == "mxfp4" and weight.dim() == 3:
            found[f"{name}_blocks"], found[f"{name}_scales"] = to_mxfp4(found.pop(name))
    safetensors.torch.save_file(found, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}, indent=2) + "\n")


def dequantizing(method: str) -> dict:
    kinds = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    return {"quantization_config": kinds[method](dequantize=True)}


def make(name: str, architecture: str, sizes: dict) -> None:
    torch.manual_seed(len(name))
    model_class = getattr(transformers, architecture)
    quantized = sizes.get("quantization_config")
    sizes = {key: value for key, value in sizes.items() if key != "quantization_config"}
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = model_class.config_class(**{"max_position_embeddings": 64} | sizes, **how)
    model = model_class(config).float().eval()
    with torch.no_grad():  # its own are so small that every layer's part in the logits is lost in their noise
        for key, parameter in model.named_parameters():
            wide = 2.0 if "gate_up_proj" in key and architecture == "GptOssForCausalLM" else 0.3  # some are clamped
            parameter.copy_(parameter + torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else wide))
        for key, buffer in model.named_buffers():
            if "bias" in key:
                buffer.copy_(0.1 * torch.randn_like(buffer))
    tokens = torch.randint(0, config.vocab_size, (2, 11))
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if quantized is not None:
        method = quantized["quant_method"]
        quantize(folder, method, quantized)
        read = model_class.from_pretrained(folder, dtype=torch.float32, **how, **dequantizing(method))
        model.load_state_dict(read.state_dict())
        model = model.float().eval()
    logits = model(tokens).logits
    with torch.no_grad():
        greedy = [
            model.generate(row[None, :length], max_new_tokens=9, do_sample=False, eos_token_id=None)[0, length:]
            for row, length in zip(tokens, (7, 4), strict=True)
        ]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
    loss.backward()
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {
        "tokens": tokens.int(),
        "logits": logits.detach().contiguous(),
        "loss": loss.detach()[None],
        "greedy": torch.stack(greedy).int(),
    }
    # The gradients go the checkpoint's way: transformers keeps experts in other shapes than it saves.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")
    gradients = safetensors.torch.load_file(folder / "gradients" / "model.safetensors")
    shutil.rmtree(folder / "gradients")
    safetensors.torch.save_file(
        expected
        | {f"gradient:{key}": value for key, value in gradients.items() if "e_score_correction_bias" not in key},
        folder / "expected.safetensors",
    )
    print(name, f"{loss.item():.4f}", sorted(safetensors.torch.load_file(folder / "model.safetensors"))[:40])


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name, *CASES[name])
