"""GLM-4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>. Values are texts."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from retain.processing.lark import list_rules, write_text
from retain.server.call_scanner import CallScanner, TagScanner
from retain.server.text_arguments import TextLayout, convert_texts, iter_text_rules
from retain.server.tool_format import Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|$))", re.DOTALL)


@dataclass(frozen=True)
class Format(ToolFormat):
    """A name and pairs of a key and a value between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    line_break: str = "\n"  # behind the name and each tag; GLM-4.7 writes none
    families: ClassVar[tuple[str, ...]] = ("glm4_moe", "glm4_moe_lite")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the tags of arguments."""
        if "<arg_key>" not in template:
            return None
        return cls(line_break="\n" if "</arg_key>\n<arg_value>" in template else "")

    def create_scanner(self, begin: str) -> CallScanner:
        """See ToolFormat. The tags of calls may stand in values."""
        return TagScanner(self.ends, "<arg_value>", "</arg_value>", ("<arg_key>",))

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """See ToolFormat."""
        name, tag, rest = text.partition("<arg_key>")
        name = name.strip()
        texts: dict[str, str] = {}
        position = 0
        rest = tag + rest
        while argument := ARGUMENT.match(rest, position):
            texts[argument[1].strip()] = argument[2]
            position = argument.end()
        if not name or "<" in name or "\n" in name or rest[position:].strip():
            return None
        return [ParsedToolCall(name, write_arguments(convert_texts(texts, schemas.get(name))))]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """See ToolFormat. The parameters keep the order of the schema."""
        line = self.line_break
        layout = TextLayout("<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}")
        rules = [
            f"start: {write_text(self.begin, special_tokens)} ({list_rules('call', len(tools))}) "
            + write_text(self.end, special_tokens)
        ]
        for i, tool in enumerate(tools):
            rules.append(f"call{i}: {write_text(tool['name'] + line)} parameters{i}")
            rules += iter_text_rules(f"parameters{i}", tool.get("parameters"), layout, special_tokens)
        return "\n".join(rules)
