"""Tools and tool choices in requests of the Responses API.

The client runs functions, custom tools, those of namespaces, shells, patches and its own tool search. Hosted tools run
on OpenAI's servers; here they are left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from retain.server.client_fields import read_left_out_types
from retain.server.openai.protocol import Json
from retain.server.request_model import OTHER, ByType, LeftOutModel, StrictModel, TextOrOther, get_type, tag_type

HOSTED_TOOLS = read_left_out_types()["tools"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(StrictModel, other_fields="responses_tool"):
    """Function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class TextInputFormat(StrictModel):
    """Input of a custom tool that may be any text."""

    type: Literal["text"]


class GrammarInputFormat(StrictModel):
    """Text that follows a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


InputFormat = Annotated[
    TextInputFormat | GrammarInputFormat, ByType("input_format", "the type is one of text and grammar")
]


class CustomTool(StrictModel, other_fields="responses_tool"):
    """Tool whose input is a text. The model sees a function with one string, `input`."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: InputFormat | None = Field(
        None, description="A regex holds for forced calls; the model reads a Lark grammar in the tool's description"
    )


NamespacedTool = Annotated[
    FunctionTool | CustomTool, ByType("namespace_tool", "a namespace has tools of type function and custom")
]


class NamespaceTool(StrictModel):
    """Tools of one namespace, such as those of an MCP server. The model sees each as a function."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[NamespacedTool], Field(max_length=128)]


class LocalShellTool(StrictModel):
    """Shell of the client, for one command a call."""

    type: Literal["local_shell"]


class LocalEnvironment(StrictModel, other_fields="responses_environment"):
    """Shell that runs on the client's machine."""

    type: Literal["local"]


class ShellTool(StrictModel, other_fields="responses_tool"):
    """Shell of the client, for several commands a call."""

    type: Literal["shell"]
    environment: LocalEnvironment | None = None


class ApplyPatchTool(StrictModel, other_fields="responses_tool"):
    """Changes of files by the client."""

    type: Literal["apply_patch"]


class ToolSearchTool(StrictModel):
    """Search for more tools by the client, which adds those that it found to the conversation."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: Json | None = None


class HostedTool(LeftOutModel):
    """Tool that only OpenAI's servers run. It is left out, and the header `x-retain-warning` names it."""

    type: Annotated[str, Field(pattern="^[a-z0-9_]{1,64}$")]


def _is_hosted(tool: Json, kind: str | None) -> bool:
    """Return whether only OpenAI's servers run a tool of a request. Some types have a version behind their name."""
    if kind == "shell":
        return get_type(tool.get("environment"), "local") != "local"  # in a container
    if kind == "tool_search":
        return tool.get("execution") != "client"
    return kind is not None and (kind in HOSTED_TOOLS or kind.startswith(("web_search_", "computer_")))


def _tag_tool(value: Any) -> str | None:
    kind = get_type(value)
    is_hosted = _is_hosted(value, kind) if isinstance(value, dict) else isinstance(value, HostedTool)
    return OTHER if is_hosted else tag_type(kind)


Tool = Annotated[
    FunctionTool
    | CustomTool
    | NamespaceTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
    | ToolSearchTool
    | HostedTool,
    ByType(
        "tool_type",
        "the type is one of function, custom, namespace, local_shell, shell, apply_patch and tool_search",
        _tag_tool,
    ),
]


class NamedChoice(StrictModel):
    """Forces a call of one function or custom tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class KindChoice(StrictModel):
    """Forces a call of a tool that has no name of its own."""

    type: Literal["local_shell", "shell", "apply_patch"]


class AllowedTools(StrictModel):
    """Only these tools are shown to the model, as though the request had no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Json], Field(max_length=1024)]


ForcedChoice = Annotated[
    NamedChoice | KindChoice | AllowedTools,
    ByType(
        "tool_choice",
        "only a tool that the client runs can be forced: function, custom, local_shell, shell and apply_patch, or a "
        "choice of allowed_tools",
    ),
]
ToolChoice = TextOrOther[Literal["none", "auto", "required"], ForcedChoice]
