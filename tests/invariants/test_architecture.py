"""Law 8: imports only go down; files stay small; the package's import is light; the map is true."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.map import compare

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "retain"
FILES = sorted(PACKAGE.rglob("*.py"))
# A room may import rooms with a higher number, and itself.
STOREYS = {
    "cli": 0,
    "server": 1,
    "bench": 1,
    "llm": 2,
    "desk": 3,
    "stores": 4,
    "answer": 4,
    "build": 4,
    "text": 5,
    "engine": 5,
    "models": 6,
    "kv": 6,
    "kernels": 7,
    "options": 7,
    "client": 7,
    "config": 8,
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{a.name}" if node.module == "retain" else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {m for m in found if m.startswith("retain.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    here = ("retain." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    if here == "retain":
        return  # the public names, by design from above
    for module in imports(path):
        if module == "retain.__version__" or room(module) == room(here):
            continue
        assert STOREYS[room(module)] > STOREYS[room(here)], f"{here} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_can_be_held_in_the_head(path):
    assert len(path.read_text().splitlines()) <= 320
    assert ast.get_docstring(ast.parse(path.read_text())) or path.stat().st_size == 0


def test_the_import_is_light():
    """`import retain` and the command line's parser load neither torch nor anything else that is heavy."""
    code = "import sys, retain; from retain.cli.args import build_parser; build_parser(); "
    code += "print(*[m for m in sys.modules if '.' not in m])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "tokenizers", "gguf", "jinja2"} & set(out)


def test_the_map_names_every_file_that_there_is():
    """docs/design/map.md draws the tree; what it draws exists, and what exists is drawn."""
    missing, extra = compare()
    assert not missing + extra, "bring the map up to date: python tools/map.py --write, then describe the new files"
