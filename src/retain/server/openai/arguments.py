"""Arguments of calls by the model: JSON that only its client may check, and that the server must be able to send on."""

from __future__ import annotations

from typing import Any

import orjson

from retain.server.openai.body import find_excess


def parse_arguments(text: str) -> Any:
    """Return the JSON value of a call's arguments. Raises ValueError for text that is none, or of no body's bounds.

    Python's own parser returns values that the JSON writer refuses: large integers, halves of surrogate pairs, NaN, and
    lists and objects nested a thousand deep.
    """
    value = orjson.loads(text)
    if problem := find_excess(value):
        raise ValueError(problem)
    return value
