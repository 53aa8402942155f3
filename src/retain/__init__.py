"""retain: an LLM inference engine whose subject is the KV cache.

`LLM` and `SamplingParams` are the front door; they are imported when they are asked for, so that this import stays
light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retain.answer import RequestOutput as RequestOutput
    from retain.answer import StreamChunk as StreamChunk
    from retain.engine.request import SamplingParams as SamplingParams
    from retain.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "StreamChunk", "SamplingParams"]


def __getattr__(name: str) -> Any:
    homes = {
        "LLM": "retain.llm",
        "Answer": "retain.answer",
        "Piece": "retain.answer",
        "SamplingParams": "retain.engine.request",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module 'retain' has no attribute {name!r}")
