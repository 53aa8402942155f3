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
    shown: ClassVar[tuple[str, ...]] = ("<function_calls>",)
    not_shown: ClassVar[tuple[str, ...]] = ("invoke name=",)  # DeepSeek-V3.2 writes that: no Python
    families: ClassVar[tuple[str, ...]] = ("olmo3",)
