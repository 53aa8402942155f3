"""Olmo 3: Python's calls, one a line, between <function_calls> and </function_calls>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.python_calls import PythonToolFormat


@dataclass(frozen=True)
class Format(PythonToolFormat):
    """Lines of Python's calls between two tags."""

    begin: str = "<function_calls>"
    end: str = "</function_calls>"
    families: ClassVar[tuple[str, ...]] = ("olmo3",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the tag. DeepSeek-V3.2 writes others behind it: no Python."""
        return cls() if "<function_calls>" in template and "invoke name=" not in template else None
