"""Prefix misses for the inspector: the newest prompts that began with less than they could have."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any

from retain.engine.request import Request
from retain.kv.prefix.diagnosis import PrefixDiagnosis
from retain.processing.prefix_report import NO_MISS, build_report
from retain.processing.tokenizer import Tokenizer

MAX_MISSES = 32


@dataclass
class PrefixMiss:
    """A prompt that was computed in part although more of it could have been cached."""

    request_id: int
    key_name: str
    diagnosis: PrefixDiagnosis
    tokenizer: Tokenizer
    time: float = field(default_factory=time)  # seconds since 1970

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The diagnosis in words, built when somebody looks."""
        return {
            "id": self.request_id,
            "time": self.time,
            **build_report(self.diagnosis, self.tokenizer).to_json(),
        }


class PrefixMisses:
    """The last MAX_MISSES of all keys. A client sees those of its own key."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._misses: deque[PrefixMiss] = deque(maxlen=MAX_MISSES)

    def record(self, request: Request, key_name: str) -> None:
        """Remember the diagnosis of a request, if it is one of a miss."""
        diagnosis = request.stats.prefix_diagnosis
        if diagnosis and diagnosis.reason not in NO_MISS:
            self._misses.append(PrefixMiss(request.id, key_name, diagnosis, self.tokenizer))

    def of_key(self, key_name: str) -> list[dict[str, Any]]:
        """Return the misses of a key, the newest first."""
        return [miss.summary for miss in reversed(self._misses) if miss.key_name == key_name]
