"""The largest legal bodies of conversations: items of the Responses API, and blocks of the Messages API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retain.server.openai.body import MAX_DEPTH, MAX_ITEMS
from tests.helpers.largest_bodies import (
    MESSAGES,
    MODEL,
    NUM_TOOLS,
    SCHEMAS,
    TEXT,
    Json,
    Shape,
    add_sampling,
    message,
    nested,
    numbered,
    stop_strings,
    text,
    times,
)

OF_COMPLETIONS = ("long stop strings", "many stop strings", "many biases", "many choices")  # other APIs lack the fields
CONVERTED_SCHEMAS = ("long enum",)  # the others are tried as those of chat completions, which all become
DEEP = MAX_DEPTH - 12  # below the containers that surround a value


def response_item_lists() -> dict[str, Callable[[float], Any]]:
    """Return the shapes of the input of a response."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    search = {"type": "tool_search_call", "call_id": "c", "execution": "client"}
    return {
        "long text": text,
        "long text of quotes": lambda share: '"\\\n' * int(share * TEXT / 6),
        "many messages": lambda share: times(share, MAX_ITEMS, {"role": "user", "content": "x"}),
        "many system messages": lambda share: times(share, MAX_ITEMS, {"role": "system", "content": "x"}),
        "many parts": lambda share: message(times(share, MAX_ITEMS, {"type": "text", "text": "x"})),
        "many calls": lambda share: times(share, MAX_ITEMS, call),
        "calls and outputs": lambda share: (
            times(share / 2, MAX_ITEMS, call)
            + times(share / 2, MAX_ITEMS, {"type": "function_call_output", "call_id": "c", "output": "x" * 24})
        ),
        "many reasonings": lambda share: times(
            share, MAX_ITEMS, {"type": "reasoning", "content": [{"type": "text", "text": "x"}]}
        ),
        "long encrypted reasoning": lambda share: [
            {"type": "reasoning", "encrypted_content": "retain:" + "YWFh" * int(share * TEXT / 4)},
            *MESSAGES,
        ],
        "deep reasoning": lambda share: [
            {"type": "reasoning", "summary": times(share, MAX_ITEMS, nested(DEEP))},
            *MESSAGES,
        ],
        "deep arguments": lambda share: times(share, MAX_ITEMS, {**search, "arguments": nested(DEEP)}),
        "many shell commands": lambda share: [
            {"type": "shell_call", "call_id": "c", "action": {"commands": times(share, MAX_ITEMS, "x" * 48)}},
            *MESSAGES,
        ],
        "unknown items": lambda share: times(share, MAX_ITEMS, {"type": "web_search_call", "id": "x", "action": {}}),
        "deep unknown items": lambda share: times(share, MAX_ITEMS, {"type": "mcp_call", "output": nested(DEEP)}),
        "missing references": lambda share: times(share, MAX_ITEMS, {"type": "item_reference", "id": "x" * 24}),
        "additional tools": lambda share: [
            {
                "type": "additional_tools",
                "tools": numbered(share, NUM_TOOLS, lambda i: response_tool(i, 340)),
            },
            *MESSAGES,
        ],
        "many additional tools": lambda share: numbered(
            share, 1500, lambda i: {"type": "additional_tools", "tools": [response_tool(i, 100)]}
        ),
        "image": lambda share: message([{"type": "input_image", "image_url": "A" * int(share * TEXT)}]),
        "long type": lambda share: [{"type": text(share)}],
    }


def response_tool(i: int, size: int, parameters: Json | None = None) -> Json:
    """Return a function with a description of so many characters."""
    return {"type": "function", "name": f"f{i}", "description": "d" * size, "parameters": parameters or {}}


def response_shapes() -> dict[str, Shape]:
    """Return the shapes of responses, which are stored."""
    base = {**MODEL, "max_output_tokens": 2}
    asked = {**base, "input": "Hello"}
    shapes: dict[str, Shape] = {
        name: lambda share, create=create: {**base, "input": create(share)}  # type: ignore[misc]
        for name, create in response_item_lists().items()
    }
    shapes |= {
        f"schema with {name}": lambda share, create=create: {  # type: ignore[misc]
            **asked,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": create(share)}},
        }
        for name, create in SCHEMAS.items()
        if name in CONVERTED_SCHEMAS
    }
    return {
        **shapes,
        **add_sampling(asked, *OF_COMPLETIONS),
        "long instructions": lambda share: {**asked, "instructions": text(share)},
        "many tools": lambda share: {**asked, "tools": numbered(share, NUM_TOOLS, lambda i: response_tool(i, 340))},
        "deep tools": lambda share: {
            **asked,
            "tools": numbered(share, 350, lambda i: response_tool(i, 0, nested(DEEP))),
        },
        "namespaces": lambda share: {
            **asked,
            "tools": numbered(
                share,
                30,
                lambda i: {"type": "namespace", "name": f"n{i}", "tools": times(1, 100, response_tool(0, 60))},
            ),
        },
        "custom tools": lambda share: {
            **asked,
            "tools": numbered(
                share, NUM_TOOLS, lambda i: {"type": "custom", "name": f"f{i}", "description": "d" * 340}
            ),
        },
        "streamed with tools": lambda share: {
            **asked,
            "stream": True,
            "max_output_tokens": 100,
            "tools": numbered(share, NUM_TOOLS, lambda i: response_tool(i, 340)),
        },
    }


def block_lists() -> dict[str, Callable[[float], Any]]:
    """Return the shapes of messages in Anthropic's format."""
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "x"}

    def search_result(share: float) -> Json:
        content = times(share, MAX_ITEMS, {"type": "web_search_result", "title": "t", "url": "u", "content": ["x"]})
        return {"type": "web_search_tool_result", "content": content}

    return {
        "many messages": lambda share: times(share, MAX_ITEMS, {"role": "user", "content": "x"}),
        "many system messages": lambda share: times(share, MAX_ITEMS, {"role": "system", "content": "x"}),
        "many turns": lambda share: (
            times(share / 2, MAX_ITEMS, {"role": "user", "content": "x"})[:-1]
            + times(share / 2, MAX_ITEMS, {"role": "assistant", "content": "x"})
            + MESSAGES
        ),
        "many parts": lambda share: message(times(share, MAX_ITEMS, part)),
        "long text": lambda share: message(text(share)),
        "breakpoints": lambda share: message(times(share, MAX_ITEMS, {**part, **ephemeral})),
        "tool results": lambda share: message(
            times(share, MAX_ITEMS, {"type": "tool_result", "tool_use_id": "c", "content": "x"})
        ),
        "parts of a tool result": lambda share: message(
            [{"type": "tool_result", "tool_use_id": "c", "content": times(share, MAX_ITEMS, part)}]
        ),
        "tool calls": lambda share: [
            {
                "role": "assistant",
                "content": times(share, MAX_ITEMS, {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
            },
            *MESSAGES,
        ],
        "deep tool calls": lambda share: [
            {
                "role": "assistant",
                "content": times(share, MAX_ITEMS, {"type": "tool_use", "id": "c", "name": "f", "input": nested(DEEP)}),
            },
            *MESSAGES,
        ],
        "documents": lambda share: message(
            times(
                share,
                MAX_ITEMS,
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 16}},
            )
        ),
        "search results": lambda share: message([search_result(share)]),
        "deep results": lambda share: message(
            times(share, MAX_ITEMS, {"type": "mcp_tool_result", "content": nested(DEEP, is_list=True)})
        ),
        "thinking": lambda share: [
            {"role": "assistant", "content": times(share, MAX_ITEMS, {"type": "thinking", "thinking": "x" * 24})},
            *MESSAGES,
        ],
        "image": lambda share: message(
            [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "A" * int(share * TEXT)},
                }
            ]
        ),
        "long role": lambda share: message("x", text(share)),
        "long type": lambda share: message([{"type": text(share)}]),
    }


def message_shapes(**fields: Any) -> dict[str, Shape]:
    """Return the shapes of messages in Anthropic's format; `fields`: of every body, beside model and messages."""
    base = {**MODEL, **fields}
    asked = {**base, "messages": MESSAGES}
    shapes: dict[str, Shape] = {
        name: lambda share, create=create: {**base, "messages": create(share)}  # type: ignore[misc]
        for name, create in block_lists().items()
    }
    shapes |= {
        f"schema with {name}": lambda share, create=create: {  # type: ignore[misc]
            **asked,
            "output_config": {"format": {"type": "json_schema", "schema": create(share)}},
        }
        for name, create in SCHEMAS.items()
        if name in CONVERTED_SCHEMAS
    }
    if fields:
        shapes["long stop strings"] = lambda share: {
            **asked,
            "stop_sequences": stop_strings(share, TEXT)["stop"],
        }
    return {
        **shapes,
        **add_sampling(asked, *OF_COMPLETIONS),
        "system blocks": lambda share: {**asked, "system": times(share, MAX_ITEMS, {"type": "text", "text": "x"})},
        "many tools": lambda share: {**asked, "tools": numbered(share, NUM_TOOLS, lambda i: block_tool(i, 340))},
        "deep tools": lambda share: {
            **asked,
            "tools": numbered(share, 350, lambda i: block_tool(i, 0, nested(DEEP))),
        },
        "hosted tools": lambda share: {
            **asked,
            "tools": times(share, NUM_TOOLS, {"type": "web_search_20250305", "name": "web_search"}),
        },
        "servers of tools": lambda share: {**asked, "mcp_servers": times(share, MAX_ITEMS, {"name": "x" * 100})},
    }


def block_tool(i: int, size: int, schema: Json | None = None) -> Json:
    """Return a function with a description of so many characters."""
    return {"name": f"f{i}", "description": "d" * size, "input_schema": schema or {"type": "object"}}
