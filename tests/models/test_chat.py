"""Chat templates: transformers' text, tokens and marks; where the assistant's words are without marks; errors."""

import json
import pathlib

import numpy as np
import pytest
import tokenizers

from models.data.chat import ChatTemplate, conversation, encode, template_of
from models.data.tokenizer import Bytes, HuggingFace

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "chat"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CASES = [(template, name) for template, cases in EXPECTED["templates"].items() for name in cases]


def template(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), TOKENS, name)


def written(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, "mine")


@pytest.mark.parametrize(
    ("thought", "read"),
    [
        ({"reasoning": "a"}, "a|a"),
        ({"thinking": "a", "reasoning_content": None}, "a|a"),
        ({"reasoning_content": "a", "thinking": None}, "a|a"),
        ({"reasoning": "a", "reasoning_content": None, "thinking": None}, "a|a"),
        ({"reasoning_content": "a", "thinking": "b"}, "b|a"),
        ({"reasoning": None}, "|"),
    ],
    ids=str,
)
def test_a_thought_has_each_name_that_templates_read(thought, read):
    """Files that are written from tables have null for names that a message lacks."""
    both = written("{% for each in messages %}{{ each.thinking }}|{{ each.reasoning_content }}{% endfor %}")
    assert both.render([{"role": "assistant", "content": "", **thought}]) == read


def given(name: str):
    line = {"messages": EXPECTED["conversations"][name]} | ({"tools": EXPECTED["tools"]} if name == "functions" else {})
    return conversation(line, "chats.jsonl, line 7")


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFace(FOLDER / "tokenizer.json")


def scored_parts(tokenizer, marked) -> list[str]:
    """The runs of scored tokens, as text with special tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked.scored, [False]]).astype(int)))
    decode = lambda tokens: tokenizer.tokenizer.decode(tokens, skip_special_tokens=False)
    return [decode(marked.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_transformers_text_and_tokens(name, chat, tokenizer):
    want, made = EXPECTED["templates"][name][chat], given(chat)
    if want["text"] is None:
        with pytest.raises(ValueError, match=f"{name}: the chat template says: "):
            template(name).render(made.messages, tools=made.tools)
        return
    assert template(name).render(made.messages, tools=made.tools) == want["text"]
    assert template(name).render(made.messages, prompt=True, tools=made.tools) == want["prompt"]
    if any(message["role"] == "assistant" for message in made.messages):
        marked = encode(tokenizer, template(name).mark(made))
        np.testing.assert_array_equal(marked.tokens, want["tokens"])
        if "scored" in want:
            np.testing.assert_array_equal(marked.scored, want["scored"])


# Of the conversation "several", whose answers are "hello" and "good bye", and of "thinking".
LEARNED = {
    "chatml": (["hello<|im_end|>", "good bye<|im_end|>"], ["so.<|im_end|>"]),
    "chatml_marked": (["hello<|im_end|>\n", "good bye<|im_end|>\n"], ["so.<|im_end|>\n"]),
    "llama": (["hello<|eot|>", "good bye<|eot|>"], ["so.<|eot|>"]),
    "mistral": ([" hello</s>", " good bye</s>"], [" so.</s>"]),
    # The answer before is followed by another token than the one that ends an answer.
    "channels": (
        ["<|channel|>final<|message|>hello", "<|channel|>final<|message|>good bye<|return|>"],
        ["<|channel|>analysis<|message|>hm, <why>?<|end|><|start|>assistant<|channel|>final<|message|>so.<|return|>"],
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned(name, tokenizer):
    """With the token that ends the turn, without the white space after it."""
    for chat, want in zip(("several", "thinking"), LEARNED[name], strict=True):
        marked = encode(tokenizer, template(name).mark(given(chat)))
        assert scored_parts(tokenizer, marked) == want


def test_a_token_over_the_edge_is_cut(tmp_path):
    """Of ":" and the answer's space the tokenizer makes one token, which no prompt ends with."""
    vocab = {token: i for i, token in enumerate(["a", "b", ":", " ", ": ", "<e>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [(":", " ")]))
    made.add_special_tokens(["<e>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, source = HuggingFace(tmp_path / "tokenizer.json"), "a:{% generation %} b<e>{% endgeneration %}"
    one = conversation({"messages": [{"role": "assistant", "content": "-"}]}, "x")
    assert tokenizer.encode_rendered("a: b<e>")[0] == [0, 4, 1, 5]
    marked = encode(tokenizer, written(source).mark(one))
    assert marked.tokens.tolist() == [0, 2, 3, 1, 5]
    assert marked.scored.tolist() == [False, False, True, True, True]
    # At the end it is not learned: it is not the assistant's alone.
    marked = encode(tokenizer, written("{% generation %}b:{% endgeneration %} a").mark(one))
    assert (marked.tokens.tolist(), marked.scored.tolist()) == ([1, 4, 0], [True, False, False])


def test_bytes():
    made = conversation({"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "😀!"}]}, "x")
    marked = encode(Bytes(), template("chatml").mark(made))
    text = "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n😀!<|im_end|>\n"
    assert bytes(marked.tokens.tolist()).decode() == text
    assert bytes(marked.tokens[marked.scored].tolist()).decode() == "😀!<|im_end|>\n"


def test_tokenizers_that_leave_out_white_space(tmp_path):
    """Their tokens cover the white space before them: no token of an answer is lost."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"?": 0, "one": 1, "Ġtwo": 2, "Ġ": 3, "<e>": 4}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.add_special_tokens(["<e>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    tokens, covers = tokenizer.encode_rendered("one two  two<e>")
    assert (tokens, covers.tolist()) == ([1, 2, 3, 2, 4], [[0, 3], [3, 7], [7, 8], [8, 12], [12, 15]])
    chat = conversation({"messages": [{"role": "assistant", "content": "-"}]}, "x")
    marked = encode(tokenizer, written("one{% generation %} two  two<e>{% endgeneration %}").mark(chat))
    assert marked.scored.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": []}, '"messages" is \\[\\]'),
        ({"messages": "hello"}, "it must be a list of messages"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
        ({"messages": [{"role": "bot", "content": "b"}]}, "message 0: the role is 'bot'; it must be one of system"),
        ({"messages": [{"content": "a"}]}, "the role is None"),
        ({"messages": [{"role": "user"}]}, "the content is None; it must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the content is \\[{'type'"),
        ({"messages": [{"role": "user", "content": "a\ufdd0"}]}, "the content is .a.ufdd0.; it must be text, without"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "add"}, '"tools" is \'add\''),
    ],
)  # fmt: skip
def test_what_is_no_conversation(line, says):
    with pytest.raises(ValueError, match=f"line 7.*{says}"):
        conversation(line, "line 7")


def test_what_a_template_cannot_do():
    one = given("one answer")
    with pytest.raises(ValueError, match="mine: the chat template cannot be parsed"):
        written("{% for %}")
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 7: there is no message of the assistant"):
        template("chatml").mark(given("one question"))
    with pytest.raises(ValueError, match=r"line 7: mistral: the chat template says: user and"):
        template("mistral").mark(given("two answers"))
    # A beginning that is rendered differently from the whole, and an answer that is not there.
    for source in ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "nothing"):
        with pytest.raises(ValueError, match=r"line 7: message 1: mine renders .* differently .*Put \{% gen"):
            written(source).mark(one)
    changed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ValueError, match="mine changes the text between"):
        written(changed).mark(one)
    for content, says in (("a\udfff", "half of a surrogate"), ("\0", "zero byte")):
        with pytest.raises(ValueError, match=f"mine: the conversation's text has .*{says}"):
            written("{% for m in messages %}{{ m.name }}{% endfor %}").render([{"role": "user", "name": content}])
    # Out of the sandbox.
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace(a=1) %}{{ n.__class__.__mro__ }}",
        "{{ dict.__globals__.keys() }}",
        "{{ raise_exception.__globals__.keys() }}",
    ):
        with pytest.raises(ValueError, match="the chat template says"):
            written(source).render(one.messages)


def test_where_a_template_is_read_from(tmp_path):
    with pytest.raises(ValueError, match="has no chat template"):
        template_of(tmp_path)
    config = {
        "chat_template": "{{ bos_token }}one{{ eos_token }}{{ pad_token }}",
        "bos_token": {"content": "<b>"},
        "eos_token": "<e>",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_of(tmp_path).render([]) == "<b>one<e>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two{{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert template_of(tmp_path).render([]) == "two<e>"
    (tmp_path / "chat_template.jinja").write_text("three{{ bos_token }}")
    assert template_of(tmp_path).render([]) == "three<b>"
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (named[:1], None, 7):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": wrong}))
        with pytest.raises(ValueError, match="has no chat template"):
            template_of(tmp_path)
