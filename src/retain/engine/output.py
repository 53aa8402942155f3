"""What a step gave: tokens and logits. What they mean as text is the caller's business."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from retain.engine.request import Request


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step added to requests.

    Requests that ended with them, or for want of memory, have a `finish_reason`. `logits` [n, V] are those before the
    next n tokens of the text, of requests that need them. They are good until the next launch.
    """

    token_ids: dict[Request, list[int]] = field(default_factory=dict)
    logits: dict[Request, Tensor] = field(default_factory=dict)
