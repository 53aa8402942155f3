"""Convert requests of the Responses API to chat completions, so that both have the same prompts.

A conversation is the items of the stored turns that a request continues, and the request's own. The items are the
same whether the server stored them or the client sends all of them, and so are the tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from retain.server.openai.chat_protocol import (
    AssistantMessageParam,
    ChatCompletionRequest,
    FunctionCall,
    FunctionDefinition,
    InputMessageParam,
    JsonSchema,
    JsonSchemaFormat,
    MessageParam,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    TextOrJsonObjectFormat,
    ToolCall,
    ToolParam,
)
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import ExtensionFields, Json
from retain.server.openai.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    dump_item,
    join_content,
)
from retain.server.openai.responses.protocol import FunctionChoice, ResponsesRequest, TextJsonSchemaFormat
from retain.server.openai.responses.store import StoredTurn

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
CHAT_PARAMETERS = {  # as errors of chat completions name them
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def create_id(prefix: str) -> str:
    """Create the id of a response or an item."""
    return f"{prefix}_{uuid4().hex}"


def get_input_items(body: ResponsesRequest) -> list[InputItem]:
    """Return the input of a request as items."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def dump_items(items: Sequence[InputItem]) -> bytes:
    """Encode items for the store. Those without an id get one."""
    return orjson.dumps([dump_item(item, create_id(ID_PREFIXES[item.type])) for item in items])


def iter_stored_items(turn: StoredTurn, with_output: bool) -> Iterator[Json]:
    """Yield the items of a stored conversation, oldest first. `with_output`: those of the last response, too."""
    for one in turn.conversation():
        yield from orjson.loads(one.input_items)
        if with_output or one is not turn:
            yield from orjson.loads(one.response)["output"]


def to_chat_request(body: ResponsesRequest, previous: StoredTurn | None) -> ChatCompletionRequest:
    """Convert a request that continues a stored turn, if any. Raises APIError."""
    history = ITEMS.validate_python(list(iter_stored_items(previous, with_output=True))) if previous else []
    messages = to_messages([*history, *get_input_items(body)])
    if body.instructions:
        messages.insert(0, InputMessageParam(role="system", content=body.instructions))
    choice = body.tool_choice
    return ChatCompletionRequest(
        **{name: getattr(body, name) for name in ExtensionFields.model_fields},
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stream=body.stream,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        response_format=_to_response_format(body),
        tools=[_to_tool(tool.model_dump(exclude={"type"})) for tool in body.tools or ()] or None,
        tool_choice=NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, FunctionChoice)
        else choice,
    )


def to_messages(items: Sequence[InputItem]) -> list[MessageParam]:
    """Convert items to messages: reasoning, text and calls of one assistant turn become one message."""
    messages: list[MessageParam] = []
    turn: AssistantMessageParam | None = None  # that later items may still add to
    call_ids = set()

    def start_turn() -> AssistantMessageParam:
        message = AssistantMessageParam(role="assistant", reasoning_content=None)
        messages.append(message)
        return message

    for item in items:
        if isinstance(item, ReasoningItem):
            turn = turn if turn and turn.content is None and not turn.tool_calls else start_turn()
            turn.reasoning_content = (turn.reasoning_content or "") + item.text
        elif isinstance(item, FunctionCallItem):
            turn = turn or start_turn()
            function = FunctionCall(name=item.name, arguments=item.arguments)
            turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, function=function)]
            call_ids.add(item.call_id)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            # A text after a call belongs to the call's turn; after a text it is a message of its own.
            turn = turn if turn and (turn.content is None or turn.tool_calls) else start_turn()
            turn.content = f"{turn.content or ''}{item.text}"
        elif isinstance(item, MessageItem):
            turn = None
            messages.append(InputMessageParam(role=item.role, content=item.text))  # type: ignore[arg-type]
        elif isinstance(item, FunctionCallOutputItem):
            turn = None
            if item.call_id not in call_ids:
                raise APIError(400, "function_call_output: no function_call before it has its call_id", "input")
            messages.append(
                InputMessageParam(role="tool", content=join_content(item.output), tool_call_id=item.call_id)
            )
    return messages


def _to_tool(function: Json) -> ToolParam:
    return ToolParam(type="function", function=FunctionDefinition(**function))


def _to_response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    if not isinstance(wanted, TextJsonSchemaFormat):
        return TextOrJsonObjectFormat(type=wanted.type)
    schema = JsonSchema(name=wanted.name, description=wanted.description, schema=wanted.schema_, strict=wanted.strict)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def rename_parameter(error: APIError) -> APIError:
    """Return the error of a chat completion as one of a response: with the names of its fields."""
    name = CHAT_PARAMETERS.get(error.param or "")
    if not name:
        return error
    return APIError(error.status, error.message.replace(str(error.param), name), name, error.code, error.headers)
