"""What transformers does with a checkpoint whose config.json lacks a key or has an odd one.

`pip install -r tests/parity.txt`, then `python tests/parity_config.py`. Writes tests/data/hf_configs.json: by
checkpoint of tests/data/hf and by change, "same" where transformers computes the same logits as with the whole
config.json, "refused" where it raises or misses tensors, else the last logits of the first row.
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
    return "same" if same else np.round(found[0, -1], 5).tolist()


def main() -> None:
    found = {}
    for source in sorted(path for path in (HERE / "hf").iterdir() if path.is_dir()):
        config = json.loads((source / "config.json").read_text())
        whole = safetensors.numpy.load_file(source / "expected.safetensors")["logits"]
        assert outcome(source, {}, whole) == "same"
        found[source.name] = {
            json.dumps(change): outcome(source, change, whole) for change in changes(source.name, config)
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
