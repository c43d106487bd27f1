"""Makes the small checkpoints that models.hf is compared with, by transformers itself.

`pip install -r tests/parity.txt`, then `python tests/parity.py`. For each architecture and some sizes, odd ones among
them, tests/data/hf/<name>/ gets config.json and model.safetensors as transformers saves them, and expected.safetensors:
tokens, their logits, the mean cross-entropy of the next tokens and its gradients by the checkpoint's names, and the 9
likeliest tokens after the first 7 of one row and the first 4 of the other.
"""

import pathlib
import shutil

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
CASES = {
    "llama": ("LlamaForCausalLM", COMMON | {"rms_norm_eps": 1e-5}),
    "llama_odd_tied": ("LlamaForCausalLM", COMMON | ODD | {"tie_word_embeddings": True, "rope_theta": 500.0}),
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
}


def make(name: str, architecture: str, sizes: dict) -> None:
    torch.manual_seed(len(name))
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        **sizes, max_position_embeddings=64, attn_implementation="eager", experts_implementation="eager"
    )
    model = model_class(config).float().eval()
    with torch.no_grad():  # its own are so small that every layer's part in the logits is lost in their noise
        for parameter in model.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.3))
    tokens = torch.randint(0, config.vocab_size, (2, 11))
    logits = model(tokens).logits
    with torch.no_grad():
        greedy = [
            model.generate(row[None, :length], max_new_tokens=9, do_sample=False, eos_token_id=None)[0, length:]
            for row, length in zip(tokens, (7, 4), strict=True)
        ]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
    loss.backward()
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
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
        expected | {f"gradient:{key}": value for key, value in gradients.items()}, folder / "expected.safetensors"
    )
    print(name, f"{loss.item():.4f}", sorted(safetensors.torch.load_file(folder / "model.safetensors"))[:40])


if __name__ == "__main__":
    for name, (architecture, sizes) in CASES.items():
        make(name, architecture, sizes)
