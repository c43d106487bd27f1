"""Renders conversations by small chat templates in transformers, for tests/models/test_chat.py.

`pip install -r tests/parity.txt`, then `python -m tests.parity_chat`. tests/data/chat/ has the templates, in the styles
of those that checkpoints have. It gets tokenizer.json, and expected.json: of each template and conversation the text
with and without the beginning of an answer, or None where transformers refuses it, its tokens, and for a template with
marks which of them the assistant wrote.
"""

import json
import pathlib

import tokenizers
import transformers

FOLDER = pathlib.Path(__file__).parent / "data" / "chat"
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<|start|>", "<|end|>",
    "<|message|>", "<|channel|>", "<|return|>", "[INST]", "[/INST]",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & c > d: é'\"", "parameters": {}}}


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = {
    "one question": turns("what is 2 + 2?"),
    "one answer": turns("what is 2 + 2?", "It is 4."),
    "several": [{"role": "system", "content": "Be short."}, *turns("hello there", "hello", "and now?", "good bye")],
    "letters": turns("grüße 😀\n\n", "  ¡olé!\n - 你好 😀", "\t", "ok "),
    "two answers": [*turns("a", "b"), {"role": "assistant", "content": "c"}],
    "thinking": [*turns("why?"), {"role": "assistant", "content": "so.", "reasoning_content": "hm, <why>?"}],
    "functions": turns("add", "done"),
    "a late system message": [*turns("a"), {"role": "system", "content": "b"}],
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["hello there, what is the answer? user assistant system developer final is now"], trainer)
    made.save(str(FOLDER / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def expected_of(tokenizer: transformers.PreTrainedTokenizerFast, template: str, name: str) -> dict:
    given = {"chat_template": template, "tools": [TOOL] if name == "functions" else None}
    messages, marked = CONVERSATIONS[name], "generation %}" in template
    try:
        text, prompt = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add, **given)
            for add in (False, True)
        )
    except Exception as error:
        print(f"  {name} is refused: {error}")
        return {"text": None}
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=marked, **given
    )  # transformers 5 tokenizes the text as a whole
    found = {"text": text, "prompt": prompt, "tokens": encoded["input_ids"]}
    return found | ({"scored": encoded["assistant_masks"]} if marked else {})


def main() -> None:
    tokenizer, found = make_tokenizer(), {}
    for file in sorted(FOLDER.glob("*.jinja")):
        print(file.stem)
        found[file.stem] = {name: expected_of(tokenizer, file.read_text(), name) for name in CONVERSATIONS}
    content = {"conversations": CONVERSATIONS, "tools": [TOOL], "templates": found}
    (FOLDER / "expected.json").write_text(json.dumps(content, ensure_ascii=False, indent=None) + "\n")


if __name__ == "__main__":
    main()
