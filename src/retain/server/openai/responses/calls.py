"""Contents of items, and input items about tool calls: those of the model, and the outputs that the client sends.

The model sees every call as one of a function, with JSON arguments.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from retain.server.openai.chat_protocol import RefusalContentPart
from retain.server.openai.protocol import Json
from retain.server.request_model import ByType, StrictModel, TextOr


class InputText(StrictModel, other_fields="responses_input_text"):
    """Text of a user, a system message or a tool's output."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(StrictModel, other_fields="responses_output_text"):
    """Text of the model."""

    type: Literal["output_text"]
    text: str


ContentPart = Annotated[
    InputText | OutputText | RefusalContentPart,
    ByType("content_type", "only input_text, output_text and refusal are supported: no images, files or audio"),
]
Content = TextOr[Annotated[list[ContentPart], Field(fail_fast=True)]]


def join_content(content: str | list[InputText | OutputText | RefusalContentPart]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Item(StrictModel, other_fields="responses_item"):
    """Base of items. Clients send back what they were given, so ids have any length."""

    id: str | None = None
    status: str | None = None


class BaseCallItem(Item):
    """Base of calls by the model."""

    type: str
    call_id: str

    @property
    def function_name(self) -> str:
        """The name of the function as the model sees it."""
        return self.type.removesuffix("_call")

    @property
    def function_arguments(self) -> str:
        """The arguments as the model sees them, JSON."""
        return json.dumps(self.arguments_json, ensure_ascii=False)

    @property
    def arguments_json(self) -> Json:
        """The arguments of the call as a JSON object, as the model sees them."""
        raise NotImplementedError


class NamedCallItem(BaseCallItem):
    """Base of calls of tools that the client named."""

    name: str
    namespace: str | None = None

    @property
    def function_name(self) -> str:
        """The name of the function as the model sees it."""
        return join_namespace(self.namespace, self.name)


class FunctionCallItem(NamedCallItem):
    """Function call by the model."""

    type: Literal["function_call"]
    arguments: str

    @property
    def function_arguments(self) -> str:
        """The arguments as the model wrote them."""
        return self.arguments


class CustomToolCallItem(NamedCallItem):
    """Call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    input: str

    @property
    def arguments_json(self) -> Json:
        """Return the tool's text input as the only argument, `input`."""
        return {"input": self.input}


class LocalShellAction(StrictModel):
    """A command with its arguments."""

    type: Literal["exec"]
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class LocalShellCallItem(BaseCallItem):
    """Call of the client's shell."""

    type: Literal["local_shell_call"]
    action: LocalShellAction

    @property
    def arguments_json(self) -> Json:
        """Return the command and its settings as arguments; what is not given or empty is left out."""
        fields = self.action.model_dump(exclude_none=True, exclude={"type"})
        return {name: value for name, value in fields.items() if value != {}}


class ShellAction(StrictModel):
    """Shell commands that the model wants to run, and their limits."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallItem(BaseCallItem, other_fields="responses_shell_call"):
    """Call of the client's shell with several commands."""

    type: Literal["shell_call"]
    action: ShellAction

    @property
    def arguments_json(self) -> Json:
        """Return the commands and their limits as arguments; limits that are not given are left out."""
        return self.action.model_dump(exclude_none=True)


class PatchOperation(StrictModel):
    """A change of one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(BaseCallItem):
    """Change of a file by the model."""

    type: Literal["apply_patch_call"]
    operation: PatchOperation

    @property
    def arguments_json(self) -> Json:
        """Return the change of the file as arguments: its type, the path and the diff."""
        return self.operation.model_dump(exclude_none=True)


class ToolSearchCallItem(BaseCallItem):
    """Search for more tools by the model, for the client to run."""

    type: Literal["tool_search_call"]
    execution: Literal["client"]
    arguments: Json

    @property
    def arguments_json(self) -> Json:
        """Return the arguments of the search as the client sent them."""
        return self.arguments


CallItem = (
    FunctionCallItem | CustomToolCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem | ToolSearchCallItem
)


class CallOutputItem(Item, other_fields="responses_output_item"):
    """Result of a function call or of a call of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content

    @property
    def text(self) -> str:
        """The result as the model sees it."""
        return join_content(self.output)


class LocalShellCallOutputItem(Item):
    """Result of a call of the client's shell. Its id is that of the call, unless it has a call_id."""

    type: Literal["local_shell_call_output"]
    call_id: str | None = None
    output: str

    @property
    def text(self) -> str:
        """The result as the model sees it."""
        return self.output


class ExitOutcome(StrictModel):
    """A shell command ended by itself."""

    type: Literal["exit"]
    exit_code: int


class TimeoutOutcome(StrictModel):
    """A command took too long."""

    type: Literal["timeout"]


class CommandOutput(StrictModel, other_fields="responses_command_output"):
    """What a command wrote, and how it ended."""

    stdout: str
    stderr: str
    outcome: Annotated[ExitOutcome | TimeoutOutcome, ByType("outcome", "the type is one of exit and timeout")]


class ShellCallOutputItem(Item, other_fields="responses_output_item"):
    """Results of the commands of a shell call."""

    type: Literal["shell_call_output"]
    call_id: str
    output: Annotated[list[CommandOutput], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The results as the model sees them, JSON."""
        return json.dumps([one.model_dump() for one in self.output], ensure_ascii=False)


class ApplyPatchCallOutputItem(Item, other_fields="responses_output_item"):
    """Result of a change of a file."""

    type: Literal["apply_patch_call_output"]
    call_id: str
    output: str | None = None

    @property
    def text(self) -> str:
        """The result as the model sees it."""
        return self.output if self.output is not None else self.status or ""


OutputItem = CallOutputItem | LocalShellCallOutputItem | ShellCallOutputItem | ApplyPatchCallOutputItem


def join_namespace(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it: behind its namespace, as MCP clients write it."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
