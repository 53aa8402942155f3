"""The grammar that a chat completion demands of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from retain.processing import grammar
from retain.server.openai.chat_protocol import ChatCompletionRequest, JsonSchemaFormat, NamedToolChoice
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import Json
from retain.server.tool_format import ToolFormat


def build_grammar(body: ChatCompletionRequest, tools: Sequence[Json], tool_format: ToolFormat | None) -> str | None:
    """Return the grammar that tool_choice or response_format demands, or None for free text. Raises APIError.

    `tool_format` is that of the chat template; it is known where there are `tools`.
    """
    if tools and body.tool_choice not in (None, "auto"):
        functions = [t["function"] for t in tools]
        if isinstance(body.tool_choice, NamedToolChoice):
            name = body.tool_choice.function.name
            functions = [f for f in functions if f["name"] == name]
        if not functions:
            raise APIError(400, "tool_choice names an unknown tool", "tool_choice")
        assert tool_format
        return grammar.grammar_from_lark(tool_format.build_grammar(functions))
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else {"type": "object"}
    return grammar.grammar_from_json_schema(schema)
