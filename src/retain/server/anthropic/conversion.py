"""Conversion of conversations in Anthropic's format to chat completions, so that both APIs have the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from retain.server.anthropic.blocks import (
    SEPARATOR,
    CacheableBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    iter_texts,
)
from retain.server.anthropic.protocol import (
    ConversationFields,
    Message,
    MessagesRequest,
    NamedToolChoice,
    SystemMessage,
    UserMessage,
)
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.protocol import ExtensionFields, Json

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SHARED_FIELDS = list(ExtensionFields.model_fields)
PROBE = UserMessage(role="user", content="0")  # follows a system prompt that is rendered alone


def to_chat_request(body: ConversationFields) -> ChatCompletionRequest:
    """Convert a request, or the conversation of one whose tokens are only counted."""
    fields: Json = {name: getattr(body, name) for name in ["model", *SHARED_FIELDS]}
    fields["messages"] = convert_messages(body)
    if body.functions:
        fields["tools"] = [{"type": "function", "function": function} for function in body.functions]
    if body.continues_answer:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body.tool_choice, NamedToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice:
        fields["tool_choice"] = TOOL_CHOICES[body.tool_choice.type]
    if body.thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config and body.output_config.format:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "stop": body.stop_sequences}
        fields |= {"stream": body.stream, "max_completion_tokens": max(body.max_tokens, 1)}
        fields |= {} if body.max_tokens else {"min_tokens": 0}
    return ChatCompletionRequest(**fields)


def convert_messages(body: ConversationFields) -> list[Json]:
    """Return a conversation as messages of chat completions. Turns of the same role in a row become one."""
    converted: list[Json] = []
    if body.system:
        parts = body.system if isinstance(body.system, str) else _to_parts(body.system)
        converted.append({"role": "system", "content": parts})
    for role, turns in groupby(_shown_messages(body.messages), lambda message: message.role):
        blocks = list(_join_turns(list(turns)))
        if role == "assistant":
            converted.append(_convert_assistant_blocks(blocks))
        else:
            converted += _convert_blocks(role, blocks)
    return converted


def cut_at_breakpoints(body: ConversationFields) -> dict[float, ConversationFields | None]:
    """Return, for each lifetime in seconds, the conversation up to the last breakpoint that asks for it.

    None stands for the whole prompt. A breakpoint is left out if a later one lives at least as long.
    """
    cuts: dict[float, Callable[[], ConversationFields | None]] = {}  # a body may have thousands; a few are cut
    for seconds, cut in _iter_cuts(body):
        cuts = {other: kept for other, kept in cuts.items() if other > seconds} | {seconds: cut}
    return {seconds: cut() for seconds, cut in cuts.items()}


def _iter_cuts(body: ConversationFields) -> Iterator[tuple[float, Callable[[], ConversationFields | None]]]:
    """Yield the lifetime of each breakpoint, in the order of the prompt, and what cuts the conversation there."""
    leading: dict[str, Sequence[CacheableBlock]] = {"tools": body.tools or ()}
    leading["system"] = body.system if isinstance(body.system, list) else ()
    for field, blocks in leading.items():
        for i, block in enumerate(blocks):
            for cache_control in block.iter_breakpoints():
                yield cache_control.seconds, partial(_cut_leading, body, field, i + 1)
    for i, message in enumerate(body.messages):
        for j, block in enumerate(_blocks(message)):
            for cache_control in block.iter_breakpoints():
                yield cache_control.seconds, partial(_cut_messages, body, i, j + 1)
    if body.cache_control:
        yield body.cache_control.seconds, lambda: None


def _cut_leading(body: ConversationFields, field: str, num_blocks: int) -> ConversationFields:
    """Return a conversation that has this many tools, or blocks of the system prompt, and no message of its own."""
    return body.model_copy(update={field: getattr(body, field)[:num_blocks], "messages": [PROBE]})


def _cut_messages(body: ConversationFields, index: int, num_blocks: int) -> ConversationFields | None:
    """Return a conversation up to this many blocks of a message; None if that is all of it."""
    message = body.messages[index]
    if index + 1 == len(body.messages) and num_blocks == len(message.content):
        return None
    begun = message.model_copy(update={"content": message.content[:num_blocks]})
    return body.model_copy(update={"messages": [*body.messages[:index], begun]})


def _blocks(message: Message) -> Sequence[CacheableBlock]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _shown_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages without those that a later user message clears."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        if not (isinstance(message, SystemMessage) and message.clear_at == "next_user_message" and i < last_user):
            yield message


def _join_turns(turns: Sequence[Message]) -> Iterator[CacheableBlock]:
    for i, turn in enumerate(turns):
        blocks = _blocks(turn)
        if i and _meet_in_text(_blocks(turns[i - 1]), blocks):
            yield TextBlock(type="text", text=SEPARATOR)
        yield from blocks


def _meet_in_text(before: Sequence[CacheableBlock], after: Sequence[CacheableBlock]) -> bool:
    return bool(before and after) and isinstance(before[-1], TextBlock) and isinstance(after[0], TextBlock)


def _convert_blocks(role: str, blocks: Sequence[CacheableBlock]) -> list[Json]:
    """Return a message of the role for text in a row, and a tool message for each result of a tool."""
    converted: list[Json] = []
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            if parts := _to_parts(list(group)):
                converted.append({"role": role, "content": parts})
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            converted.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.prompt_text})
    return converted or [{"role": role, "content": ""}]


def _convert_assistant_blocks(blocks: Sequence[CacheableBlock]) -> Json:
    message: Json = {"role": "assistant", "content": _to_parts(blocks) or None}
    if calls := [_convert_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    if reasoning := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = SEPARATOR.join(reasoning)
    return message


def _convert_call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _to_parts(blocks: Sequence[CacheableBlock]) -> list[Json]:
    return [{"type": "text", "text": text} for text in iter_texts(blocks)]
