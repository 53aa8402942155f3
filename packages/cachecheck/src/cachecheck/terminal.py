"""Text of others, such as answers and errors of servers, as a terminal and XML may have it."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1, what directs a line or ends it, and halves of characters, which cannot be written.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Return a text whose control characters are visible, as `\x1b`. Tabs and newlines stay."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
