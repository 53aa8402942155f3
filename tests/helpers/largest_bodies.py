"""Bodies of each shape that a client may send, up to the largest that the bounds of a body allow.

A shape is a function of a share: 1 gives the largest legal body, 1/2 one of half as many items or characters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from retain.sampling_params import MAX_STOP_LENGTH
from retain.server.openai.body import MAX_DEPTH, MAX_ITEMS, MAX_KEYS, MAX_VALUES

Json = dict[str, Any]
Shape = Callable[[float], Json]

MAX_BODY_SIZE = 2**19  # of the server under test; bodies are a little smaller
TEXT = MAX_BODY_SIZE * 7 // 8  # characters of the longest text
NUM_TOOLS = 1024
NUM_STOPS = 8
NUM_BIASES = 512  # random:tiny has a vocabulary of 512
NUM_CHOICES = 16
LONG_TOKEN = 300
LONG_TOKEN_TEXT = "#" * 1280  # vocabularies have tokens of 80; a few of these stand for many
MODEL = {"model": "smollm2"}
MESSAGES = [{"role": "user", "content": "Hello"}]
PNG = "data:image/png;base64,"


def times(share: float, count: int, item: Any) -> list[Any]:
    """Return a share of `count` equal items, or of those that fit into a body."""
    count = min(count, TEXT // (len(orjson.dumps(item)) + 1))
    return [item] * max(1, int(share * count))


def numbered(share: float, count: int, create: Callable[[int], Any]) -> list[Any]:
    """Return a share of `count` items that are made from their numbers."""
    return [create(i) for i in range(max(1, int(share * count)))]


def text(share: float, size: int = TEXT) -> str:
    """Return a share of a text of `size` characters."""
    return "a b " * (max(4, int(share * size)) // 4)


def nested(depth: int, is_list: bool = False) -> Any:
    """Return objects or lists in each other."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


def object_schema(share: float, num_properties: int = MAX_KEYS) -> Json:
    """Return the schema of an object with many members."""
    properties = {f"p{i}": {"type": "integer"} for i in range(max(1, int(share * num_properties)))}
    return {"type": "object", "properties": properties, "required": [*properties]}


def nested_schema(share: float) -> Json:
    """Return a schema as deep as a body may be, in each of its members."""
    deep: Json = {"type": "integer"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    return {"type": "object", "properties": {f"p{i}": deep for i in range(max(1, int(share * 200)))}}


SCHEMAS: dict[str, Callable[[float], Json]] = {
    "many members": object_schema,
    "long enum": lambda share: {"enum": numbered(share, MAX_ITEMS - 1, lambda i: f"value {i}")},
    "deep members": nested_schema,
    "many references": lambda share: {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(int(share * 4000))}
        | {f"d{int(share * 4000)}": {"type": "integer"}},
        "$ref": "#/$defs/d0",
    },
}


def stop_strings(share: float, num_characters: int) -> Json:
    """Return stop strings of so many characters together, and an answer that long looks like each of them."""
    length = int(share * num_characters) // NUM_STOPS
    return {
        "stop": [f"{'#' * (length - 1)}{i:x}" for i in range(NUM_STOPS)],
        "logit_bias": {str(LONG_TOKEN): max(1, int(share * 100))},
        "frequency_penalty": 2,  # after half as many tokens as the bias is, another one follows
        "temperature": 0,
        "max_tokens": max(4, int(share * 64)),
        "n": 4,
    }


# ---- fields that several endpoints have ------------------------------------------------------------------------------

SAMPLING: dict[str, Shape] = {
    "long stop strings": lambda share: stop_strings(share, TEXT),
    "many stop strings": lambda share: stop_strings(share, MAX_STOP_LENGTH),
    "many biases": lambda share: {
        "logit_bias": {str(i): -0.5 for i in range(max(1, int(share * NUM_BIASES)))},
        "max_tokens": 64,
        "n": NUM_CHOICES,
    },
    "many choices": lambda share: {
        "n": max(1, int(share * NUM_CHOICES)),
        "max_tokens": 64,
        "frequency_penalty": 0.1,
        "seed": 2**63 - 1,
    },
    "long model name": lambda share: {"model": text(share)},
    "unknown fields": lambda share: {f"x{i}": i for i in range(int(share * (MAX_KEYS - 8)))},
    "long field name": lambda share: {text(share): 1},
    "long policy": lambda share: {"kv_policy": "h2o:" + ",".join(times(share, TEXT // 10, "budget=50"))},
    "long user": lambda share: {"user": text(share)},
    "metadata": lambda share: {"metadata": {f"k{i}": "v" * int(share * 512) for i in range(16)}},
}


def add_sampling(base: Json, *without: str) -> dict[str, Shape]:
    """Return the shapes of common fields beside the fields that a request needs."""
    shapes = {name: shape for name, shape in SAMPLING.items() if name not in without}
    return {
        name: lambda share, shape=shape: {**base, **shape(share)}  # type: ignore[misc]
        for name, shape in shapes.items()
    }


def message(content: Any, role: str = "user") -> list[Json]:
    """Return a conversation of one message."""
    return [{"role": role, "content": content}]


def chat_tool(i: int, size: int, parameters: Json | None = None) -> Json:
    """Return a function with a description of so many characters."""
    function = {"name": f"f{i}", "description": "d" * size, "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def chat_shapes(**fields: Any) -> dict[str, Shape]:
    """Return the shapes of chat completions; `fields`: of every body."""
    base = {**MODEL, "max_tokens": 2, **fields}
    asked = {**base, "messages": MESSAGES}
    conversations: dict[str, Callable[[float], Any]] = {
        "many messages": lambda share: times(share, MAX_ITEMS, {"role": "user", "content": "x"}),
        "many system messages": lambda share: times(share, MAX_ITEMS, {"role": "system", "content": "x"}),
        "many parts": lambda share: message(times(share, MAX_ITEMS, {"type": "text", "text": "x"})),
        "long text": lambda share: message(text(share)),
        "long text of quotes": lambda share: message('"\\\n' * int(share * TEXT / 6)),
        "many tool calls": lambda share: [
            {
                "role": "assistant",
                "tool_calls": times(share, MAX_ITEMS, {"id": "c", "function": {"name": "f", "arguments": "{}"}}),
            },
            *MESSAGES,
        ],
        "long reasoning": lambda share: [
            {"role": "assistant", "content": "x", "reasoning_content": text(share)},
            *MESSAGES,
        ],
        "image": lambda share: message([{"type": "image_url", "image_url": {"url": PNG + "A" * int(share * TEXT)}}]),
        "many images": lambda share: message(
            times(share, MAX_ITEMS, {"type": "image_url", "image_url": {"url": f"{PNG}AAAA"}})
        ),
        "audio": lambda share: message(
            [{"type": "input_audio", "input_audio": {"data": "A" * int(share * TEXT), "format": "wav"}}]
        ),
        "long role": lambda share: message("x", text(share)),
        "deep content": lambda share: message(times(share, MAX_ITEMS, nested(MAX_DEPTH - 10, is_list=True))),
    }
    shapes: dict[str, Shape] = {
        name: lambda share, create=create: {**base, "messages": create(share)}  # type: ignore[misc]
        for name, create in conversations.items()
    }
    shapes |= {
        f"schema with {name}": lambda share, create=create: {  # type: ignore[misc]
            **asked,
            "response_format": {"type": "json_schema", "json_schema": {"schema": create(share)}},
        }
        for name, create in SCHEMAS.items()
    }
    return {
        **shapes,
        **add_sampling(asked),
        "many tools": lambda share: {**asked, "tools": numbered(share, NUM_TOOLS, lambda i: chat_tool(i, 340))},
        "deep tools": lambda share: {
            **asked,
            "tools": numbered(share, 350, lambda i: chat_tool(i, 0, nested(MAX_DEPTH - 10))),
        },
        "required tool of many": lambda share: {
            **asked,
            "tools": numbered(share, NUM_TOOLS, lambda i: chat_tool(i, 0, object_schema(1, 5))),
            "tool_choice": "required",
        },
        "variables": lambda share: {
            **asked,
            "chat_template_kwargs": {f"v{i}": times(share, 200, nested(20)) for i in range(20)},
        },
        "continued message": lambda share: {
            **base,
            "messages": message(text(share), "assistant"),
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "many logprobs": lambda share: {
            **asked,
            "logprobs": True,
            "top_logprobs": 20,
            "n": NUM_CHOICES,
            "max_tokens": max(1, int(share * 32)),
        },
    }


def completion_shapes() -> dict[str, Shape]:
    """Return the shapes of completions."""
    base = {**MODEL, "max_tokens": 2}
    prompts: dict[str, Callable[[float], Any]] = {
        "long text": text,
        "many prompts": lambda share: times(share, MAX_ITEMS, "x" * 24),
        "long prompts": lambda share: times(1, NUM_CHOICES, "x" * int(share * 2000)),
        "most token ids": lambda share: times(share, MAX_VALUES, 7),
        "many lists of token ids": lambda share: times(share, MAX_ITEMS, [7] * 12),
        "long lists of token ids": lambda share: [times(share / NUM_CHOICES, MAX_VALUES, 7)] * NUM_CHOICES,
        "deep prompt": lambda share: times(share, MAX_ITEMS, nested(MAX_DEPTH - 10, is_list=True)),
    }
    shapes: dict[str, Shape] = {
        name: lambda share, create=create: {**base, "prompt": create(share)}  # type: ignore[misc]
        for name, create in prompts.items()
    }
    return {
        **shapes,
        **add_sampling({**base, "prompt": "Hello"}),
        "echoed prompts": lambda share: {
            **base,
            "prompt": times(1, 4, "x" * int(share * 500)),
            "echo": True,
            "logprobs": 20,
        },
    }


def tokenize_shapes() -> dict[str, Shape]:
    """Return the shapes of texts and conversations to tokenize."""
    return {
        "long text": lambda share: {**MODEL, "prompt": text(share)},
        "many messages": lambda share: {
            **MODEL,
            "messages": times(share, MAX_ITEMS, {"role": "user", "content": "x"}),
        },
        "many parts": lambda share: {
            **MODEL,
            "messages": message(times(share, MAX_ITEMS, {"type": "text", "text": "x"})),
        },
    }


def detokenize_shapes() -> dict[str, Shape]:
    """Return the shapes of lists of token ids."""
    return {
        "most token ids": lambda share: {**MODEL, "tokens": times(share, MAX_VALUES, 7)},
        "largest token ids": lambda share: {**MODEL, "tokens": times(share, MAX_VALUES, 2**31 - 1)},
        "negative token ids": lambda share: {**MODEL, "tokens": times(share, MAX_VALUES, -1)},
    }


def pooled_shapes(one: str, many: str) -> dict[str, Shape]:
    """Return bodies of texts that are pooled: `one` is the field of a single text, `many` that of a list."""
    base = {"model": "smollm2"} if one == many else {"model": "smollm2", one: "a"}
    return {
        "most texts": lambda share: {**base, many: numbered(share, 2048, lambda i: f"text {i}")},
        "long text": lambda share: {**base, one: text(share), many: text(share) if one == many else ["a"]},
    }
