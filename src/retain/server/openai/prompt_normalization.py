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
    others = body.messages[1:]
    if shown := without_header(body):
        changed["messages"] = [shown, *others] if shown.content or not others else others
        notes.append(DROPPED_HEADER)
    tools = sorted(body.tools or [], key=_sort_key)
    if tools != (body.tools or []):
        changed["tools"] = tools
        notes.append(SORTED_TOOLS)
    return body.model_copy(update=changed), notes


def without_header(body: ChatCompletionRequest) -> InputMessageParam | None:
    """Return the system message without the header line of a known client; None where it has none."""
    first = body.messages[0]
    if not isinstance(first, InputMessageParam) or first.role != "system":
        return None
    content = first.content
    parts = [TextContentPart(type="text", text=content)] if isinstance(content, str) else content
    text = parts[0].text if parts else ""
    rest = HEADER_LINE.sub("", text)
    if rest == text:
        return None
    shown = [TextContentPart(type="text", text=rest), *parts[1:]] if rest else parts[1:]
    return first.model_copy(update={"content": shown})


def _sort_key(tool: ToolParam) -> tuple[str, str]:
    return tool.function.name, json.dumps(tool.model_dump())
