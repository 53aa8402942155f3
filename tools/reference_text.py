"""Markdown for the pages of tools/reference.py, and classes by their names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "retain"
NOTE = "<!-- Written by tools/reference.py from the code. Do not edit. -->\n\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(text: object) -> str:
    """Return text as code, or nothing."""
    return f"`{text}`" if text not in (None, "") else ""


def sentence(text: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split("\n\n")[0].split()))[0]


def find(name: str) -> type:
    """Return the class of the package that has this name, in whichever module it lives."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.M):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            found: type = getattr(importlib.import_module(module), name)
            return found
    raise LookupError(name)
