"""`python -m models.train lm` on a tiny model: what it learns, what it compiles to, what it writes."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

from models.data import bigram_nats, even_windows, read_corpus, source_files
from models.moe_lm import MoEConfig, MoELM
from models.presets import PRESETS, Preset
from models.train_lm import main, make_step
from tests.compare import assert_close

CONFIG = MoEConfig(layers=1, width=16, heads=2, experts=4, top_k=2, hidden=8, context=32)
TINY = Preset(CONFIG, batch=4, steps=30, learning_rate=2e-2, warmup_steps=3, eval_every=15, eval_windows=8)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


class Command(NamedTuple):
    """A run of the command on TINY: what it printed, the folder that it wrote, the step that it compiled, and the arguments of the first step."""

    printed: str
    out: Path
    graphdef: Any
    step: Any
    first: Any


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    out, printed, seen = tmp_path_factory.mktemp("run"), io.StringIO(), {}

    def guarded_step(graphdef, preset):
        seen.update(graphdef=graphdef, step=make_step(graphdef, preset))

        def run(state, data, key):
            seen.setdefault("first", (jax.tree.map(np.array, state), data, key))
            with jax.transfer_guard("disallow"):
                return seen["step"](state, data, key)

        return run

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setitem(PRESETS, "tiny", TINY)
        patch.setattr("models.train_lm.make_step", guarded_step)
        main(preset="tiny", out=out)
    return Command(printed.getvalue(), out, **seen)


def test_loss_falls(command):
    losses = [float(loss) for loss in re.findall(r"step \d+: held-out ([0-9.]+)", command.printed)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_what_is_printed(command):
    assert f"{sum(p.size for p in jax.tree.leaves(command.first[0].params)):,} parameters" in command.printed
    assert "a bigram table needs" in command.printed
    assert "tokens/s" in command.printed


@pytest.mark.parametrize("name", ["loss.png", "expert_load.png"])
def test_pictures(command, name):
    assert (command.out / name).read_bytes().startswith(b"\x89PNG")


def test_step_compiles_once(command):
    assert command.step._cache_size() == 1


def test_step_never_meets_the_host(command):
    text = command.step.lower(*command.first).compile().as_text()
    for word in ("callback", "outfeed", "infeed", "send(", "recv(", "S(5)"):  # S(5) is host memory
        assert word not in text
    aliases = text.split("input_output_alias={", 1)[1].splitlines()[0]
    assert aliases.count("-alias)") == len(jax.tree.leaves(command.first[0])), "the whole state is donated"


def test_same_state_same_bits(command):
    state, data, key = command.first
    one, other = (command.step(jax.device_put(state), data, key)[0] for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def model(command):
    return nnx.merge(command.graphdef, jax.device_put(command.first[0].params))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_uniform_router_has_balance_one(model):
    moe = nnx.clone(model.blocks[0].moe)
    route = nnx.jit(lambda moe, x: moe(x)[1])
    moe.router.kernel[...] = jnp.zeros_like(moe.router.kernel[...])
    routing = route(moe, normal(0, 10, CONFIG.width))
    assert routing.balance == pytest.approx(1)
    moe.router.kernel[...] = jnp.zeros_like(moe.router.kernel[...]).at[:, :2].set(10.0)
    routing = route(moe, jnp.ones((10, CONFIG.width)))
    assert routing.balance == pytest.approx(CONFIG.experts / CONFIG.top_k), "all tokens to the same two experts"
    np.testing.assert_allclose(routing.load, [0.5, 0.5, 0, 0])


def test_moe_is_the_weighted_sum_of_its_experts(model):
    x = normal(1, 10, CONFIG.width)
    graphdef, params = nnx.split(model.blocks[0].moe)

    def every_expert(params, x):
        moe = nnx.merge(graphdef, params)
        probs = jax.nn.softmax(moe.router(x))
        kept = jnp.where(probs >= jnp.sort(probs, axis=-1)[:, -CONFIG.top_k, None], probs, 0)
        gate, up = jnp.split(jnp.einsum("td,edh->teh", x, moe.gate_up.kernel[...]), 2, axis=-1)
        return jnp.einsum("teh,ehd,te->td", jax.nn.silu(gate) * up, moe.down.kernel[...], kept / kept.sum(axis=-1, keepdims=True))

    def output_and_gradients(f):
        gradients = jax.grad(lambda *args: jnp.sum(f(*args) ** 2), argnums=(0, 1))
        return jax.tree.leaves(jax.jit(lambda *args: (f(*args), gradients(*args)))(params, x))

    got = output_and_gradients(lambda params, x: nnx.merge(graphdef, params)(x)[0])
    for ours, wanted in zip(got, output_and_gradients(every_expert), strict=True):
        assert_close(ours, wanted, "float32")


def test_a_later_byte_changes_no_earlier_logits(model):
    forward = nnx.jit(lambda model, tokens: model(tokens)[0])
    tokens = np.random.default_rng(0).integers(0, 256, (2, CONFIG.context), np.int32)
    logits = forward(model, jnp.asarray(tokens))
    tokens[:, 20] ^= 1
    changed = forward(model, jnp.asarray(tokens))
    np.testing.assert_allclose(changed[:, :20], logits[:, :20], rtol=1e-5, atol=1e-6)
    assert np.abs(changed[:, 20:] - logits[:, 20:]).max(axis=(0, 2)).min() > 1e-4


def test_held_out_files_are_not_trained_on(tmp_path):
    texts = {f"{name}.py": f"# {name}\n".encode() for name in "abcdefghijklmnopqrstuvwxyz"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("never read")
    assert [file.name for file in source_files(tmp_path)] == sorted(texts)
    corpus = read_corpus(tmp_path)
    train, heldout = (set(bytes(part).split(b"\0")[:-1]) for part in corpus)
    assert heldout == {b"# j\n", b"# t\n"}
    assert train == set(texts.values()) - heldout


def test_the_corpus_is_the_same_every_time(corpus):
    for part, again in zip(corpus, read_corpus(), strict=True):
        np.testing.assert_array_equal(part, again)
    assert len(corpus.train) > 5 * len(corpus.heldout) > 1_000_000


def test_no_python_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 Python files"):
        read_corpus(tmp_path)


def test_bigram():
    train = np.frombuffer(b"ab" * 50_000, np.uint8)
    assert bigram_nats(train, even_windows(train, 3, 8)) < 0.01
    assert bigram_nats(train, np.frombuffer(b"zzzz", np.uint8)[None]) == pytest.approx(np.log(256))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_fit(preset):
    model = preset.model
    assert model.width % (2 * model.heads) == 0
    assert preset.eval_windows % preset.batch == 0
    assert preset.steps > preset.warmup_steps


@pytest.mark.parametrize(("name", "total"), [("small", 25e6), ("medium", 150e6), ("large", 1e9)])
def test_preset_sizes(name, total):
    shapes = nnx.state(nnx.eval_shape(lambda: MoELM(PRESETS[name].model, rngs=nnx.Rngs(0))))
    assert sum(p.size for p in jax.tree.leaves(shapes)) == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("options", [{"preset": "huge"}, {"backend": "cublas"}])
def test_wrong_options(options):
    with pytest.raises(typer.BadParameter, match="is not one of"):
        main(**options)
