"""Calls as expressions of Python: NAME(parameter=value, ...)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import start_with_call, write_text
from retain.server.call_scanner import CallScanner, QuotedScanner
from retain.server.literals import LiteralReader
from retain.server.text_arguments import iter_member_rules, list_parameters, stand_alone
from retain.server.tool_format import Functions, ParsedToolCall, Schemas, ToolFormat, write_arguments

IDENTIFIER = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class PythonToolFormat(ToolFormat):
    """Expressions between two markers. `opener` and `closer` are around them, `separator` between two."""

    opener: str = ""
    closer: str = ""
    separator: str = ""

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of calls, which end at the first marker outside of Python's strings."""
        return QuotedScanner(self.ends, self.begins, quotes=('"', "'"))

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse calls as expressions of Python; values are literals of Python or JSON. None if they are no calls."""
        reader = LiteralReader(text)
        calls = []
        try:
            reader.expect(self.opener)
            while not (reader.is_at_end or (self.closer and reader.take(self.closer))):
                name = reader.read_name()
                reader.expect("(")
                calls.append(ParsedToolCall(name, write_arguments(reader.read_arguments(")"))))
                reader.take(self.separator)
        except (ValueError, RecursionError):
            return None
        return calls if reader.is_at_end and calls else None

    def write_calls(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as expressions of Python between this format's markers, as the model writes them."""
        calls = []
        for function in functions:
            arguments = function["arguments"] if isinstance(function["arguments"], Mapping) else {}
            members = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
            calls.append(f"{function['name']}({', '.join(members)})")
        between = f"{self.separator} " if self.separator else "\n"
        return f"{self.begin}{self.opener}{between.join(calls)}{self.closer}{self.end}"

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call. Values are JSON, and the parameters keep the order of the schema.

        Raises ValueError for a parameter whose name Python cannot have.
        """
        end = f"{self.closer}{self.end}"
        rules = [start_with_call(f"{self.begin}{self.opener}", len(tools), end, special_tokens)]
        for i, tool in enumerate(tools):
            parameters = list_parameters(tool.get("parameters"))
            members = [(f'"{p.name}=" value{i}_{k}', p.is_required) for k, p in enumerate(parameters)]
            head = write_text(f"{tool['name']}(")
            rules.append(f'call{i}: {head} members{i} ")"')
            rules += iter_member_rules(f"members{i}", members, '", "')
            for k, parameter in enumerate(parameters):
                if not IDENTIFIER.fullmatch(parameter.name):
                    raise ValueError(f"the parameter {parameter.name!r} of {tool['name']} is no name in Python")
                rules.append(lark_json_rule(f"value{i}_{k}", stand_alone(parameter.schema, tool["parameters"])))
        return "\n".join(rules)
