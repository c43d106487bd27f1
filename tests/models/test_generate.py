"""Text from checkpoints: transformers' likeliest tokens, prompts of unequal length in one batch, and the command."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import tokenizers
import typer
from flax import nnx

from models import generate, hf
from models.decoder import Decoder, DecoderConfig

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf"
NAMES = ("llama_odd_tied", "mixtral_odd", "qwen3_moe")
BYTES = DecoderConfig(
    vocab=256, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=16, experts=3, top_k=2, tie_embeddings=True
)


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: Decoder(BYTES, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint")
    hf.save(made, "MixtralForCausalLM", model)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_tokens_are_those_of_transformers(name):
    """Of two prompts of 7 and 4 tokens at once."""
    expected = safetensors.flax.load_file(DATA / name / "expected.safetensors")
    _, model = hf.load(DATA / name, backend="xla")
    tokens = np.asarray(expected["tokens"])
    got = generate.sample(model, generate.align([tokens[0, :7].tolist(), tokens[1, :4].tolist()]), jax.random.key(0), 9)
    np.testing.assert_array_equal(got, expected["greedy"])


def test_what_is_kept_is_what_a_pass_over_all_would_see(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)), jnp.int32)
    whole, _ = nnx.jit(lambda model: model(tokens))(model)
    cache, none = model.empty_cache(2, 12), jnp.zeros(2, jnp.int32)
    extend = nnx.jit(lambda model, tokens, cache, at: model.extend(tokens, cache, at, none))
    first, cache = extend(model, tokens[:, :4], cache, jnp.int32(0))
    second, cache = extend(model, tokens[:, 4:8], cache, jnp.int32(4))
    np.testing.assert_allclose(jnp.stack([first, second], axis=1), whole[:, [3, 7]], atol=2e-5)


def test_draws_are_the_keys_and_a_row_ends(model):
    prompts = generate.align([[1, 2, 3], [4]])
    draw = nnx.jit(lambda model, seed, end: generate.generate(model, prompts, jax.random.key(seed), 12, 1.0, end))
    drawn = np.asarray(draw(model, 0, -1))
    np.testing.assert_array_equal(draw(model, 0, -1), drawn)
    assert (np.asarray(draw(model, 1, -1)) != drawn).any()
    end = int(drawn[1, 5])
    ended = np.asarray(draw(model, 0, end))
    np.testing.assert_array_equal(ended[1, :6], drawn[1, :6])
    assert set(ended[1, 5:].tolist()) == {end}


class Coin:
    """A model whose next token is 0, 1 or 2 with fixed logits."""

    logits = np.log([0.1, 0.3, 0.6]).astype(np.float32)

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, length), jnp.int32)

    def extend(self, tokens, cache, at, first):
        return jnp.broadcast_to(self.logits, (tokens.shape[0], 3)), jax.lax.dynamic_update_slice(cache, tokens, (0, at))


draw_coins = jax.jit(lambda prompts, temperature: generate.generate(Coin(), prompts, jax.random.key(0), 4, temperature))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_are_as_likely_as_the_temperature_says(temperature):
    """Probabilities are exp(logit / temperature), independently at every position."""
    prompts = generate.Prompts(jnp.zeros((5000, 2), jnp.int32), jnp.zeros(5000, jnp.int32))
    drawn = np.asarray(draw_coins(prompts, temperature))
    chances = np.array([0.1, 0.3, 0.6]) ** (1 / temperature)
    for place in drawn.T:
        np.testing.assert_allclose(np.bincount(place, minlength=3) / 5000, chances / chances.sum(), atol=0.03)
    assert np.abs(np.corrcoef(drawn.T)[np.triu_indices(4, 1)]).max() < 0.05


def test_prompts_without_tokens():
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="write one at least"):
            generate.align(prompts)


def test_the_command(folder, capsys):
    generate.main(folder, ["once upon", "a"], length=5)
    lines = capsys.readouterr().out
    assert lines.startswith("once upon")
    _, model = hf.load(folder)
    wanted = generate.sample(model, generate.align([list(b"once upon"), list(b"a")]), jax.random.key(0), 5)
    assert bytes(wanted[0].tolist()).decode(errors="replace") in lines


def test_a_tokenizer_beside_the_checkpoint(folder, tmp_path, capsys):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {f"word{i}": i for i in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))  # no password
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    generate.main(tmp_path, ["word7 word9"], length=3)
    assert len([word for word in capsys.readouterr().out.split() if "word" in word]) >= 4


def test_bytes_of_a_model_with_more_tokens():
    assert generate.Bytes().decode([97, 300, 98]) == "ab"


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"config\.json"):
        generate.main(tmp_path, ["a"])
    with pytest.raises(typer.BadParameter, match=r"no tokenizer\.json, and with 29 tokens"):
        generate.main(DATA / "llama", ["a"])
    (tmp_path / "file").write_text("{}")
    with pytest.raises(typer.BadParameter, match=r"file/config\.json"):
        generate.main(tmp_path / "file", ["a"])


def test_what_is_said_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(generate.hf, "load", lambda *_, **__: pytest.fail("it is loaded"))
    with pytest.raises(typer.BadParameter, match="'foo' is not one of float32, bfloat16, float16"):
        generate.main(folder, ["a"], dtype="foo")
    with pytest.raises(
        typer.BadParameter,
        match=r"20,000 tokens and --length is 64: more than the limit of 8,192.*pass --limit 20064: .* \d+\.\d GB",
    ):
        generate.main(folder, ["a", "a" * 20_000])
    with pytest.raises(typer.BadParameter, match="a prompt has no tokens"):
        generate.main(folder, [""])


def test_a_tokenizer_with_tokens_that_the_model_has_not(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"high": 300, "?": 0}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(typer.BadParameter, match="the tokenizer's token 300 is none of the model's"):
        generate.main(tmp_path, ["high"])
