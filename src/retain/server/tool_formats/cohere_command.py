"""Command R7B and Command A: <|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}, ...]<|END_ACTION|>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects between two markers."""

    begin: str = "<|START_ACTION|>"
    end: str = "<|END_ACTION|>"
    name_key: str = "tool_name"
    arguments_key: str = "parameters"
    id_key: str = "tool_call_id"
    is_list: bool = True
    shown: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    families: ClassVar[tuple[str, ...]] = ("cohere2",)
