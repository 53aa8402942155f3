"""What a tool format is: where calls stand in generated text, how they are parsed, and which grammar demands one.

The formats themselves are the files of `tool_formats`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from retain.processing.grammar import lark_json_rule


@dataclass(frozen=True)
class ParsedToolCall:
    """A function's name and its JSON-encoded arguments."""

    name: str
    arguments: str


class ChatOutput(NamedTuple):
    """New parts of an answer, in this order."""

    reasoning: str
    content: str
    tool_calls: list[ParsedToolCall]


class AnswerParser(Protocol):
    """Separates the parts of one answer, however its text is cut into pieces."""

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the parts that are certain; all of them once the answer has finished."""

    def copy(self) -> Self:
        """Return a parser that goes on from here by itself."""

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether what comes after the reasoning has begun in the text of an answer."""


@dataclass(frozen=True)
class ToolFormat(ABC):
    """How a model writes tool calls: between two markers, or as the whole output if the markers are empty.

    `special_tokens`: those of the tokenizer that the parser must see, so that they stay in the text of an answer.
    """

    begin: str = ""
    end: str = ""
    special_tokens: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_template(cls, template: str) -> Self | None:
        """Return this format as a chat template with tools teaches it, or None if the template teaches another one."""

    @abstractmethod
    def parse(self, text: str) -> list[ParsedToolCall] | None:
        """Parse the text between the markers. Returns None if it is no tool call."""

    @abstractmethod
    def build_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return llguidance's Lark grammar of one call of one of these functions, [{"name", "parameters"}].

        Raises ValueError for a schema that is too deep or that no value matches.
        """

    def build_content_grammar(self, schema: Any) -> str | None:
        """Return llguidance's Lark grammar of an answer whose content matches a JSON schema. Raises ValueError.

        None: content stands alone.
        """
        return None

    def create_parser(self, tool_names: Collection[str], prompt: str) -> AnswerParser | None:
        """Create a parser of whole answers to a prompt text. None: only calls have markers of this format."""
        return None

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as templates of this format take them."""
        return [dict(message) for message in messages]

    def fit_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return tools as templates of this format take them."""
        return [dict(tool) for tool in tools]


@dataclass(frozen=True)
class JsonToolFormat(ToolFormat):
    """Calls as JSON objects with a name and arguments: {"name": ..., "arguments": {...}}."""

    arguments_key: str = "arguments"
    is_list: bool = False  # a list of calls between the markers

    def parse(self, text: str) -> list[ParsedToolCall] | None:
        """Parse one object or a list of them. Returns None if it is no tool call."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = call.get(self.arguments_key, call.get("arguments", call.get("parameters", {})))
            calls.append(ParsedToolCall(call["name"], write_arguments(arguments)))
        return calls or None

    def build_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the grammar of one call.

        The parameters are rules of their own rather than parts of a larger schema, where their references to their
        root would lead elsewhere. Raises ValueError for a schema that is too deep or that no value matches.
        """
        begin, end = (json.dumps(marker) if marker else "" for marker in (self.begin, self.end))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        calls = '"[" ws? call ws? "]"' if self.is_list else "call"
        between = f"ws? {calls} ws?" if end else f"ws? {calls}" if begin else calls
        rules = [
            f"start: {begin} {between} {end}",
            f"call: {names}",
            r"ws: /[ \t\r\n]{1,8}/",  # bounded: small models would write blanks for ever
        ]
        for i, tool in enumerate(tools):
            members = f'{_lark_key("name")} name{i} ws? "," ws? {_lark_key(self.arguments_key)} arguments{i}'
            rules += [
                f'call{i}: "{{" ws? {members} ws? "}}"',
                lark_json_rule(f"name{i}", {"const": tool["name"]}),
                lark_json_rule(f"arguments{i}", tool.get("parameters") or {"type": "object"}),
            ]
        return "\n".join(rules)


def _lark_key(key: str) -> str:
    return f'{json.dumps(json.dumps(key))} ws? ":" ws?'


def write_arguments(arguments: Any) -> str:
    """Return arguments as JSON; a text is JSON already."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _replace_surrogates(text)


def _replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which a model can write as escapes: no UTF-8 can hold them."""
    return text.encode(errors="surrogatepass").decode(errors="replace")
