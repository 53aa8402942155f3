"""Calls whose parameters stand between tags of their own, with values as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from retain.processing.lark import list_rules, write_text
from retain.server.call_scanner import CallScanner, TagScanner
from retain.server.text_arguments import TextLayout, convert_texts, iter_text_rules
from retain.server.tool_format import Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

NAME = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER_NAME = re.compile(r"\s*<parameter=([^<>\n]+)>")
FUNCTION_END = "</function>"


@dataclass(frozen=True)
class FunctionTagFormat(ToolFormat):
    """Calls as <function=NAME> with a <parameter=NAME> for each argument.

    `value_break` stands before and behind each value, `tag_break` behind other tags.
    """

    value_break: str = "\n"
    tag_break: str = "\n"

    def create_scanner(self, begin: str) -> CallScanner:
        """See ToolFormat. The tags of calls may stand in values."""
        return TagScanner(self.ends, "<parameter=", "</parameter>", ("<parameter=", FUNCTION_END))

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """See ToolFormat."""
        function = NAME.match(text)
        if not function:
            return None
        name = function[1].strip()
        texts: dict[str, str] = {}
        position = function.end()
        for parameter, value, end in self._iter_values(text, position):
            texts[parameter] = value.removeprefix(self.value_break).removesuffix(self.value_break)
            position = end
        if text[position:].strip() not in (FUNCTION_END, ""):
            return None
        return [ParsedToolCall(name, write_arguments(convert_texts(texts, schemas.get(name))))]

    def _iter_values(self, text: str, position: int) -> Iterator[tuple[str, str, int]]:
        """Yield the name and the text of each parameter, and where it ends."""
        scanner = TagScanner((), "<parameter=", "</parameter>", ("<parameter=", FUNCTION_END), in_value=True)
        while parameter := PARAMETER_NAME.match(text, position):
            close = text.find(scanner.closer, parameter.end())
            while close >= 0 and not scanner.is_closed(text, close + len(scanner.closer), finished=True):
                close = text.find(scanner.closer, close + 1)
            if close < 0:
                return
            position = close + len(scanner.closer)
            yield parameter[1].strip(), text[parameter.end() : close], position

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """See ToolFormat. The parameters keep the order of the schema."""
        layout = TextLayout("<parameter=", f">{self.value_break}", f"{self.value_break}</parameter>{self.tag_break}")
        begin = write_text(f"{self.begin}{self.tag_break}", special_tokens)
        end = write_text(f"{FUNCTION_END}{self.tag_break}{self.end}", special_tokens)
        rules = [f"start: {begin} ({list_rules('call', len(tools))}) {end}"]
        for i, tool in enumerate(tools):
            function = write_text(f"<function={tool['name']}>{self.tag_break}")
            rules.append(f"call{i}: {function} parameters{i}")
            rules += iter_text_rules(f"parameters{i}", tool.get("parameters"), layout)
        return "\n".join(rules)
