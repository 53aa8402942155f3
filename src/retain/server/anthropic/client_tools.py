"""Tools that clients run, and that Anthropic's models know by their type: their inputs as the documentation has them.

Source: the pages on the bash, text editor and memory tools at https://platform.claude.com/docs/en/agents-and-tools.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

Json = dict[str, Any]

TEXT = {"type": "string"}
LINE = {"type": "integer"}
PATH = {"type": "string", "description": "Absolute path of a file or folder"}
LINES = {"type": "array", "items": LINE, "description": "Of view: the first and the last line, from 1; -1 is the end"}
EDITING: Json = {
    "path": PATH,
    "file_text": {**TEXT, "description": "Of create: the whole text of the file"},
    "old_str": {**TEXT, "description": "Of str_replace: the text to replace, which occurs once in the file"},
    "new_str": {**TEXT, "description": "Of str_replace: the text in its place"},
    "insert_line": {**LINE, "description": "Of insert: the line after which to insert; 0 is the file's start"},
    "insert_text": {**TEXT, "description": "Of insert: the text to insert"},
    "view_range": LINES,
}
EDIT_COMMANDS = ("view", "create", "str_replace", "insert")
MOVING: Json = {
    "old_path": {**TEXT, "description": "Of rename: the present path"},
    "new_path": {**TEXT, "description": "Of rename: the new path"},
}


def describe_client_tool(kind: str) -> Json | None:
    """Return the function that a tool of this type is, {"name", "description", "parameters"}; None: another tool."""
    family, _, version = kind.rpartition("_")
    if not re.fullmatch(r"\d{8}", version):
        return None
    if family == "bash":
        properties = {
            "command": {**TEXT, "description": "The command, unless the shell is restarted"},
            "restart": {"type": "boolean", "description": "Whether to restart the shell"},
        }
        return _function("bash", "Run a command in a shell that keeps its state between calls.", properties, ())
    if family == "text_editor":
        return _describe_editor(version)
    if family == "memory":
        description = "Read and change files below /memories, which outlive the conversation."
        commands = (*EDIT_COMMANDS, "delete", "rename")
        return _function("memory", description, {"command": _command(commands), **EDITING, **MOVING}, ("command",))
    return None


def _describe_editor(version: str) -> Json:
    """Describe the editor of files. Its first versions undo edits and insert `new_str`."""
    description = "View, create and edit text files."
    if version < "20250429":
        properties = {name: schema for name, schema in EDITING.items() if name != "insert_text"}
        properties["new_str"] = {**TEXT, "description": "Of str_replace: the text in its place; of insert: the text"}
        command = _command((*EDIT_COMMANDS, "undo_edit"))
        return _function("str_replace_editor", description, {"command": command, **properties}, ("command", "path"))
    properties = {"command": _command(EDIT_COMMANDS), **EDITING}
    return _function("str_replace_based_edit_tool", description, properties, ("command", "path"))


def _command(names: Sequence[str]) -> Json:
    return {"type": "string", "enum": list(names)}


def _function(name: str, description: str, properties: Json, required: Sequence[str]) -> Json:
    parameters: Json = {"type": "object", "properties": deepcopy(properties)}
    if required:
        parameters["required"] = list(required)
    return {"name": name, "description": description, "parameters": parameters}
