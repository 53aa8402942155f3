"""Messages and tools of chat requests, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from retain.server.openai.chat_protocol import AssistantMessageParam, ChatCompletionRequest, InputMessageParam

Json = dict[str, Any]


def to_template_messages(messages: Sequence[InputMessageParam | AssistantMessageParam]) -> list[Json]:
    """Convert messages: plain text, tool arguments as objects."""
    out = []
    for m in messages:
        parts = m.content if isinstance(m.content, list) else []
        message: Json = {
            "role": "system" if m.role == "developer" else m.role,
            "content": "".join(p.text for p in parts) if parts else m.content or "",
        }
        for field in ("name", "tool_call_id"):
            if (value := getattr(m, field, None)) is not None:
                message[field] = value
        if isinstance(m, AssistantMessageParam):
            message |= _convert_answer(m)
        out.append(message)
    return out


def _convert_answer(m: AssistantMessageParam) -> Json:
    """Return the fields that only an assistant message has."""
    fields: Json = {} if m.content or m.refusal is None else {"content": m.refusal}
    if (reasoning := m.reasoning if m.reasoning_content is None else m.reasoning_content) is not None:
        fields["reasoning_content"] = reasoning
    if m.tool_calls:
        fields["tool_calls"] = calls = [call.model_dump() for call in m.tool_calls]
        for call in calls:
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    return fields


def to_template_tools(body: ChatCompletionRequest) -> list[Json]:
    """Convert the tools that the model may call; none where `tool_choice` forbids them."""
    return [t.model_dump(exclude_none=True) for t in body.tools or []] if body.tool_choice != "none" else []


def _parse_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
