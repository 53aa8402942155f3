"""Tools of requests in Anthropic's format: functions, and tools that Anthropic's API knows by their type.

Of those, the ones that the client runs become functions with the documented input; the others are left out.
"""

from __future__ import annotations

import re
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from retain.files import quote
from retain.server.anthropic.blocks import CacheableBlock
from retain.server.openai.protocol import Json
from retain.server.request_model import get_type

# What needs the servers of Anthropic, or pictures of a screen. The date of a type is its version.
HOSTED_TOOLS = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool\w*?|mcp_toolset|computer|\w+_toolset)(_\d{8})?",
    re.ASCII,
)
CLIENT_TOOLS = re.compile(r"(bash|text_editor|memory)_(\d{8})")
INSERT_TEXT_SINCE = "20250429"  # the version of the editor whose command `insert` has a text of its own


class Tool(CacheableBlock, other_fields="messages_tool"):
    """Function that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]

    def to_function(self) -> Json:
        """Return the tool as a function of chat completions."""
        function: Json = {"name": self.name, "parameters": self.input_schema}
        return function if self.description is None else function | {"description": self.description}


class TypedTool(CacheableBlock, extra="ignore"):
    """Tool whose input follows from its type. Its options are for whoever runs it."""

    type: str
    name: str | None = None

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str) -> str:
        if HOSTED_TOOLS.fullmatch(kind) or describe_client_tool(kind):
            return kind
        raise ValueError(f"{quote(kind)} is not supported here: functions have the type custom")

    def to_function(self) -> Json | None:
        """Return the tool as a function of chat completions; None: it cannot be called here."""
        return describe_client_tool(self.type)

    @property
    def kind(self) -> str:
        """The type without its version."""
        found = HOSTED_TOOLS.fullmatch(self.type)
        return found[1] if found else self.type


def describe_client_tool(kind: str) -> Json | None:
    """Return the function that a tool of this type is, {"name", "description", "parameters"}; None: another tool."""
    found = CLIENT_TOOLS.fullmatch(kind)
    if not found:
        return None
    family, version = found.groups()
    is_first = family == "text_editor" and version < INSERT_TEXT_SINCE
    return deepcopy(_read_client_tools()["first_text_editor" if is_first else family])


@cache
def _read_client_tools() -> dict[str, Json]:
    with Path(__file__).with_name("client_tools.toml").open("rb") as file:
        return tomllib.load(file)


def _tool_kind(tool: Any) -> str:
    return "<function>" if get_type(tool, "custom") == "custom" else "<typed>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[TypedTool, Tag("<typed>")], Discriminator(_tool_kind)
]
