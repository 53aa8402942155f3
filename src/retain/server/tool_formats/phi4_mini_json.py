"""Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects between two markers."""

    begin: str = "<|tool_call|>"
    end: str = "<|/tool_call|>"
    is_list: bool = True
    shown: ClassVar[tuple[str, ...]] = ("<|tool|>", "<|/tool|>")
    families: ClassVar[tuple[str, ...]] = ("phi3",)

    def place_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages whose system message has the functions as JSON text, and no tools beside them."""
        first = dict(messages[0]) if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}
        rest = [dict(message) for message in messages if message is not messages[0] or message["role"] != "system"]
        functions = [tool["function"] for tool in tools]
        return [{**first, "tools": json.dumps(functions, ensure_ascii=False)}, *rest], []
