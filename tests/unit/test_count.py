"""The count of statements sees code, and neither its layout nor its docstrings."""

from pathlib import Path

import pytest

from tools.count import count_by_folder, count_statements, render

CODE = '''
"""Says what it is."""
def f(a):
    """Do it."""
    if a:
        return [
            a,
        ]
    x = 1; y = 2
'''


def test_statements_count_whatever_their_layout() -> None:
    assert count_statements(CODE) == 5  # def, if, return, and two assignments
    assert count_statements(CODE.replace("x = 1; y = 2", "x, y = 1, 2")) == 5
    assert count_statements(CODE.replace("; ", "\n    ").replace('"""Do it."""\n', "# why\n")) == 5


def test_a_table_has_one_line_a_folder_and_compares_trees(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python files"):
        count_by_folder(tmp_path)
    (tmp_path / "kv" / "memory").mkdir(parents=True)
    (tmp_path / "kv" / "memory" / "pool.py").write_text(CODE)
    (tmp_path / "llm.py").write_text("x = 1\n")
    counts = count_by_folder(tmp_path)
    assert counts == {"kv": 5, ".": 1}
    assert render(counts).split() == [".", "1", "kv", "5", "all", "6"]
    assert "here has -50.0 % of the statements there" in render({"kv": 3}, counts)
