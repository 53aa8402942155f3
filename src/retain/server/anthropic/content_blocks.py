"""Content blocks of an answer: built from what its parser separates, with the events that stream them."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any
from uuid import uuid4

from retain.server.openai.body import parse_arguments
from retain.server.openai.protocol import Json
from retain.server.tool_format import ChatOutput, ParsedToolCall


class ContentBlocks:
    """The blocks of one answer: thinking, text and calls of tools. Text that is only blank makes no block.

    `blocks` are complete after `close`.
    """

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._is_open = False
        self._text_parts: list[str] = []  # of the open block, whose text is set at its end
        self._blank_text: list[str] = []  # not yet known to begin a block

    @property
    def has_tool_calls(self) -> bool:
        """Whether the answer has a tool call."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def feed(self, output: ChatOutput) -> list[Json]:
        """Add new parts of the answer. Returns their events."""
        events: list[Json] = []
        if output.reasoning:
            events += self._append("thinking", output.reasoning)
        if output.content:
            self._blank_text.append(output.content)
            if self._is_open_as("text") or not output.content.isspace():
                events += self._append("text", self._take_blank_text())
        for call in output.tool_calls:
            events += self._add_call(call)
        return events

    def close(self) -> list[Json]:
        """End the answer. Returns the last events."""
        text = self._take_blank_text()
        events = [] if self.blocks or not text else self._append("text", text)
        return [*events, *self._close_block()]

    def _take_blank_text(self) -> str:
        text = "".join(self._blank_text)
        self._blank_text.clear()
        return text

    def _is_open_as(self, kind: str) -> bool:
        return self._is_open and bool(self.blocks[-1]["type"] == kind)

    def _append(self, kind: str, text: str) -> list[Json]:
        """Append text to the open block, or to a new one if that is of another kind."""
        events: list[Json] = []
        if not self._is_open_as(kind):
            events += self._close_block()
            empty = {"type": kind, kind: ""}
            events.append(self._open_block(empty | {"signature": ""} if kind == "thinking" else empty))
        self._text_parts.append(text)
        return [*events, self._delta(type=f"{kind}_delta", **{kind: text})]

    def _add_call(self, call: ParsedToolCall) -> list[Json]:
        arguments, text = _parse_object(call.arguments)
        start = {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": call.name, "input": {}}
        events = [*self._close_block(), self._open_block(start)]
        self.blocks[-1] = start | {"input": arguments}
        self._blank_text.clear()
        return [*events, self._delta(type="input_json_delta", partial_json=text), *self._close_block()]

    def _open_block(self, block: Json) -> Json:
        self.blocks.append(block)
        self._is_open = True
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _close_block(self) -> list[Json]:
        """End the open block, if any. Thinking ends with its signature."""
        if not self._is_open:
            return []
        events: list[Json] = []
        block = self.blocks[-1]
        if self._text_parts:
            block[block["type"]] = "".join(self._text_parts)
            self._text_parts.clear()
        if block["type"] == "thinking":
            # Clients send it back with the block. Nothing is checked, so a digest that tells blocks apart will do.
            block["signature"] = sha256(block["thinking"].encode(errors="surrogatepass")).hexdigest()
            events.append(self._delta(type="signature_delta", signature=block["signature"]))
        self._is_open = False
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, **delta: Any) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _parse_object(arguments: str) -> tuple[Json, str]:
    """Return the arguments of a call, and their JSON text. What is no object becomes the member `value` of one."""
    try:
        parsed = parse_arguments(arguments)
    except ValueError:
        parsed = arguments
    if isinstance(parsed, dict):
        return parsed, arguments
    wrapped = {"value": parsed}
    return wrapped, json.dumps(wrapped, ensure_ascii=False)
