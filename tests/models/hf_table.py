"""The table in docs/checkpoints.md, from the checkpoints and configurations that are compared with transformers.

`python -m tests.models.hf_table` prints it.
"""

import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator

from models import hf
from models.decoder import DecoderConfig
from tests.models.hf_checkpoints import DATA, NAMES, changed

CONFIGS: dict[str, dict] = json.loads((DATA.parent / "hf_configs.json").read_text())
rope = lambda kind: lambda c: c.rope_scaling is not None and c.rope_scaling.kind == kind
FEATURES: dict[str, Callable[[DecoderConfig], bool]] = {
    "grouped queries": lambda c: c.kv_heads < c.heads,
    "RoPE scaling llama3": rope("llama3"),
    "RoPE scaling yarn": rope("yarn"),
    "RoPE scaling linear": rope("linear"),
    "RoPE scaling dynamic": rope("dynamic"),
    "rotary positions of a part of a head": lambda c: c.rotary_dim is not None,
    "rotary pairs of neighbours": lambda c: c.rope_pairs,
    "biases of queries, keys, values": lambda c: c.qkv_bias,
    "bias of attention's output": lambda c: c.out_bias,
    "biases of the gated unit": lambda c: c.mlp_bias,
    "norms of queries and keys, by head": lambda c: c.qk_norm is True,
    "norms of queries and keys, of all heads": lambda c: c.qk_norm == "all_heads",
    "clipped queries, keys, values": lambda c: c.qkv_clip is not None,
    "a window in all layers": lambda c: c.window is not None and c.sliding is None,
    "a window in some layers": lambda c: c.sliding is not None,
    "attention sinks": lambda c: c.sinks,
    "latent attention": lambda c: c.latent is not None,
    "latent attention without a query rank": lambda c: c.latent is not None and c.latent.query_rank is None,
    "experts": lambda c: c.experts > 0,
    "weights of the experts normalized": lambda c: c.experts > 0 and c.normalize,
    "weights of the experts as they are": lambda c: not c.normalize,
    "dense layers among those with experts": lambda c: c.dense_layers != (),
    "shared experts": lambda c: c.shared_hidden > 0,
    "shared experts with a gate": lambda c: c.shared_gate,
    "sigmoid scores with a bias of the choice": lambda c: c.score == "sigmoid" and c.selection_bias,
    "groups of experts": lambda c: c.expert_groups > 1,
    "biased experts with clamped units": lambda c: c.expert_bias and c.clamp is not None,
    "tied embeddings": lambda c: c.tie_embeddings,
}
QUANTIZED = {"FP8 weights": "fp8", "MXFP4 weights": "mxfp4"}


def compared(scratch: pathlib.Path) -> Iterator[tuple[str, DecoderConfig, str]]:
    """(architecture, configuration, quantization) of all whose logits are compared."""
    for name in NAMES:
        said = json.loads((DATA / name / "config.json").read_text()).get("quantization_config", {})
        yield *hf.read_config(DATA / name), said.get("quant_method", "")
    for name, outcomes in CONFIGS.items():
        for number, (change, outcome) in enumerate(outcomes.items()):
            if isinstance(outcome, list):
                folder = changed(scratch / str(number), name, **json.loads(change))
                try:
                    yield *hf.read_config(folder), ""
                except ValueError:
                    continue  # refused


def table() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        found = list(compared(pathlib.Path(scratch)))
    short = {name: name.removesuffix("ForCausalLM") for name in hf.MODELS}
    rows = [f"| | {' | '.join(short.values())} |", f"|---|{'---|' * len(short)}"]
    for feature, has in FEATURES.items():
        having = {name for name, config, _ in found if has(config)}
        rows.append(f"| {feature} | {' | '.join('yes' if name in having else '' for name in short)} |")
    for feature, method in QUANTIZED.items():
        having = {name for name, _, used in found if used == method}
        rows.append(f"| {feature} | {' | '.join('yes' if name in having else '' for name in short)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
