"""The header that says what of a request was left out. Clients refuse long headers, so its length is bounded.

A header holds no text of every language, so names are in ASCII with escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from retain.files import shorten

WARNING_HEADER = "x-retain-warning"
MAX_NAMES = 16
MAX_NAME_LENGTH = 64


def warn_of(kind: str, left_out: Iterable[str]) -> list[str]:
    """Return a warning with the distinct names of what was left out, or none if nothing was."""
    names = [shorten(ascii(name)[1:-1], MAX_NAME_LENGTH) for name in dict.fromkeys(left_out)]
    if len(names) > MAX_NAMES:
        names = [*names[:MAX_NAMES], f"and {len(names) - MAX_NAMES} more"]
    return [f"{kind} left out: {', '.join(names)}"] if names else []


def add_warnings(headers: Mapping[str, str], warnings: Sequence[str]) -> dict[str, str]:
    """Return headers of a response with further warnings."""
    known = [headers[WARNING_HEADER]] if WARNING_HEADER in headers else []
    return {**headers, **build_warning_header([*known, *warnings])}


def build_warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header of these warnings; none without a warning."""
    return {WARNING_HEADER: "; ".join(warnings)} if warnings else {}
