"""DeepSeek-V3 and R1: a name, and JSON between code fences, in marks of a call; calls stand in a section."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import start_with_call, write_text
from retain.server.call_scanner import CallScanner, ValueScanner
from retain.server.tool_format import ANY_OBJECT, Functions, ParsedToolCall, Schemas, read_arguments
from retain.server.tool_formats import deepseek_v31

FENCE = "```"


@dataclass(frozen=True)
class Format(deepseek_v31.Format):
    """As DeepSeek-V3.1, but `function`, a separator, the name, and a block of JSON."""

    families: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the marks, and a block of code or the kind of a call."""
        return cls.read(template) if deepseek_v31.is_fenced(template) else None

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends behind its JSON, the code fence and the marker."""
        return ValueScanner((*(f"{FENCE}{end}" for end in self.ends), *self.ends), self.begins, openers="{")

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: the separator, the name, and JSON between code fences. None if it is no call."""
        _, separator, call = text.partition(self.separator)
        name, _, block = call.partition("\n")
        block = block.strip().removeprefix(f"{FENCE}json").removesuffix(FENCE)
        arguments = read_arguments(block, schemas.get(name.strip())) if separator else None
        return None if arguments is None else [ParsedToolCall(name.strip(), arguments)]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call: its name, and the JSON that the schema of the tool allows in code fences."""
        begin = f"{self.section_begin}{self.begin}function{self.separator}"
        end = f"\n{FENCE}{self.end}{self.section_end}"
        rules = [start_with_call(begin, len(tools), end, special_tokens)]
        for i, tool in enumerate(tools):
            head = write_text(f"{tool['name']}\n{FENCE}json\n")
            rules.append(f"call{i}: {head} arguments{i}")
            rules.append(lark_json_rule(f"arguments{i}", tool.get("parameters") or ANY_OBJECT))
        return "\n".join(rules)
