"""Normalization of prompts whose beginnings differ from request to request, though they say the same.

Claude Code begins its system prompt with a line that has a number of this request. Agents send the tools of several
servers in the order in which these answer. Either makes every prompt new from its beginning.
"""

from __future__ import annotations

import json
import re
from typing import Any

from retain.server.openai.chat_protocol import ChatCompletionRequest, InputMessageParam, TextContentPart, ToolParam

HEADER_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
DROPPED_HEADER = "prompt normalized: the client's header line was left out"
SORTED_TOOLS = "prompt normalized: tools were sorted"


def normalize_prompt(body: ChatCompletionRequest) -> tuple[ChatCompletionRequest, list[str]]:
    """Return a conversation without the header line of a known client, with its tools sorted, and what was changed."""
    changed: dict[str, Any] = {}
    notes = []
    first, *others = body.messages
    if isinstance(first, InputMessageParam) and first.role == "system" and (shown := _drop_header(first)) is not first:
        changed["messages"] = [shown, *others] if shown.content or not others else others
        notes.append(DROPPED_HEADER)
    tools = sorted(body.tools or [], key=_sort_key)
    if tools != (body.tools or []):
        changed["tools"] = tools
        notes.append(SORTED_TOOLS)
    return body.model_copy(update=changed), notes


def has_header_line(body: ChatCompletionRequest) -> bool:
    """Return whether a conversation begins with the header line of a known client."""
    first = body.messages[0]
    return isinstance(first, InputMessageParam) and first.role == "system" and _drop_header(first) is not first


def _drop_header(message: InputMessageParam) -> InputMessageParam:
    """Return a message without the header at its beginning, the same one if it has none."""
    content = message.content
    parts = [TextContentPart(type="text", text=content)] if isinstance(content, str) else content
    text = parts[0].text if parts else ""
    rest = HEADER_LINE.sub("", text)
    if rest == text:
        return message
    shown = [TextContentPart(type="text", text=rest), *parts[1:]] if rest else parts[1:]
    return message.model_copy(update={"content": shown})


def _sort_key(tool: ToolParam) -> tuple[str, str]:
    return tool.function.name, json.dumps(tool.model_dump())
