"""Formats of tool calls, each in a file: `Format` in `<name>.py`, with vLLM's name where it has one of its own.

A model's format is the one that its chat template teaches, so a new file is all that a new format needs.
"""

from __future__ import annotations

import re
from dataclasses import replace

from retain.plugins import load_module, plugin_names
from retain.processing.template_text import read_template_text
from retain.server.tool_format import ToolFormat

NAME = r"[^<>\[\]\s{}\"]{0,24}"
MARKERS = tuple(  # what looks like one of calls, and what may be one of their results or of tools
    re.compile(rf"[<\[]{NAME}(?:{words}){NAME}[>\]]", re.IGNORECASE)
    for words in ("tool_?calls?|function_calls?|call|invoke|action", "tool|function")
)


def tool_format_names() -> list[str]:
    """Return the names of all formats in which models write tool calls."""
    return plugin_names(__name__)


def load_tool_format(name: str) -> type[ToolFormat]:
    """Return the class of a format. Raises ValueError for an unknown name."""
    tool_format: type[ToolFormat] = load_module(__name__, name, tool_format_names(), "tool format").Format
    return tool_format


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches; None where it teaches none that is known, or has no tools.

    Formats without markers are asked last: what they show may be a part of others.
    """
    if "tools" not in template:
        return None
    text = read_template_text(template)
    found = [load_tool_format(name).from_template(text) for name in tool_format_names()]
    known = min(filter(None, found), key=lambda tool_format: not tool_format.begin, default=None)
    return known and replace(known, shows_calls="tool_calls" in template)


def find_call_marker(template: str) -> str | None:
    """Return the marker of calls that a chat template writes, as far as it looks like one; None where nothing does."""
    text = read_template_text(template)
    found = next(filter(None, (marker.search(text) for marker in MARKERS)), None)
    return found[0] if found else None
