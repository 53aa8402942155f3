"""The tools of a request as functions that the model may call, and the model's calls as items that the client expects.

A custom tool is a function with one string. A tool of a namespace has both names. Shells, patches and searches are the
functions of client_tools.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from retain.server.openai.body import parse_arguments
from retain.server.openai.chat_protocol import FunctionDefinition, ToolParam
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import Json
from retain.server.openai.responses.calls import LocalShellAction, PatchOperation, ShellAction, join_namespace
from retain.server.openai.responses.tools import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    GrammarInputFormat,
    HostedTool,
    KindChoice,
    NamedChoice,
    NamespaceTool,
    Tool,
    ToolSearchTool,
)
from retain.server.tool_format import ParsedToolCall

MAX_FUNCTIONS = 1024
MAX_NAME_LENGTH = 128


def _read_functions() -> dict[str, FunctionDefinition]:
    """Return the functions of tools that have no name of their own, by the tools' types."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return {kind: FunctionDefinition(name=kind, **fields) for kind, fields in tomllib.load(file).items()}


FUNCTIONS_BY_TYPE = _read_functions()


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs. `kind` is its type; the model sees `function`."""

    kind: str
    name: str
    function: FunctionDefinition
    namespace: str | None = None

    def to_item(self, arguments: str) -> Json:
        """Return the item of a call, without ids. Arguments that the tool cannot have make a function call."""
        if self.kind == "custom":
            return {"type": "custom_tool_call", **self._names, "input": _find_input(arguments)}
        if self.kind == "tool_search":
            return {"type": "tool_search_call", "execution": "client", "arguments": _parse_object(arguments)}
        if self.kind != "function" and (fields := _to_built_in_call(self.kind, arguments)):
            return {"type": f"{self.kind}_call", **fields}
        return {"type": "function_call", **self._names, "arguments": arguments}

    @property
    def _names(self) -> Json:
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}


class ClientTools:
    """The tools of a request, by their functions' names. `left_out`: types of tools that the server cannot run."""

    def __init__(self, tools: Iterable[ClientTool] = (), left_out: Sequence[str] = ()):
        """Raises APIError if two tools have the same name for the model, or if there are too many."""
        self.left_out = left_out
        self._by_name: dict[str, ClientTool] = {}
        for tool in tools:
            name = tool.function.name
            if self._by_name.setdefault(name, tool) != tool:
                raise APIError(400, f"tools: two tools have the name {name}", "tools")
        if len(self._by_name) > MAX_FUNCTIONS:
            raise APIError(400, f"tools: at most {MAX_FUNCTIONS} functions, with those of namespaces", "tools")

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def to_params(self) -> list[ToolParam] | None:
        """Return the tools of a chat completion, or None if there are none."""
        return [ToolParam(type="function", function=tool.function) for tool in self._by_name.values()] or None

    @property
    def names(self) -> list[str]:
        """The names of the functions that the model may call."""
        return list(self._by_name)

    def to_item(self, call: ParsedToolCall) -> Json:
        """Return the item of a call by the model, without ids."""
        return self._by_name[call.name].to_item(call.arguments)

    def find(self, choice: NamedChoice | KindChoice) -> ClientTool:
        """Return the tool that a choice names. Raises APIError if there is none, or more than one."""
        found = [tool for tool in self._by_name.values() if _matches(choice, tool)]
        if len(found) > 1:
            found = [tool for tool in found if not tool.namespace] or found
        if len(found) != 1:
            problem = "an unknown tool" if not found else "a tool that several namespaces have"
            raise APIError(400, f"tool_choice names {problem}", "tool_choice")
        return found[0]

    def select(self, allowed: AllowedTools) -> ClientTools:
        """Return only the allowed tools."""
        choices = [_to_choice(one) for one in allowed.tools]
        tools = [t for t in self._by_name.values() if any(choice and _matches(choice, t) for choice in choices)]
        return ClientTools(tools, self.left_out)


def expand_tools(tools: Iterable[Tool], added: Iterable[Tool] = ()) -> ClientTools:
    """Return the tools that the client runs, those of namespaces too. Raises APIError.

    `added`: by the conversation. Searches find tools again, so those that are known already change nothing.
    """
    expanded, left_out = _expand(tools)
    known = {tool.function.name: tool for tool in expanded}
    found, more_left_out = _expand(added)
    for tool in found:
        known.setdefault(tool.function.name, tool)
    return ClientTools([*expanded, *known.values()], list(dict.fromkeys([*left_out, *more_left_out])))


def _expand(tools: Iterable[Tool]) -> tuple[list[ClientTool], list[str]]:
    """Return the tools that the client runs, and the types of the others."""
    found: list[ClientTool] = []
    left_out: list[str] = []
    for tool in tools:
        if isinstance(tool, HostedTool):
            left_out.append(tool.type)
        elif isinstance(tool, NamespaceTool):
            found += _expand_namespace(tool)
        elif isinstance(tool, FunctionTool | CustomTool):
            found.append(_to_client_tool(tool))
        elif isinstance(tool, ToolSearchTool):
            function = FUNCTIONS_BY_TYPE[tool.type]
            given = {"description": tool.description, "parameters": tool.parameters or function.parameters}
            found.append(ClientTool(tool.type, tool.type, function.model_copy(update=given)))
        else:
            found.append(ClientTool(tool.type, tool.type, FUNCTIONS_BY_TYPE[tool.type]))
    return found, left_out


def _expand_namespace(namespace: NamespaceTool) -> list[ClientTool]:
    """Return a namespace's tools. The first has the description of the namespace in front of its own."""
    found = []
    about = namespace.description
    for tool in namespace.tools:
        if about:
            tool = tool.model_copy(update={"description": "\n\n".join(filter(None, [about, tool.description]))})
        found.append(_to_client_tool(tool, namespace.name))
        about = None
    return found


def _to_client_tool(tool: FunctionTool | CustomTool, namespace: str | None = None) -> ClientTool:
    name = join_namespace(namespace, tool.name)
    if len(name) > MAX_NAME_LENGTH:
        raise APIError(400, f"tools: {name[:40]}... has more than {MAX_NAME_LENGTH} characters", "tools")
    if isinstance(tool, FunctionTool):
        function = FunctionDefinition(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        return ClientTool("function", tool.name, function, namespace)
    text: Json = {"type": "string", "description": "The whole input of the tool"}
    description = tool.description
    if isinstance(tool.format, GrammarInputFormat):
        # JSON escapes the text, so only a regex, which JSON schemas know, can hold for it.
        if tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        else:
            rule = f"The input follows this Lark grammar:\n{tool.format.definition}"
            description = "\n\n".join(filter(None, [description, rule]))
    parameters: Json = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    parameters["additionalProperties"] = False
    function = FunctionDefinition(name=name, description=description, parameters=parameters)
    return ClientTool("custom", tool.name, function, namespace)


def _find_input(arguments: str) -> str:
    """Return the text of a custom tool's call. Models that name it differently are understood."""
    parsed = _parse_object(arguments)
    if isinstance(text := parsed.get("input"), str):
        return text
    texts = [value for value in parsed.values() if isinstance(value, str)]
    return texts[0] if len(texts) == len(parsed) == 1 else arguments


def _to_built_in_call(kind: str, arguments: str) -> Json | None:
    """Return the fields of a call of a shell or a patch, or None if the arguments are not valid.

    Fields that the model left out are absent: the AI SDK refuses null.
    """
    parsed = _parse_object(arguments)
    try:
        if kind == "local_shell":
            if isinstance(command := parsed.get("command"), str):
                parsed["command"] = ["bash", "-lc", command]
            action = LocalShellAction(**{**parsed, "type": "exec"})
            return {"action": {"env": {}, **action.model_dump(exclude_none=True)}}
        if kind == "shell":
            return {"action": ShellAction(**parsed).model_dump(exclude_none=True)}
        operation = PatchOperation(**parsed)
        if operation.diff is None and operation.type != "delete_file":
            return None
        return {"operation": operation.model_dump(exclude_none=True)}
    except (ValidationError, TypeError):
        return None


def _parse_object(text: str) -> Json:
    try:
        value = parse_arguments(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _to_choice(tool: Json) -> NamedChoice | KindChoice | None:
    """Return the choice of a tool among the allowed ones, or None if the server cannot run it."""
    for model in (NamedChoice, KindChoice):
        try:
            return model.model_validate(tool)
        except ValidationError:
            continue
    return None


def _matches(choice: NamedChoice | KindChoice, tool: ClientTool) -> bool:
    if tool.kind != choice.type:
        return False
    if isinstance(choice, KindChoice):
        return True
    if choice.namespace is not None:
        return (tool.namespace, tool.name) == (choice.namespace, choice.name)
    return choice.name in (tool.name, tool.function.name)
