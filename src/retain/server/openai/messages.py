"""Chat requests as chat templates and grammars take them: messages, tools, and what the answer must be."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from retain.processing import grammar
from retain.processing.lark import precede_with_reasoning
from retain.processing.reasoning import Reasoning
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_protocol import (
    AssistantMessageParam,
    ChatCompletionRequest,
    InputMessageParam,
    JsonSchemaFormat,
    NamedToolChoice,
)
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import Json
from retain.server.tool_format import ToolFormat


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


def join_system_messages(messages: Sequence[Json]) -> list[Json]:
    """Return messages of which only the first may be a system message, for chat templates that refuse others.

    System messages at the start become one. A later one becomes text of the user, in the message of the user beside it:
    templates refuse two of them in a row, too.
    """
    joined: list[tuple[Json, list[str]]] = []  # with the texts that become the content
    is_joined = False  # whether the last one has text of a later system message
    for message in messages:
        is_later = (
            message["role"] == "system" and bool(joined) and (len(joined) > 1 or joined[0][0]["role"] != "system")
        )
        role = "user" if is_later else message["role"]
        if joined and role == joined[-1][0]["role"] and (role == "system" or is_later or is_joined):
            joined[-1][1].append(message["content"])
            is_joined = True
        else:
            joined.append(({**message, "role": role}, [message["content"]]))
            is_joined = is_later
    return [{**message, "content": "\n\n".join(texts)} for message, texts in joined]


def fit_messages(messages: list[Json], tokenizer: Tokenizer, tool_format: ToolFormat | None = None) -> list[Json]:
    """Return messages as the chat template takes them: with one system message, where it shows no others."""
    joined = join_system_messages(messages)
    if joined != messages and not _shows_system_messages(tokenizer):
        messages = joined
    return tool_format.fit_messages(messages) if tool_format else messages


def _shows_system_messages(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template shows system messages wherever they are: some refuse or drop later ones."""
    roles = ("system", "system", "user", "system")
    probe = [{"role": role, "content": f"PROBE-{i}-"} for i, role in enumerate(roles)]
    try:
        text = tokenizer.apply_chat_template(probe)
    except ValueError:
        return False
    return all(message["content"] in text for message in probe)


def render_prompt(
    body: ChatCompletionRequest,
    messages: Sequence[Json],
    tools: Sequence[Json],
    tokenizer: Tokenizer,
    tool_format: ToolFormat | None = None,
) -> str:
    """Return the prompt text of a conversation with these messages, fitted, and tools. Raises ValueError."""
    if tool_format and tools:
        messages, tools = tool_format.place_tools(messages, tools)
    return tokenizer.apply_chat_template(
        messages,
        body.add_generation_prompt,
        tools=tools or None,
        continue_final_message=body.continue_final_message,
        variables=body.template_variables,
    )


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


def iter_texts(messages: Sequence[InputMessageParam | AssistantMessageParam]) -> Iterator[Any]:
    """Yield what the messages consist of, so that a message that goes on begins with the same."""
    for message in messages:
        parts = message.content if isinstance(message.content, list) else []
        texts = [part.text for part in parts] if parts else [message.content]
        yield from ([message.role, text] for text in texts if text)
        if others := message.model_dump(exclude={"role", "content"}, exclude_defaults=True):
            yield others


def hash_messages(root_hash: bytes, messages: Sequence[InputMessageParam | AssistantMessageParam]) -> list[bytes]:
    """Return hashes of a conversation up to each of its texts, behind the root's."""
    hashes = [root_hash]
    for text in iter_texts(messages):
        hashes.append(hash_value(text, hashes[-1]))
    return hashes


def hash_value(value: Any, parent_hash: bytes = b"") -> bytes:
    """Return a hash of a value as JSON, and of what precedes it."""
    return blake2b(parent_hash + json.dumps(value).encode(), digest_size=16).digest()


def to_template_tools(body: ChatCompletionRequest) -> list[Json]:
    """Convert the tools that the model may call; none where `tool_choice` forbids them."""
    return [t.model_dump(exclude_none=True) for t in body.tools or []] if body.tool_choice != "none" else []


def _parse_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def build_grammar(
    body: ChatCompletionRequest,
    tools: Sequence[Json],
    tool_format: ToolFormat | None,
    reasoning: Reasoning | None = None,
    special_tokens: Collection[str] = (),
) -> str | None:
    """Return the grammar that tool_choice or response_format demands, or None for free text. Raises APIError.

    `tool_format` is that of the chat template, which decides what stands before a call or the content; it is known
    where there are `tools`. A call or content may follow `reasoning`. `special_tokens`: those that the grammar names.
    """
    if tools and body.tool_choice not in (None, "auto"):
        functions = [t["function"] for t in tools]
        if isinstance(body.tool_choice, NamedToolChoice):
            name = body.tool_choice.function.name
            functions = [f for f in functions if f["name"] == name]
        if not functions:
            raise APIError(400, "tool_choice names an unknown tool", "tool_choice")
        assert tool_format
        lark = tool_format.build_grammar(functions, special_tokens)
    else:
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else {"type": "object"}
        whole = tool_format.build_content_grammar(schema) if tool_format else None
        if whole is None and reasoning is None:
            return grammar.grammar_from_json_schema(schema)
        lark = whole or f"start: content\n{grammar.lark_json_rule('content', schema)}"
    if reasoning and not reasoning.marks.repeats:
        lark = precede_with_reasoning(lark, reasoning, special_tokens)
    return grammar.grammar_from_lark(lark)
