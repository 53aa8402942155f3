"""Formats of tool calls, each in a file of its own: `Format` in `<name>.py`, with vLLM's name of the format.

A model's format is the one that its chat template teaches, so a new file is all that a new format needs.
"""

from __future__ import annotations

from retain.plugins import load_module, plugin_names
from retain.server.tool_format import ToolFormat


def tool_format_names() -> list[str]:
    """Return the names of all formats."""
    return plugin_names(__name__)


def load_tool_format(name: str) -> type[ToolFormat]:
    """Return the class of a format. Raises ValueError for an unknown name."""
    tool_format: type[ToolFormat] = load_module(__name__, name, tool_format_names(), "tool format").Format
    return tool_format


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, or None if the template does not support tools.

    Formats without markers are asked last: theirs is any template that no other format knows.
    """
    if "tools" not in template:
        return None
    found = [load_tool_format(name).from_template(template) for name in tool_format_names()]
    return min(filter(None, found), key=lambda tool_format: not tool_format.begin, default=None)
