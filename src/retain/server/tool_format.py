"""What a tool format is: where calls stand in generated text, how they are parsed, and which grammar demands one.

The formats themselves are the files of `tool_formats`; vLLM calls them tool parsers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import BLANKS, list_rules, write_text
from retain.server.call_history import change_calls
from retain.server.call_scanner import CallScanner, MarkerScanner, ValueScanner

Functions = Sequence[Mapping[str, Any]]  # [{"name", "parameters"}]; parameters are a JSON schema
Schemas = Mapping[str, Any]  # of the parameters of functions, by name
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


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

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether what comes after the reasoning has begun in the text of an answer."""


@dataclass(frozen=True)
class ToolFormat(ABC):
    """How a model writes tool calls: each between two markers. Several calls may stand between those of a section.

    `shows_calls`: whether the template shows the calls of earlier turns. `families`: model types whose published chat
    templates teach this format. A template teaches it that has all texts of `shown`, and none of `not_shown`.
    `needs_end`: without the marker behind it a call may be the beginning of a longer one.
    """

    begin: str = ""
    end: str = ""
    section_begin: str = ""
    section_end: str = ""
    families: ClassVar[tuple[str, ...]] = ()
    shown: ClassVar[tuple[str, ...]] = ()
    not_shown: ClassVar[tuple[str, ...]] = ()
    needs_end: ClassVar[bool] = False
    shows_calls: bool = field(default=True, kw_only=True)

    @classmethod
    def from_template(cls, template: str) -> Self | None:
        """Return this format as a chat template with tools teaches it, or None if the template teaches another one."""
        is_other = any(text in template for text in cls.not_shown)
        return cls() if all(text in template for text in cls.shown) and not is_other else None

    @abstractmethod
    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse the body of a call: the text between the markers. Returns None if it is no tool call.

        `schemas` are of the functions that may be called.
        """

    @abstractmethod
    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return llguidance's Lark grammar of one call of one of these functions, whose first rule is `start`.

        `special_tokens`: texts that the tokenizer writes as special tokens. Raises ValueError for a schema that is too
        deep or that no value matches.
        """

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that may begin a call. The body of a call follows them."""
        section = self.section_begin
        joined = (section + self.begin, f"{section}\n{self.begin}") if section else ()
        return (*joined, self.begin) if self.begin else ()

    @property
    def bare_begins(self) -> tuple[str, ...]:
        """The texts that may begin a call and are the beginning of its body."""
        return ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that may end a call."""
        section = self.section_end
        joined = (self.end + section, f"{self.end}\n{section}", section) if section and self.end else ()
        return (*joined, self.end) if self.end else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parser must see: special tokens among them stay in the text of an answer."""
        return (*self.begins, *self.ends)

    def create_scanner(self, begin: str) -> CallScanner:
        """Create a scanner of a call that has begun with one of the texts that may."""
        return MarkerScanner(self.ends, self.begins)

    def build_content_grammar(self, schema: Any) -> str | None:
        """Return llguidance's Lark grammar of an answer whose content matches a JSON schema. Raises ValueError.

        None: content stands alone, or behind reasoning between marks.
        """
        return None

    def create_parser(self, tool_names: Collection[str], prompt: str) -> AnswerParser | None:
        """Create a parser of whole answers to a prompt text. None: only calls have markers of this format."""
        return None

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as templates of this format take them. Calls that a template does not show are content."""
        return [dict(m) for m in messages] if self.shows_calls else change_calls(messages, self._move_calls)

    def _move_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        functions = [call["function"] for call in message.pop("tool_calls")]
        return {**message, "content": f"{message.get('content') or ''}{self.write_calls(functions)}"}

    def write_calls(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as the model writes them: for formats whose templates may not show them."""
        raise NotImplementedError

    def fit_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return tools as templates of this format take them."""
        return [dict(tool) for tool in tools]

    def place_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages, and the tools that a template takes beside them: some take tools in a message."""
        return [dict(message) for message in messages], self.fit_tools(tools)


@dataclass(frozen=True)
class JsonToolFormat(ToolFormat):
    """Calls as JSON objects with a name and arguments: {"name": ..., "arguments": {...}}."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""  # of a number, which the model writes first
    is_list: bool = False  # a list of calls between the markers

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call, which ends where its JSON ends."""
        return ValueScanner(self.ends, self.begins)

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse one object or a list of them. Returns None if it is no tool call."""
        parsed = read_json(text)
        calls = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, dict) or not isinstance(name := call.get(self.name_key), str):
                return None
            given = call.get(self.arguments_key, call.get("arguments", call.get("parameters", {})))
            arguments = read_arguments(given, schemas.get(name))
            if arguments is None:
                return None
            calls.append(ParsedToolCall(name, arguments))
        return calls or None

    def write_calls(self, functions: Sequence[Mapping[str, Any]]) -> str:
        """Return calls as JSON between this format's markers, as the model writes them."""
        calls = [
            json.dumps({self.name_key: f["name"], self.arguments_key: f["arguments"]}, ensure_ascii=False)
            for f in functions
        ]
        if self.is_list:
            return f"{self.begin}[{', '.join(calls)}]{self.end}"
        return "\n".join(f"{self.begin}\n{call}\n{self.end}" for call in calls)

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one call.

        The parameters are rules of their own rather than parts of a larger schema, where their references to their
        root would lead elsewhere. Raises ValueError for a schema that is too deep or that no value matches.
        """
        begin = write_text(self.section_begin + self.begin, special_tokens)
        end = write_text(self.end + self.section_end, special_tokens)
        calls = '"[" ws? call ws? "]"' if self.is_list else "call"
        between = f"ws? {calls} ws?" if end else f"ws? {calls}" if begin else calls
        rules = [f"start: {begin} {between} {end}", f"call: {list_rules('call', len(tools))}", f"ws: {BLANKS}"]
        number = f'({_lark_key(self.id_key)} "\\"0\\"" ws? "," ws?)? ' if self.id_key else ""
        for i, tool in enumerate(tools):
            members = f'{_lark_key(self.name_key)} name{i} ws? "," ws? {_lark_key(self.arguments_key)} arguments{i}'
            rules += [
                f'call{i}: "{{" ws? {number}{members} ws? "}}"',
                lark_json_rule(f"name{i}", {"const": tool["name"]}),
                lark_json_rule(f"arguments{i}", tool.get("parameters") or ANY_OBJECT),
            ]
        return "\n".join(rules)


def _lark_key(key: str) -> str:
    return f'{json.dumps(json.dumps(key))} ws? ":" ws?'


def read_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none. NaN and numbers that are infinite are none."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_read_float)
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _read_float(text: str) -> float:
    number = float(text)
    return _refuse(text) if isinf(number) else number


def read_arguments(given: Any, schema: Any) -> str | None:
    """Return the arguments of a call as the text of a JSON object; None if they are no object.

    A text may have the object's JSON. What is no object is an empty one, where the function takes no arguments.
    """
    if isinstance(given, str):
        given = read_json(given)
    if not isinstance(given, dict):
        takes_some = isinstance(schema, dict) and (schema.get("properties") or schema.get("required"))
        if given or takes_some or not isinstance(schema, dict):
            return None
        given = {}
    return write_arguments(given)


def write_arguments(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON, without halves of surrogate pairs, which no UTF-8 can hold: models write escapes."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text.encode(errors="surrogatepass").decode(errors="replace")
