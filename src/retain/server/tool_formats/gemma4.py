"""Gemma 4: <|tool_call>call:NAME{key:value, ...}<tool_call|>, with strings between <|"|>."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from retain.processing.lark import start_with_call
from retain.server.call_scanner import CallScanner, QuotedScanner
from retain.server.gemma4_values import ValueRules
from retain.server.literals import LiteralReader
from retain.server.tool_format import ANY_OBJECT, Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

QUOTE = '<|"|>'


@dataclass(frozen=True)
class Format(ToolFormat):
    """A name and an object with bare keys between two markers."""

    begin: str = "<|tool_call>"
    end: str = "<tool_call|>"
    shown: ClassVar[tuple[str, ...]] = ("<|tool_call>call:",)
    families: ClassVar[tuple[str, ...]] = ("gemma4", "gemma4_text")

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that must stay in an answer: the marks around strings are among them."""
        return (*super().markers, QUOTE)

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends at the first marker outside of strings."""
        return QuotedScanner(self.ends, self.begins, (QUOTE,), escapes=False)

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: `call:`, the name, and an object with bare keys. None if it is no call."""
        reader = LiteralReader(text, (QUOTE,), escapes=False)
        try:
            reader.expect("call:")
            name = reader.read_name()
            arguments = reader.read_value()
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict) or not reader.is_at_end:
            return None
        return [ParsedToolCall(name, write_arguments(arguments))]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call. The members of its object keep the order of the schema."""
        rules = [start_with_call(f"{self.begin}call:", len(tools), self.end, special_tokens)]
        for i, tool in enumerate(tools):
            schema = tool.get("parameters") or ANY_OBJECT
            values = ValueRules(f"v{i}", schema, QUOTE, special_tokens)
            rules.append(f"call{i}: {json.dumps(tool['name'])} {values.add(schema)}")
            rules += values.rules
        return "\n".join(rules)
