"""Hints in a request, in the envelope that vLLM, TensorRT-LLM and SGLang have (vLLM's pull request 53423).

They define no action; those here are `kv.retain`, `kv.release`, `kv.demote`, `kv.prefetch` and `kv.signal`, of version
1.x. Each is about the text of its request, answer included, and is carried out when that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from retain.engine.hints import ACTIONS, Hint
from retain.files import shorten
from retain.server.request_model import StrictModel

MAX_ACTIONS = 16
Name = Annotated[str, Field(min_length=1, max_length=256)]


class KvHintAction(StrictModel):
    """One thing that a cache is to do. Which actions there are is told in docs/guide/agents.md."""

    action_id: Name
    action_type: Name
    action_version: Name
    payload: dict[str, Any]


class KvHints(StrictModel):
    """Envelope of hints to the KV cache."""

    protocol_version: Literal["0.1"]
    message_id: Name
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS)]


def read_hints(envelope: KvHints | None, max_seconds: float) -> tuple[list[Hint], list[str]]:
    """Return the hints of an envelope, and warnings that name the actions which mean nothing here, each with why."""
    hints = []
    warnings = []
    for action in envelope.actions if envelope else ():
        try:
            hints.append(_read_action(action, max_seconds))
        except ValueError as error:
            warnings.append(f"kv_hints: action {shorten(ascii(action.action_id)[1:-1])} is left out: {error}")
    return hints, warnings


def _read_action(action: KvHintAction, max_seconds: float) -> Hint:
    name = action.action_type.removeprefix("kv.")
    if name not in ACTIONS or name == action.action_type:
        raise ValueError(f"its type is none of {', '.join(f'kv.{a}' for a in ACTIONS)}")
    if action.action_version.partition(".")[0] != "1":
        raise ValueError("its version is not 1.x")
    known = {"retain": ["duration_s"], "prefetch": ["resume_s"], "signal": ["resume_s", "tool"]}.get(name, [])
    if unknown := sorted(action.payload.keys() - set(known)):
        raise ValueError(f"its payload has {shorten(ascii(unknown[0])[1:-1])}, and may have {_join(known)}")
    seconds = None
    for field in known[:1]:
        if field in action.payload:
            seconds = _read_seconds(field, action.payload[field], max_seconds)
        elif name == "retain":
            raise ValueError(f"its payload lacks {field}")
    tool = action.payload.get("tool", "")
    if not isinstance(tool, str) or len(tool) > 256:
        raise ValueError("tool should be a name")
    return Hint(name, seconds, tool=tool or None)


def _read_seconds(field: str, value: Any, max_seconds: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= max_seconds:
        raise ValueError(f"{field} should be 0 to {max_seconds:g} seconds")
    return float(value)


def _join(names: Sequence[str]) -> str:
    return " and ".join(names) or "no field"
