"""GLM-4.5 to 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>. Values are texts."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from retain.processing.lark import start_with_call, write_text
from retain.server.call_scanner import CallScanner, TagScanner
from retain.server.tagged_calls import iter_tagged_values
from retain.server.text_arguments import TextLayout, convert_texts, iter_text_rules
from retain.server.tool_format import Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

ARGUMENT = re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>")
KEY_BEGIN = "<arg_key>"
VALUE_END = "</arg_value>"


@dataclass(frozen=True)
class Format(ToolFormat):
    """A name and pairs of a key and a value between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    line_break: str = "\n"  # behind the name and each tag; GLM-4.7 writes none
    families: ClassVar[tuple[str, ...]] = ("glm4_moe", "glm4_moe_lite")
    needs_end: ClassVar[bool] = True

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the tags of arguments."""
        if "<arg_key>" not in template:
            return None
        return cls(line_break="\n" if "</arg_key>\n<arg_value>" in template else "")

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends at the first closing tag outside of argument values."""
        return TagScanner(self.ends, self.begins, "<arg_value>", VALUE_END, (KEY_BEGIN, *self.ends))

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: the name, then tagged keys and values. None if it is no call."""
        name = text.partition(KEY_BEGIN)[0]
        texts: dict[str, str] = {}
        position = len(name)
        for key, value, end in iter_tagged_values(text, position, ARGUMENT, VALUE_END, (KEY_BEGIN,)):
            texts[key] = value
            position = end
        name = name.strip()
        if not name or "<" in name or "\n" in name or text[position:].strip():
            return None
        return [ParsedToolCall(name, write_arguments(convert_texts(texts, schemas.get(name))))]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call. Its parameters keep the order of the schema."""
        line = self.line_break
        layout = TextLayout("<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}")
        rules = [start_with_call(self.begin, len(tools), self.end, special_tokens)]
        for i, tool in enumerate(tools):
            rules.append(f"call{i}: {write_text(tool['name'] + line)} parameters{i}")
            rules += iter_text_rules(f"parameters{i}", tool.get("parameters"), layout, special_tokens)
        return "\n".join(rules)
