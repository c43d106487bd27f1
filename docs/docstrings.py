"""A griffe extension: what jaxops' docstrings have beside Google's sections, as Markdown.

- Examples (`>>> ...`) outside an "Examples" section become code blocks.
- "Residuals: ...", "Source: ..." and the like become paragraphs with a bold first word.
"""

import re

import griffe

PARAGRAPH = re.compile(r"^(Residuals|Source|Over several devices): (?=\S)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*\n(?:^.*\S.*\n?)*", re.MULTILINE)  # until a blank line
PAGE = re.compile(r"\bdocs/(\w+)\.md")  # linked from a page of reference/
SEVERAL = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.MULTILINE)  # "gate, up: ..."


def markdown(docstring: str) -> str:
    def fenced(match: re.Match) -> str:
        return f"{match[1]}```pycon\n{match[0].rstrip()}\n{match[1]}```\n"

    # A no-break space, because griffe would read "gate, up" as a name and a type.
    text = SEVERAL.sub(lambda match: match[0].replace(", ", ",\N{NO-BREAK SPACE}"), docstring)
    text = PAGE.sub(r"[docs/\1.md](../\1.md)", text)
    text = EXAMPLE.sub(fenced, text.replace("  # doctest: +SKIP", ""))
    lines: list[str] = []
    inside = False  # a paragraph whose continuation lines are indented
    for line in text.splitlines():
        inside = bool(PARAGRAPH.match(line)) or (inside and line.startswith(" "))
        lines.append(PARAGRAPH.sub(r"**\1**: ", line.strip() if inside else line))
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
