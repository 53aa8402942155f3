"""Write the page of the package's files, for tools/reference.py: what each is for comes from its first sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tools.reference_text import NOTE, PACKAGE, code, sentence, table

INTRO = """\
Every file of `src/retain/`, by folder, with the first sentence of its docstring or of its opening comment. The
[map](../design/map.md) says what the folders have to do with each other.

"""
SOURCES = {".py", ".cpp", ".h", ".js", ".css", ".html", ".md", ".safetensors"}


def folders() -> Iterator[Path]:
    """Yield the folders of the package that hold files of it, each before what it contains."""
    yield from sorted({file.parent for file in PACKAGE.rglob("*") if file.suffix in SOURCES})


def describe(path: Path) -> str:
    """Return the first sentence of a docstring, or of an opening comment in C++ or JavaScript."""
    if path.suffix == ".py":
        return sentence(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
    if path.suffix not in (".cpp", ".h", ".js"):
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sentence(" ".join(line.lstrip("/ ") for line in takewhile(lambda line: line.startswith("//"), lines)))


def files_page() -> str:
    """Return the page of files, a table for each folder."""
    text = "# Files\n\n" + NOTE + INTRO
    for folder in folders():
        files = sorted(p for p in folder.iterdir() if p.suffix in SOURCES and p.name != "__init__.py")
        name = folder.relative_to(PACKAGE).as_posix()
        text += f"## {'The package' if name == '.' else code(name + '/')}\n\n"
        door = folder / "__init__.py"
        if door.exists():
            text += describe(door) + "\n\n"
        if files:
            text += table(["file", "what it is for"], [(code(p.name), describe(p)) for p in files]) + "\n"
    return text.rstrip() + "\n"
