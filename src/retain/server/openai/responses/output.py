"""Output items of a response, built while the answer is generated, and the stream events that describe them.

An item is open from its first text to the next item of another kind. Blank text waits until other text follows it:
the blank lines around tool calls and think tags are no items of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from retain.server.openai.protocol import Json
from retain.server.openai.responses.client_tools import ClientTools
from retain.server.openai.responses.items import ID_PREFIXES, create_id, encode_reasoning
from retain.server.tool_format import ChatOutput, ParsedToolCall

STREAMED_FIELDS = {  # of calls: the field that is streamed, and how its events are named
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


class OutputItems:
    """The items of an answer. Every method returns the events of what it changed, without sequence numbers."""

    def __init__(self, tools: ClientTools, encrypts_reasoning: bool = False):
        """`encrypts_reasoning`: items of reasoning have `encrypted_content`, too."""
        self.items: list[Json] = []
        self._tools = tools
        self._encrypts_reasoning = encrypts_reasoning
        self._is_open = False  # whether the last item may still grow
        self._text_parts: list[str] = []  # of the open item, whose text is set at its end
        self._blank: dict[str, list[str]] = {"message": [], "reasoning": []}  # text that waits for other text

    def add(self, output: ChatOutput, logprobs: Sequence[Json]) -> list[Json]:
        """Add new parts of the answer. `logprobs`: those of the content."""
        events = self._add_text("reasoning", output.reasoning, ())
        events += self._add_text("message", output.content, logprobs)
        for call in output.tool_calls:
            events += self._add_call(call)
        return events

    def finish(self, status: str) -> list[Json]:
        """End the last item. An answer without any text is a message without text."""
        blank = "".join(self._blank["message"])
        has_calls = any("call_id" in item for item in self.items)
        events = self._append("message", blank, ()) if not self.items or (blank and not has_calls) else []
        return events + self.close(status)

    def close(self, status: str) -> list[Json]:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        (part,) = item["content"]
        item["status"] = status
        part["text"] = "".join(self._text_parts)
        self._text_parts.clear()
        if item["type"] == "reasoning" and self._encrypts_reasoning:
            item["encrypted_content"] = encode_reasoning(part["text"])
        done = self._event(_text_event(item) + ".done", content_index=0, text=part["text"])
        if item["type"] == "message":
            done["logprobs"] = part["logprobs"]
        part_done = self._event("response.content_part.done", content_index=0, part=part)
        return [done, part_done, self._item_event("response.output_item.done")]

    def _is_open_as(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _add_text(self, kind: str, text: str, logprobs: Sequence[Json]) -> list[Json]:
        if not text:
            return []
        blank = self._blank[kind]
        if not self._is_open_as(kind) and text.isspace():
            blank.append(text)
            return []
        text = "".join([*blank, text])
        blank.clear()
        return self._append(kind, text, logprobs)

    def _append(self, kind: str, text: str, logprobs: Sequence[Json]) -> list[Json]:
        """Append text to the open item of this kind, or to a new one."""
        events = [] if self._is_open_as(kind) else self.close("completed") + self._start(kind)
        item = self.items[-1]
        (part,) = item["content"]
        self._text_parts.append(text)
        delta = self._event(_text_event(item) + ".delta", content_index=0, delta=text)
        if kind == "message":
            part["logprobs"] += logprobs
            delta["logprobs"] = logprobs
        return [*events, delta] if text or logprobs else events

    def _start(self, kind: str) -> list[Json]:
        """Start a message or a reasoning item with one empty part."""
        self._is_open = True
        part: Json = {"type": "reasoning_text", "text": ""}
        item: Json = {"id": create_id("rs"), "type": kind, "status": "in_progress", "summary": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": create_id("msg"), "type": kind, "status": "in_progress", "role": "assistant"}
        self.items.append({**item, "content": [part]})
        added = self._item_event("response.output_item.added")
        added["item"]["content"] = []
        return [added, self._event("response.content_part.added", content_index=0, part=_copy_part(part))]

    def _add_call(self, call: ParsedToolCall) -> list[Json]:
        """Add a call of a tool, which is always complete."""
        events = self.close("completed")
        self._blank["message"].clear()
        fields = self._tools.to_item(call)
        kind = fields["type"]
        item = {"id": create_id(ID_PREFIXES[kind]), "status": "in_progress", "call_id": create_id("call"), **fields}
        self.items.append(item)
        streamed, name = STREAMED_FIELDS.get(kind, ("", ""))
        text = item.get(streamed)
        if streamed:
            item[streamed] = ""
        events.append(self._item_event("response.output_item.added"))
        if streamed:
            item[streamed] = text
            names = {"name": item["name"]} if kind == "function_call" else {}
            events.append(self._event(f"{name}.delta", delta=text))
            events.append(self._event(f"{name}.done", **names, **{streamed: text}))
        item["status"] = "completed"
        return [*events, self._item_event("response.output_item.done")]

    def _event(self, type_: str, **fields: object) -> Json:
        """Build an event about the last item."""
        return {"type": type_, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, type_: str) -> Json:
        """Build an event with the last item as it is now."""
        return {"type": type_, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}


def _text_event(item: Json) -> str:
    return "response.output_text" if item["type"] == "message" else "response.reasoning_text"


def _copy_part(part: Json) -> Json:
    return {**part, "logprobs": []} if "logprobs" in part else dict(part)
