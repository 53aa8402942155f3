"""Calls whose parameters stand between tags of their own, with values as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from retain.processing.lark import start_with_call, write_text
from retain.server.call_scanner import CallScanner, TagScanner, is_value_closed
from retain.server.text_arguments import TextLayout, convert_texts, iter_text_rules
from retain.server.tool_format import Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

NAME = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
PARAMETER_BEGIN = "<parameter="
PARAMETER_END = "</parameter>"
FUNCTION_END = "</function>"
FOLLOWERS = (PARAMETER_BEGIN, FUNCTION_END)  # of a parameter


@dataclass(frozen=True)
class FunctionTagFormat(ToolFormat):
    """Calls as <function=NAME> with a <parameter=NAME> for each argument.

    `value_break` stands before and behind each value, `tag_break` behind other tags.
    """

    value_break: str = "\n"
    tag_break: str = "\n"

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends at the first closing tag outside of parameter values."""
        return TagScanner(self.ends, self.begins, PARAMETER_BEGIN, PARAMETER_END, FOLLOWERS)

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: a tag with the name, then a tag for each parameter. None if it is no call."""
        function = NAME.match(text)
        if not function:
            return None
        name = function[1].strip()
        texts: dict[str, str] = {}
        position = function.end()
        for parameter, value, end in iter_tagged_values(text, position, PARAMETER, PARAMETER_END, FOLLOWERS):
            texts[parameter] = value.removeprefix(self.value_break).removesuffix(self.value_break)
            position = end
        if text[position:].strip() != FUNCTION_END:  # cut, or no call
            return None
        return [ParsedToolCall(name, write_arguments(convert_texts(texts, schemas.get(name))))]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call. Its parameters keep the order of the schema."""
        layout = TextLayout(
            PARAMETER_BEGIN, f">{self.value_break}", f"{self.value_break}{PARAMETER_END}{self.tag_break}"
        )
        end = f"{FUNCTION_END}{self.tag_break}{self.end}"
        rules = [start_with_call(f"{self.begin}{self.tag_break}", len(tools), end, special_tokens)]
        for i, tool in enumerate(tools):
            function = write_text(f"<function={tool['name']}>{self.tag_break}")
            rules.append(f"call{i}: {function} parameters{i}")
            rules += iter_text_rules(f"parameters{i}", tool.get("parameters"), layout)
        return "\n".join(rules)


def iter_tagged_values(
    text: str, position: int, opener: re.Pattern[str], closer: str, followers: tuple[str, ...]
) -> Iterator[tuple[str, str, int]]:
    """Yield the name and the text of each value from a position on, and where its closing tag ends.

    `opener` has the name. `followers` come behind the closing tag of a value, or nothing does (see TagScanner).
    """
    while found := opener.match(text, position):
        close = text.find(closer, found.end())
        while close >= 0 and not is_value_closed(text, close + len(closer), followers, finished=True):
            close = text.find(closer, close + 1)
        if close < 0:
            return
        position = close + len(closer)
        yield found[1].strip(), text[found.end() : close], position
