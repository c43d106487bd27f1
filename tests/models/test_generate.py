"""`python -m models.generate`: prompts, chats and files of them, what is written and when, and errors."""

import io
import itertools
import json
import pathlib
import shutil
import sys

import jax
import pytest
import tokenizers
import typer

from models import hf
from models.decoder import DecoderConfig
from models.generate import command as generate
from models.generate.command import main
from models.generate.sampling import Sampling
from models.generate.slots import generate as complete
from tests.models.test_decoder_parts import model_of

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf"
BYTES = DecoderConfig(vocab=256, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, tie_embeddings=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint")
    beside = {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})}
    hf.save(made, "LlamaForCausalLM", model_of(BYTES), beside=beside)
    return made


@pytest.fixture(scope="module")
def model(folder):
    """On its device for good, as the command's own: they share programs."""
    return hf.load(folder)[1]


def words_of(model, prompts, length, **options) -> list[str]:
    found = complete(model, [list(prompt.encode()) for prompt in prompts], length, **options)
    return [bytes(completion.tokens).decode(errors="replace") for completion in found]


def test_prompts_are_continued_in_their_order(model, folder, capsys):
    prompts = ["once upon", "a", "\u20ac"]
    main(folder=folder, prompt=prompts, length=5)
    wanted = words_of(model, prompts, 5)
    assert capsys.readouterr().out == "".join(f"{one}{more}\n" for one, more in zip(prompts, wanted, strict=True))


def test_text_is_written_while_it_is_drawn(model, folder, monkeypatch):
    """Every sixteen tokens, and what comes of a prompt before is not written twice."""
    written = []

    class Terminal(io.StringIO):
        def flush(self):
            written.append(self.getvalue())

    monkeypatch.setattr(generate.sys, "stdout", Terminal())
    main(folder=folder, prompt=["ab", "c"], length=40, temperature=1.0, seed=3)
    (one, other) = words_of(model, ["ab", "c"], 40, sampling=Sampling(1.0), key=jax.random.key(3))
    assert written[0] == "ab"
    assert written[-1] == f"ab{one}\nc{other}\n"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(written))
    assert len(set(written)) > 20


def test_a_file_of_prompts(model, folder, tmp_path, capsys):
    """Each becomes a JSON line, in their order."""
    (tmp_path / "p.txt").write_text("one prompt\n\nanother\n")
    (text,) = words_of(model, ["one prompt"], 9)
    main(folder=folder, prompts=tmp_path / "p.txt", prompt=["third"], length=9, slots=2, stop=[text[3:5]])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["third", "one prompt", "another"]
    assert (lines[1]["text"], lines[1]["ended"]) == (text[: text.index(text[3:5])], "stop")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one prompt"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(typer.BadParameter, match=r"a prompt has messages, .*: pass --chat"):
        main(folder=folder, prompts=tmp_path / "p.jsonl")
    main(folder=folder, prompts=tmp_path / "p.jsonl", chat=True, length=4)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1]["prompt"] == [{"role": "user", "content": "hi"}]
    wanted = words_of(model, ["<user>one prompt\n<assistant>", "<user>hi\n<assistant>"], 4)
    assert [line["text"] for line in lines] == wanted
    assert [(line["tokens"], line["ended"]) for line in lines] == [(4, "length")] * 2
    for line in ("7", '{"text": "a"}', '{"prompt": 3}', "{"):
        (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n{line}\n')
        with pytest.raises(typer.BadParameter, match=r"p\.jsonl, line 2"):
            main(folder=folder, prompts=tmp_path / "p.jsonl")


def test_a_conversation(model, folder, monkeypatch, capsys):
    """Each answer continues all that was said."""
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand then?\n"))
    main(folder=folder, chat=True, length=6)
    (first,) = words_of(model, ["<user>hello\n<assistant>"], 6)
    (second,) = words_of(model, [f"<user>hello\n<assistant>{first}\n<user>and then?\n<assistant>"], 6)
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    main(folder=folder, chat=True, prompt=["hello"], length=6)
    assert capsys.readouterr().out == f"{first}\n"


def test_a_line_that_is_no_text(folder, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO(b"hello\ncaf\xe9\n"), "utf-8")
    for stdin, says in ((given, "no text in the terminal's encoding"), (io.StringIO("caf\udce9\n"), "which is none")):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(typer.BadParameter, match=f"the line .*{says}"):
            main(folder=folder, chat=True, length=6)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", "[b]\xe9? {x} \\u0020%s"), ("ascii", "[b]?? {x} \\u0020%s")]
)
def test_an_output_that_cannot_show_everything(model, folder, tmp_path, monkeypatch, encoding, shown):
    """On a terminal what it has not is replaced; JSON lines lose nothing. Nothing in a prompt is markup or a format."""
    prompt = "[b]\xe9\u20ac {x} \\u0020%s"
    (tmp_path / "p.txt").write_bytes(prompt.encode())
    for options in ({"prompt": [prompt]}, {"prompts": tmp_path / "p.txt"}):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
        main(folder=folder, length=5, **options)
        sys.stdout.flush()
        (text,) = words_of(model, [prompt], 5)
        if "prompt" in options:
            shows = text.encode(encoding, "replace").decode(encoding)
            assert written.getvalue().decode(encoding) == f"{shown}{shows}\n"
        else:
            line = json.loads(written.getvalue().decode("ascii"))
            assert (line["prompt"], line["text"]) == (prompt, text)


@pytest.fixture
def with_words(folder, tmp_path):
    """The checkpoint with a tokenizer of words."""
    copied = shutil.copytree(folder, tmp_path / "with_words")
    words = {f"word{i}": i for i in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))  # no password
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(copied / "tokenizer.json"))
    (copied / "SHA256SUMS").unlink()
    return copied


def test_a_tokenizer_beside_the_checkpoint(model, with_words, capsys):
    """Any of generation_config.json's tokens ends a text."""
    (found,) = complete(model, [[7, 9]], 5)
    main(folder=with_words, prompt=["word7 word9"], length=5)
    assert capsys.readouterr().out.split() == ["word7", "word9", *(f"word{token}" for token in found.tokens)]
    end = next(token for token in found.tokens if token != found.tokens[0])
    (with_words / "generation_config.json").write_text(json.dumps({"eos_token_id": [255, end]}))
    main(folder=with_words, prompt=["word7 word9"], length=5)
    before = found.tokens[: found.tokens.index(end)]
    assert capsys.readouterr().out.split() == ["word7", "word9", *(f"word{token}" for token in before)]
    (with_words / "generation_config.json").write_text(json.dumps({"eos_token_id": ["end"]}))
    with pytest.raises(typer.BadParameter, match=r"generation_config\.json: eos_token_id is \['end'\]"):
        main(folder=with_words, prompt=["word7"])


def test_what_cannot_be_read(tmp_path, with_words):
    with pytest.raises(typer.BadParameter, match=r"config\.json"):
        main(folder=tmp_path, prompt=["a"])
    with pytest.raises(typer.BadParameter, match=r"no tokenizer\.json, and with 29 tokens"):
        main(folder=DATA / "llama", prompt=["a"])
    (tmp_path / "file").write_text("{}")
    with pytest.raises(typer.BadParameter, match=r"file/config\.json"):
        main(folder=tmp_path / "file", prompt=["a"])
    (with_words / "tokenizer_config.json").unlink()
    with pytest.raises(typer.BadParameter, match="with_words has no chat template"):
        main(folder=with_words, prompt=["a"], chat=True)


def test_what_is_said_before_anything_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(generate.hf, "load", lambda *_, **__: pytest.fail("it is loaded"))
    (empty := tmp_path / "empty.txt").write_text("\n")
    for options, says in (
        ({"dtype": "foo"}, "'foo' is not one of float32, bfloat16, float16"),
        ({"prompt": ["a", "a" * 20_000]}, r"20,000 tokens and --length is 64: more than the limit of 8,192.*"
         r"--limit 20064\."),
        ({"prompt": [""]}, "prompt 0 has no tokens"),
        ({"prompt": None}, "there is no prompt"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"prompt": ["a", "caf\udce9"]}, r"prompt 1 has '\\udce9' as character 3, which is none"),
        ({"prompt": ["a\0"]}, "prompt 0 has a zero byte"),
        ({"stop": ["a", "\udce9"]}, r"--stop has '\\udce9' as character 0"),
        ({"stop": ["a", ""]}, "a stop word is empty: leave it out"),
        ({"prompts": empty, "prompt": None, "chat": True}, "empty.txt has no line with a prompt"),
        ({"prompts": tmp_path}, "is no regular file"),
        ({"prompts": tmp_path / "none.jsonl"}, "none.jsonl cannot be read: No such file"),
    ):  # fmt: skip
        with pytest.raises(typer.BadParameter, match=says):
            main(**{"folder": folder, "prompt": ["a"]} | options)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"high": 300, "?": 0}, unk_token="?"))
    copied = shutil.copytree(folder, tmp_path / "copied")
    made.save(str(copied / "tokenizer.json"))
    with pytest.raises(typer.BadParameter, match="prompt 0 has the token 300, and the model's are 0 to 255"):
        main(folder=copied, prompt=["high"])
