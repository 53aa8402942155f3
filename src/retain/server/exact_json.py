"""JSON with integers of any size, read and written as they are.

orjson reads an integer beyond 64 bits as a float, which has other digits, and refuses to write it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

LONG_INTEGER = re.compile(rb"[0-9]{19}")  # what may be beyond 64 bits
INT64 = range(-(2**63), 2**64)  # what orjson writes


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON text, as orjson accepts it. Raises orjson.JSONDecodeError, a ValueError."""
    value = orjson.loads(data)
    if not LONG_INTEGER.search(data):
        return value
    try:
        return json.loads(bytes(data))
    except RecursionError:  # deeper than any bound allows
        return value


def write_json(value: Any) -> bytes:
    """Return the JSON text of a value, which may hold fragments of orjson. Raises TypeError, as orjson."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_with_fragments(value))


def _with_fragments(value: Any) -> Any:
    """Return a value with a fragment in place of each integer that orjson would refuse."""
    if isinstance(value, dict):
        return {key: _with_fragments(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_fragments(item) for item in value]
    return orjson.Fragment(str(value)) if type(value) is int and value not in INT64 else value
