"""Text files, and pipes to other programs, are UTF-8 in any locale: an encoding is given, or bytes are read.

Ruff's PLW1514 knows only the paths whose type it sees, and no pipes.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxops", "models", "benchmarks", "examples", "docs")
POSITIONS = {"read_text": 0, "write_text": 1}  # of the encoding, among the arguments
OF_OTHERS = ("Image", "os", "tarfile", "webbrowser")  # whose `open` opens no text


def in_locale(source: str) -> list[int]:
    """Lines of the calls that read or write text without an encoding."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, of = getattr(call.func, "attr", getattr(call.func, "id", "")), getattr(call.func, "value", None)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        modes = [arg.value for arg in [*call.args, *given.values()] if isinstance(arg, ast.Constant)]
        is_binary = any(isinstance(mode, str) and "b" in mode and len(mode) < 4 for mode in modes)
        opens = name in ("open", "fdopen") and not is_binary and getattr(of, "id", "") not in OF_OTHERS
        pipes = bool(given.keys() & {"text", "universal_newlines"})
        if "encoding" not in given and (opens or pipes or len(call.args) <= POSITIONS.get(name, -1)):
            found.append(call.lineno)
    return found


def test_every_text_has_an_encoding():
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for line in in_locale(file.read_text("utf-8"))
    ]
    assert not wrong
