"""Convert requests of the Responses API to chat completions, so that both have the same prompts.

A conversation is the items of the stored turns that a request continues, and the request's own. The items are the
same whether the server stored them or the client sends all of them, and so are the tokens of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from retain.server.openai.chat_protocol import (
    AssistantMessageParam,
    ChatCompletionRequest,
    FunctionCall,
    InputMessageParam,
    JsonSchema,
    JsonSchemaFormat,
    MessageParam,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    TextOrJsonObjectFormat,
    ToolCall,
)
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import ExtensionFields
from retain.server.openai.responses.calls import CallItem, LocalShellCallOutputItem, OutputItem
from retain.server.openai.responses.client_tools import ClientTools, expand_tools
from retain.server.openai.responses.items import InputItem, MessageItem, OtherItem, ReasoningItem, ToolsItem
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.responses.tools import AllowedTools
from retain.server.warning_header import warn_of

CHAT_PARAMETERS = {  # as errors of chat completions name them
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def get_input_items(body: ResponsesRequest) -> list[InputItem]:
    """Return the input of a request as items, also where it is one text."""
    if not isinstance(body.input, str):
        return body.input
    return [MessageItem(role="user", content=body.input)] if body.input else []


@dataclass(frozen=True)
class ConvertedRequest:
    """A request as a chat completion. `tools`: those that the client runs. `warnings`: what was left out."""

    chat: ChatCompletionRequest
    tools: ClientTools
    warnings: Sequence[str]


def convert_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ConvertedRequest:
    """Convert a request whose conversation has these items. Raises APIError."""
    # Chat templates need a message to answer: clients that only want instructions computed send none.
    messages = to_messages(items) or [InputMessageParam(role="user", content="")]
    if body.instructions:
        messages.insert(0, InputMessageParam(role="system", content=body.instructions))
    added = [tool for item in items if isinstance(item, ToolsItem) for tool in item.tools]
    tools, choice = _choose_tools(body, expand_tools(body.tools or (), added))
    shared = {name: getattr(body, name) for name in ExtensionFields.model_fields}
    chat = ChatCompletionRequest(
        **(shared if body.generates else {**shared, "min_tokens": 0}),
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens if body.generates else 1,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stream=body.stream,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        response_format=_to_response_format(body),
        tools=tools.to_params(),
        tool_choice=choice,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    left_out = [item.type for item in items if isinstance(item, OtherItem)]
    return ConvertedRequest(chat, tools, [*warn_of("tools", tools.left_out), *warn_of("items", left_out)])


def _choose_tools(
    body: ResponsesRequest, tools: ClientTools
) -> tuple[ClientTools, Literal["none", "auto", "required"] | NamedToolChoice | None]:
    """Return the tools that the model sees, and which it has to call."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        tools = tools.select(choice)
        choice = choice.mode
    if choice in (None, "none", "auto"):
        return tools, choice if tools else None
    if not tools:
        why = f": the server does not run {', '.join(tools.left_out)}" if tools.left_out else ""
        raise APIError(400, f"tool_choice without tools{why}", "tool_choice")
    if isinstance(choice, str):
        return tools, choice
    assert choice is not None
    return tools, NamedToolChoice(type="function", function=NamedFunction(name=tools.find(choice).function.name))


class _AssistantTurn:
    """Reasoning, texts and calls that become one message. They are joined once, at the end: a turn may be long."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def to_message(self) -> AssistantMessageParam:
        """Return the message."""
        return AssistantMessageParam(
            role="assistant",
            reasoning_content="".join(self.reasoning) if self.reasoning else None,
            **({"content": "".join(self.texts)} if self.texts else {}),  # type: ignore[arg-type]
            **({"tool_calls": self.calls} if self.calls else {}),  # type: ignore[arg-type]
        )


def to_messages(items: Sequence[InputItem]) -> list[MessageParam]:
    """Convert items to messages: reasoning, text and calls of one assistant turn become one message."""
    messages: list[InputMessageParam | _AssistantTurn] = []
    turn: _AssistantTurn | None = None  # that later items may still add to
    call_ids: dict[str, str] = {}  # by what an output may name: the call's call_id, or its id

    def start_turn() -> _AssistantTurn:
        started = _AssistantTurn()
        messages.append(started)
        return started

    for item in items:
        if isinstance(item, ReasoningItem):
            if not (text := item.text):
                continue  # only another server can read it
            turn = turn if turn and not turn.texts and not turn.calls else start_turn()
            turn.reasoning.append(text)
        elif isinstance(item, CallItem):
            turn = turn or start_turn()
            function = FunctionCall(name=item.function_name, arguments=item.function_arguments)
            turn.calls.append(ToolCall(id=item.call_id, function=function))
            call_ids |= {item.id or item.call_id: item.call_id, item.call_id: item.call_id}
        elif isinstance(item, MessageItem) and item.role == "assistant":
            # A text after a call belongs to the call's turn; after a text it is a message of its own.
            turn = turn if turn and (not turn.texts or turn.calls) else start_turn()
            turn.texts.append(item.text)
        elif isinstance(item, MessageItem):
            turn = None
            messages.append(InputMessageParam(role=item.role, content=item.text))  # type: ignore[arg-type]
        elif isinstance(item, OutputItem):
            turn = None
            call_id = _find_call(item, call_ids)
            messages.append(InputMessageParam(role="tool", content=item.text, tool_call_id=call_id))
        elif isinstance(item, ToolsItem) and item.call_id in call_ids:
            turn = None
            found = json.dumps({"tools": expand_tools((), item.tools).names})
            messages.append(InputMessageParam(role="tool", content=found, tool_call_id=item.call_id))
    return [message.to_message() if isinstance(message, _AssistantTurn) else message for message in messages]


def _find_call(item: OutputItem, call_ids: dict[str, str]) -> str:
    """Return the call_id of the call that an output belongs to. Raises APIError if there is none."""
    name = item.call_id
    if name is None and isinstance(item, LocalShellCallOutputItem):
        name = item.id
    if name not in call_ids:
        raise APIError(400, f"{item.type}: no call before it has its call_id", "input")
    return call_ids[name]


def _to_response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if isinstance(wanted, TextOrJsonObjectFormat):
        return wanted
    schema = JsonSchema(name=wanted.name, description=wanted.description, schema=wanted.schema_, strict=wanted.strict)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def rename_parameter(error: APIError) -> APIError:
    """Return the error of a chat completion as one of a response: with the names of its fields."""
    name = CHAT_PARAMETERS.get(error.param or "")
    if not name:
        return error
    return APIError(error.status, error.message.replace(str(error.param), name), name, error.code, error.headers)
