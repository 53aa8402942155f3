"""Count the statements of the package, by folder and in all: a measure that line breaks and comments do not move.

python -m tools.count                       this tree
python -m tools.count OTHER/src/retain      another tree beside this one, and what the difference is
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "retain"


def count_statements(source: str) -> int:
    """Return the statements of a Python file, those in bodies of others too; docstrings are none.

    An assignment of several values to several names, `a, b = x, y`, counts as that many: packing saves nothing.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    bare_strings = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in nodes
    )
    values = [node.value for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    num_packed = sum(len(value.elts) - 1 for value in values if isinstance(value, ast.Tuple))
    return len(nodes) - bare_strings + num_packed


def count_by_folder(package: Path) -> dict[str, int]:
    """Return the statements of each folder at the top of a package; files at the top count as the folder `.`."""
    paths = sorted(package.rglob("*.py"))
    if not paths:
        raise ValueError(f"{package} has no Python files")
    counts: Counter[str] = Counter()
    for path in paths:
        inside = path.relative_to(package)
        folder = inside.parts[0] if len(inside.parts) > 1 else "."
        counts[folder] += count_statements(path.read_text(encoding="utf-8"))
    return dict(counts)


def render(counts: dict[str, int], others: dict[str, int] | None = None) -> str:
    """Return a table with one line a folder and one for all; `others` are the counts of a tree to compare with."""
    rows = [(name, counts.get(name, 0), (others or {}).get(name, 0)) for name in sorted({*counts, *(others or {})})]
    rows.append(("all", sum(counts.values()), sum((others or {}).values())))
    if others is None:
        return "\n".join(f"{name:<12}{here:>8}" for name, here, _ in rows)
    lines = [f"{'':<12}{'here':>8}{'there':>8}{'here - there':>14}"]
    lines += [f"{name:<12}{here:>8}{there:>8}{here - there:>+14}" for name, here, there in rows]
    here, there = rows[-1][1:]
    return "\n".join([*lines, f"here has {100 * (here / there - 1):+.1f} % of the statements there"])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="count the statements of the package, by folder and in all")
    parser.add_argument("other", nargs="?", type=Path, metavar="PACKAGE", help="the package of another tree")
    other = parser.parse_args(argv).other
    try:
        print(render(count_by_folder(PACKAGE), other and count_by_folder(other)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
