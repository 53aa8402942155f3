"""Tags of pydantic unions in requests, chosen so that an error names only the field.

Tags are written in angle brackets, because error messages leave such parts out of a field's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_type(value: Any, default: str | None = None) -> str | None:
    """Return the `type` of an object of a request, JSON or validated; None if it is no text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kind = default if kind is None else kind
    return kind if isinstance(kind, str) else None


def tag_by_type(default: str | None = None) -> Callable[[Any], str | None]:
    """Return a function that selects the member of a union by the value's `type`."""

    def get_tag(value: Any) -> str | None:
        kind = get_type(value, default)
        return None if kind is None else f"<{kind}>"

    return get_tag


def tag_text_or_list(value: Any) -> str:
    """Select the text or the list of a union of both."""
    return "<text>" if isinstance(value, str) else "<list>"
