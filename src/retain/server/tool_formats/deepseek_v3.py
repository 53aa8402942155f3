"""DeepSeek-V3 and R1: a name, and JSON between code fences, in marks of a call; calls stand in a section."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import start_with_call, write_text
from retain.processing.template_text import COMPUTED_JSON
from retain.server.call_history import write_arguments
from retain.server.call_scanner import CallScanner, ValueScanner
from retain.server.tool_format import ANY_OBJECT, Functions, ParsedToolCall, Schemas, ToolFormat, read_arguments

SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


@dataclass(frozen=True)
class Format(ToolFormat):
    """`function`, a separator, the name, and a block of JSON. `joins_texts`: the template takes arguments as a text."""

    begin: str = "<｜tool▁call▁begin｜>"
    end: str = "<｜tool▁call▁end｜>"
    section_begin: str = "<｜tool▁calls▁begin｜>"
    section_end: str = "<｜tool▁calls▁end｜>"
    joins_texts: bool = False
    families: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the marks, and a block of code or the kind of a call."""
        is_fenced = f"{FENCE}json" in template or f"function{SEPARATOR}" in template
        joins_texts = COMPUTED_JSON not in template.partition(cls.begin)[2]
        return cls(joins_texts=joins_texts) if cls.begin in template and is_fenced else None

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose calls have their arguments as JSON text, if the template takes them so."""
        fitted = super().fit_messages(messages)
        return write_arguments(fitted) if self.joins_texts else fitted

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that must stay in an answer: the separator before the name is among them."""
        return (*super().markers, SEPARATOR)

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends behind its JSON, the code fence and the marker."""
        return ValueScanner((*(f"{FENCE}{end}" for end in self.ends), *self.ends), self.begins, openers="{")

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: the separator, the name, and JSON between code fences. None if it is no call."""
        _, separator, call = text.partition(SEPARATOR)
        name, _, block = call.partition("\n")
        block = block.strip().removeprefix(f"{FENCE}json").removesuffix(FENCE)
        arguments = read_arguments(block, schemas.get(name.strip())) if separator else None
        return None if arguments is None else [ParsedToolCall(name.strip(), arguments)]

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call: its name, and the JSON that the schema of the tool allows in code fences."""
        begin = f"{self.section_begin}{self.begin}function{SEPARATOR}"
        end = f"\n{FENCE}{self.end}{self.section_end}"
        rules = [start_with_call(begin, len(tools), end, special_tokens)]
        for i, tool in enumerate(tools):
            head = write_text(f"{tool['name']}\n{FENCE}json\n")
            rules.append(f"call{i}: {head} arguments{i}")
            rules.append(lark_json_rule(f"arguments{i}", tool.get("parameters") or ANY_OBJECT))
        return "\n".join(rules)
