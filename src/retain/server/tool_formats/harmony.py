"""gpt-oss: every message of an answer goes to a channel, and a tool call is a message to a function.

An answer is `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. The
recipient of a call, ` to=functions.NAME`, is before the channel or behind it. The facts are from OpenAI's description
of the harmony format (cookbook.openai.com/articles/openai-harmony) and from gpt-oss's chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import list_rules
from retain.server.call_history import change_calls, split_calls
from retain.server.tool_format import ChatOutput, Functions, ParsedToolCall, Schemas, ToolFormat, read_arguments

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
MARKER = re.compile("|".join(map(re.escape, MARKERS)))
ANSWER_START = f"{START}assistant"
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
NAMESPACE = "functions."
BEGUN_RECIPIENT = "to="  # a header without a marker begins so
LONGEST_BEGUN = len(BEGUN_RECIPIENT)  # pieces of text that are not blank, before it is known what a header is
SEPARATOR = "\n\n"  # between messages that become one text
# A grammar's rules of what precedes the message that it is about.
GRAMMAR_RULES = f"""\
analysis: {CHANNEL} "analysis" {MESSAGE} TEXT {ENDS[0]} {START} "assistant"
type: " "? {CONSTRAIN} "json" | " json"
TEXT: /(.|\\n)*/"""


@dataclass(frozen=True)
class Format(ToolFormat):
    """A message to a function, in an answer of messages to channels."""

    begin: str = CHANNEL
    shown: ClassVar[tuple[str, ...]] = (CHANNEL, MESSAGE)
    families: ClassVar[tuple[str, ...]] = ("gpt_oss",)

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the special tokens of harmony, which must stay in the text of an answer."""
        return MARKERS

    def parse(self, text: str, schemas: Schemas) -> list[ParsedToolCall] | None:
        """Parse one message with its header."""
        header, marker, body = text.partition(MESSAGE)
        recipient = RECIPIENT.search(header)
        call = parse_call(recipient[1], body) if marker and recipient else None
        return [call] if call else None

    def build_grammar(self, tools: Functions, special_tokens: Collection[str] = ()) -> str:
        """Return the grammar of one message that calls a function. The model may reason before it."""
        rules = [f"start: analysis? ({list_rules('call', len(tools))})", GRAMMAR_RULES]
        for i, tool in enumerate(tools):
            recipient = json.dumps(f" to={NAMESPACE}{tool['name']}")
            before = f'{recipient} {CHANNEL} "commentary" type'
            behind = f'{CHANNEL} "commentary" {recipient} type'
            rules += [
                f"call{i}: ({before} | {behind}) {MESSAGE} arguments{i}",
                lark_json_rule(f"arguments{i}", tool.get("parameters") or {"type": "object"}),
            ]
        return "\n".join(rules)

    def build_content_grammar(self, schema: Any) -> str:
        """Return the grammar of a final message whose text matches a JSON schema. The model may reason before it."""
        start = f'start: analysis? {CHANNEL} "final" type? {MESSAGE} content'
        return "\n".join([start, GRAMMAR_RULES, lark_json_rule("content", schema)])

    def create_parser(self, tool_names: Collection[str], prompt: str) -> HarmonyParser:
        """Create the parser of an answer, and feed it the beginning of the answer that the prompt may have."""
        parser = HarmonyParser(tool_names)
        _, begun, answer = prompt.rpartition(ANSWER_START)
        parser.feed(answer if begun else "", finished=False)
        return parser

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with one call each and one text beside it: the template shows no more."""
        return split_calls(change_calls(messages, _join_texts))

    def fit_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return tools that all have a description, which the template reads."""
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _join_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with calls whose content is part of its reasoning, if it has both: the template refuses both."""
    reasoning = message.get("reasoning_content")
    content = message.get("content")
    if not reasoning or not content:
        return dict(message)
    return {**message, "reasoning_content": f"{reasoning}{SEPARATOR}{content}", "content": ""}


def parse_call(recipient: str, body: str) -> ParsedToolCall | None:
    """Return the call that a message to a recipient is. None if its text is no object."""
    arguments = read_arguments(body if body.strip() else {}, None)
    return None if arguments is None else ParsedToolCall(recipient.removeprefix(NAMESPACE), arguments)


class HarmonyParser:
    """Separates an answer of messages: analysis is reasoning, a message to a known tool is a call, others are content.

    A call that was cut, or whose text is no object, counts as content. So does an answer without any header.
    """

    def __init__(self, tool_names: Collection[str]):
        self._tool_names = tool_names
        self._held = ""  # end of the text, which may begin a marker
        self._header: list[str] | None = []  # of the message that begins; None within a message
        self._is_open = False  # whether a marker began the header
        self._recipient = ""  # the known tool to which the message goes
        self._body: list[str] = []  # of a call that is not yet complete
        self._is_reasoning = False
        self._is_new = False  # whether the message has no text yet
        self._has_text = {True: False, False: False}  # reasoning and content that earlier messages have
        self._has_left_reasoning = False

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether the text of an answer has a message that is no reasoning."""
        other = HarmonyParser(self._tool_names)
        other.feed(text, finished=False)
        return other._has_left_reasoning

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the reasoning, content and calls that are certain; all once it has finished."""
        parts = _Parts()
        text = self._held + text
        cut = len(text) if finished else len(text) - _begun_marker_length(text)
        self._held = text[cut:]
        start = 0
        for marker in MARKER.finditer(text, 0, cut):
            self._add_text(text[start : marker.start()], parts)
            self._add_marker(marker[0], parts)
            start = marker.end()
        self._add_text(text[start:cut], parts)
        if finished:
            self._finish(parts)
        return ChatOutput("".join(parts.reasoning), "".join(parts.content), parts.calls)

    def _add_text(self, text: str, parts: _Parts) -> None:
        if not text:
            return
        if self._header is None:
            self._add_body(text, parts)
            return
        self._header.append(text)
        if self._is_open:
            return
        begun = "".join(self._header[-LONGEST_BEGUN:]).lstrip()
        if begun and not begun.startswith(BEGUN_RECIPIENT) and not BEGUN_RECIPIENT.startswith(begun):
            self._open_message("", parts)
            self._add_body("".join(self._take_header()), parts)
        elif begun.startswith(BEGUN_RECIPIENT):
            self._is_open = True

    def _add_marker(self, marker: str, parts: _Parts) -> None:
        if self._header is None and marker in (MESSAGE, CONSTRAIN):
            self._add_body(marker, parts)  # these mean nothing within a message
        elif marker == MESSAGE:
            self._open_message("".join(self._header or ()), parts)
            self._take_header()
        elif marker == CONSTRAIN or (marker == CHANNEL and self._header is not None):
            assert self._header is not None
            self._header.append(marker)
            self._is_open = True
        else:  # the message ends, or the next one begins without an end
            self._close_message(parts)
            self._header = [CHANNEL] if marker == CHANNEL else []
            self._is_open = marker in (START, CHANNEL)

    def _take_header(self) -> list[str]:
        header = self._header or []
        self._header = None
        self._is_open = False
        return header

    def _open_message(self, header: str, parts: _Parts) -> None:
        channel = CHANNEL_NAME.search(header)
        recipient = RECIPIENT.search(header)
        name = recipient[1].removeprefix(NAMESPACE) if recipient else ""
        self._recipient = name if name in self._tool_names else ""
        self._is_reasoning = channel is not None and channel[1] == "analysis" and not self._recipient
        self._is_new = True
        self._has_left_reasoning |= not self._is_reasoning

    def _add_body(self, text: str, parts: _Parts) -> None:
        if self._recipient:
            self._body.append(text)
            return
        of_kind = parts.reasoning if self._is_reasoning else parts.content
        if self._is_new and self._has_text[self._is_reasoning]:
            of_kind.append(SEPARATOR)
        of_kind.append(text)
        self._is_new = False
        self._has_text[self._is_reasoning] = True

    def _close_message(self, parts: _Parts) -> None:
        if self._header is not None or not self._recipient:
            return
        body = "".join(self._body)
        self._body.clear()
        call = parse_call(self._recipient, body)
        self._recipient = ""
        if call:
            parts.calls.append(call)
        else:
            self._add_body(body, parts)

    def _finish(self, parts: _Parts) -> None:
        """End the answer. What may have been the beginning of a recipient is content."""
        self._close_message(parts)
        rest = "" if self._is_open else "".join(self._header or ())
        if rest.strip() or not any(self._has_text.values()):
            self._open_message("", parts)
            self._add_body(rest, parts)
        self._header = []


class _Parts:
    """Parts of an answer that are certain."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[ParsedToolCall] = []


def _begun_marker_length(text: str) -> int:
    """Return the length of the end of a text that may begin a marker."""
    at = text.rfind("<", max(0, len(text) - max(map(len, MARKERS))))
    begun = text[at:] if at >= 0 else ""
    return len(begun) if any(marker.startswith(begun) and marker != begun for marker in MARKERS) else 0
