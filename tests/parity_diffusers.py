"""Makes the numbers that jaxops' AdaLN is compared with, by diffusers itself: `pip install -r tests/parity.txt`, then
`python tests/parity_diffusers.py`.

tests/data/diffusers/<name>.safetensors gets, of a module with random weights: its parameters by their own names, what
goes in (input:*), what comes out (output:*), and the gradients of the sum of the outputs' sines (gradient:*). What the
norms see is as small as the root of an epsilon, so that one in place of another would show.
"""

import pathlib

import safetensors.torch
import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.normalization import (
    AdaLayerNorm,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    LuminaRMSNormZero,
    SD35AdaLayerNormZeroX,
)

FOLDER = pathlib.Path(__file__).parent / "data" / "diffusers"
WIDTH, CONDITION, SMALL = 16, 12, 0.003
BLOCK = {"dim": WIDTH, "num_attention_heads": 2, "attention_head_dim": WIDTH // 2, "attention_bias": True}
MODEL = {
    "num_attention_heads": 2,
    "attention_head_dim": WIDTH // 2,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 4,
}


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Weights as large as trained ones, gates and shifts among them; residual branches small, as the rows are."""
    for name, parameter in module.named_parameters():
        small = SMALL if "to_out" in name or "net.2" in name else 0.3
        parameter.data = small * torch.randn_like(parameter)
    return module.float().eval()


def save(name: str, inputs: dict, outputs: dict, parameters: dict) -> None:
    sum(torch.sin(value).sum() for value in outputs.values()).backward()
    stored = dict(parameters)
    stored |= {f"input:{key}": value for key, value in inputs.items()}
    stored |= {f"output:{key}": value for key, value in outputs.items()}
    learned = {key: value for key, value in {**inputs, **parameters}.items() if value.grad is not None}
    stored |= {f"gradient:{key}": value.grad for key, value in learned.items()}
    FOLDER.mkdir(exist_ok=True)
    stored = {key: value.detach().contiguous() for key, value in stored.items()}
    safetensors.torch.save_file(stored, FOLDER / f"{name}.safetensors")
    print(name, {key: tuple(value.shape) for key, value in stored.items() if not key.startswith("gradient:")})


def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).requires_grad_()


def make_norm(name: str, module: torch.nn.Module, *names: str, condition: int = WIDTH) -> None:
    """names: of what the module gives."""
    torch.manual_seed(len(name))
    randomise(module)
    inputs = {"x": leaf(2, 5, WIDTH, scale=SMALL), "cond": leaf(2, condition)}
    results = module(inputs["x"], **{"temb" if name == "AdaLayerNorm" else "emb": inputs["cond"]})
    results = results if isinstance(results, tuple) else (results,)
    save(name, inputs, dict(zip(names, results, strict=True)), dict(module.named_parameters()))


def make_continuous(name: str, **options) -> None:
    torch.manual_seed(len(name))
    module = randomise(AdaLayerNormContinuous(WIDTH, CONDITION, **options))
    inputs = {"x": leaf(2, 5, WIDTH, scale=SMALL), "cond": leaf(2, CONDITION)}
    save(name, inputs, {"y": module(inputs["x"], inputs["cond"])}, dict(module.named_parameters()))


def make_latte() -> None:
    """A block with adaLN-single and without cross attention."""
    torch.manual_seed(3)
    block = BasicTransformerBlock(
        **BLOCK,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        activation_fn="gelu-approximate",
    )
    randomise(block)
    inputs = {"x": leaf(2, 5, WIDTH, scale=SMALL), "cond": leaf(2, 6 * WIDTH)}
    save("latte_block", inputs, {"x": block(inputs["x"], timestep=inputs["cond"])}, dict(block.named_parameters()))


class Watch:
    """What goes through a model's parts, and leaves in place of what goes into some."""

    def __init__(self):
        self.seen: dict[str, torch.Tensor] = {}

    def small_leaf(self, name: str):
        def hook(module, args):
            self.seen[name] = (SMALL * args[0]).detach().requires_grad_()
            return (self.seen[name], *args[1:])

        return hook

    def result(self, name: str):
        def hook(module, args, result):
            if name in self.seen:  # of DiT's first block it is also the last norm's
                return self.seen[name]
            self.seen[name] = result.detach().requires_grad_()
            return self.seen[name]

        return hook

    def argument(self, name: str):
        def hook(module, args):
            self.seen[name] = args[0]

        return hook


def make_dit() -> None:
    """From the first block's rows to what the last product multiplies. Each block has embedders of its own."""
    torch.manual_seed(5)
    model, watch = randomise(DiTTransformer2DModel(**MODEL, num_embeds_ada_norm=7)), Watch()
    model.transformer_blocks[0].register_forward_pre_hook(watch.small_leaf("x"))
    for i, block in enumerate(model.transformer_blocks):
        block.norm1.emb.register_forward_hook(watch.result(f"cond{i}"))
    model.proj_out_2.register_forward_pre_hook(watch.argument("y"))
    model(torch.randn(2, 4, 4, 4), timestep=torch.tensor([10, 700]), class_labels=torch.tensor([1, 4]))
    outputs = {"y": watch.seen.pop("y")}
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(("transformer_blocks", "proj_out_1")) and ".emb." not in name
    }
    save("dit", watch.seen, outputs, parameters)


def make_pixart() -> None:
    """From the first block's rows to what the last product multiplies, captions and all."""
    torch.manual_seed(6)
    sizes = MODEL | {"cross_attention_dim": WIDTH, "caption_channels": 6, "use_additional_conditions": False}
    model, watch = randomise(PixArtTransformer2DModel(**sizes)), Watch()
    model.transformer_blocks[0].register_forward_pre_hook(watch.small_leaf("x"))
    model.adaln_single.emb.register_forward_hook(watch.result("embedded"))
    model.caption_projection.register_forward_hook(watch.result("captions"))
    model.proj_out.register_forward_pre_hook(watch.argument("y"))
    model(
        torch.randn(2, 4, 4, 4),
        encoder_hidden_states=torch.randn(2, 3, 6),
        timestep=torch.tensor([10, 700]),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )
    outputs = {"y": watch.seen.pop("y")}
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(("transformer_blocks", "scale_shift_table", "adaln_single.linear"))
    }
    save("pixart", watch.seen, outputs, parameters)


if __name__ == "__main__":
    make_norm("AdaLayerNorm", AdaLayerNorm(WIDTH, chunk_dim=1), "y")
    zero = ("y", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")
    make_norm("AdaLayerNormZero", AdaLayerNormZero(WIDTH), *zero)
    make_norm("AdaLayerNormZero_no_bias", AdaLayerNormZero(WIDTH, bias=False), *zero)
    make_norm("AdaLayerNormZeroSingle", AdaLayerNormZeroSingle(WIDTH), "y", "gate")
    make_norm("SD35AdaLayerNormZeroX", SD35AdaLayerNormZeroX(WIDTH), *zero, "y2", "gate_msa2")
    make_norm("LuminaRMSNormZero", LuminaRMSNormZero(WIDTH, 1e-5, True), "y", "gate_msa", "scale_mlp", "gate_mlp")
    make_continuous("AdaLayerNormContinuous")
    make_continuous("AdaLayerNormContinuous_no_bias", bias=False)
    make_continuous("AdaLayerNormContinuous_plain", elementwise_affine=False, eps=1e-6)
    make_continuous("AdaLayerNormContinuous_rms", norm_type="rms_norm", bias=False)
    make_latte()
    make_dit()
    make_pixart()
