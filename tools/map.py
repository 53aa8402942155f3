"""Compare the tree in docs/design/map.md with the files of the package, or bring it up to date.

python tools/map.py            list files that are missing from the map, and files that do not exist any more
python tools/map.py --write    drop the latter, and add the former with the first line of their docstring
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "design" / "map.md"
PACKAGE = ROOT / "src" / "retain"
TREE = re.compile(r"(?<=```\nsrc/retain/\n).*?(?=```)", re.S)
IGNORED = ("__init__.py", "__pycache__", ".so")


def read_tree() -> dict[str, str]:
    """Return the paths that the map draws, folders with a slash at their end, with their descriptions."""
    match = TREE.search(MAP.read_text(encoding="utf-8"))
    if not match:
        raise ValueError(f"{MAP} has no tree: it begins with ``` and src/retain/")
    tree, folders = dict[str, str](), [""]
    for line in match[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, description = line.strip().partition(" ")
        path = folders[depth - 1] + name
        folders[depth:] = [path]
        tree[path] = description.strip()
    return tree


def package_files() -> set[str]:
    """Return the files of the package that the map must draw."""
    paths = (p for p in PACKAGE.rglob("*") if p.is_file() and not any(i in str(p) for i in IGNORED))
    return {p.relative_to(PACKAGE).as_posix() for p in paths}


def compare() -> tuple[list[str], list[str]]:
    """Return the files that the map lacks, and those that it draws although they do not exist."""
    drawn, real = {p for p in read_tree() if not p.endswith("/")}, package_files()
    return sorted(real - drawn), sorted(drawn - real)


def describe(path: str) -> str:
    """Return the first sentence of a file's docstring or of its opening comment, without the module's own name."""
    if path.endswith((".safetensors", ".md")):
        return ""
    text = (PACKAGE / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        first = " ".join(re.findall(r"^// ?(.*)", text[:400], re.M)[:2])
    return re.split(r"[.:;](?:\s|$)", " ".join(first.split()))[0]


def render(tree: dict[str, str]) -> str:
    """Return the lines of a tree; every folder is followed by what it holds."""
    lines = []
    for path, description in tree.items():
        depth = path.rstrip("/").count("/") + 1
        name = path.rstrip("/").rpartition("/")[2] + "/" * path.endswith("/")
        lines.append(f"{'  ' * depth}{name:<22} {description}".rstrip())
    return "\n".join(lines) + "\n"


def update() -> None:
    """Rewrite the tree: known files keep their place and description, new ones come last in their folder."""
    missing, extra = compare()
    tree = [(path, text) for path, text in read_tree().items() if path not in extra]
    for path in missing:
        folder, depth = path.rpartition("/")[0], path.count("/")
        for i in range(depth):  # folders that are not drawn yet
            parent = "/".join(path.split("/")[: i + 1]) + "/"
            if parent not in dict(tree):
                tree.insert(_end_of(tree, parent[:-1].rpartition("/")[0]), (parent, ""))
        tree.insert(_end_of(tree, folder), (path, describe(path)))
    files = package_files()
    kept = {p: text for p, text in tree if not p.endswith("/") or any(f.startswith(p) for f in files)}
    text = MAP.read_text(encoding="utf-8")
    MAP.write_text(TREE.sub(lambda _: render(kept), text, count=1), encoding="utf-8")


def _end_of(tree: list[tuple[str, str]], folder: str) -> int:
    """Index behind the last entry of a folder."""
    inside = [i for i, (path, _) in enumerate(tree) if not folder or path.startswith(folder + "/")]
    return inside[-1] + 1 if inside else len(tree)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="bring the map up to date")
    if parser.parse_args().write:
        update()
    missing, extra = compare()
    print(*(f"not in the map: {p}" for p in missing), *(f"does not exist: {p}" for p in extra), sep="\n")
