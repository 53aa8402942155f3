"""retain: an LLM inference engine whose subject is the KV cache.

`LLM` and `SamplingParams` are the front door; they are imported when they are asked for, so that this import stays
light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retain.llm import LLM as LLM
    from retain.outputs import RequestOutput as RequestOutput
    from retain.outputs import StreamChunk as StreamChunk
    from retain.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StreamChunk"]


def __getattr__(name: str) -> Any:
    homes = {
        "LLM": "retain.llm",
        "RequestOutput": "retain.outputs",
        "StreamChunk": "retain.outputs",
        "SamplingParams": "retain.sampling_params",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module 'retain' has no attribute {name!r}")
