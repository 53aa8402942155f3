"""Calls as a name, a separator and the JSON of the arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import start_with_call, write_text
from retain.server.call_scanner import CallScanner, ValueScanner
from retain.server.tool_format import ANY_OBJECT, Functions, ParsedToolCall, Schemas, ToolFormat, read_arguments


@dataclass(frozen=True)
class NamedJsonFormat(ToolFormat):
    """A name, a separator and an object. Models may write an id between the name and the separator."""

    separator: str = ""
    id_mark: str = ""  # before that id

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that must stay in an answer: the separator and the mark of an id are among them."""
        return (*super().markers, self.separator, self.id_mark)

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends where the JSON object of its arguments ends."""
        return ValueScanner(self.ends, self.begins, openers="{")

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: the name before the separator, the JSON object behind it. None if it is no call."""
        head, separator, block = text.partition(self.separator)
        name = (head.partition(self.id_mark)[0] if self.id_mark else head).strip()
        arguments = read_arguments(block, schemas.get(name)) if separator else None
        return None if arguments is None else [ParsedToolCall(name, arguments)]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call: its name, the separator, and the JSON that the schema of the tool allows."""
        end = self.end + self.section_end
        rules = [start_with_call(self.section_begin + self.begin, len(tools), end, special_tokens)]
        for i, tool in enumerate(tools):
            rules.append(f"call{i}: {write_text(tool['name'] + self.separator, special_tokens)} arguments{i}")
            rules.append(lark_json_rule(f"arguments{i}", tool.get("parameters") or ANY_OBJECT))
        return "\n".join(rules)
