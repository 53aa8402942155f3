"""A step between its two halves: launched, and its tokens not yet read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from retain.engine.batch import Batch
from retain.engine.request import Request
from retain.engine.sampler import Samples
from retain.engine.scheduler import ScheduledRequest


@dataclass(frozen=True)
class PendingStep:
    """A step whose work the device has or will get, in this order, without the host's help."""

    scheduled: Sequence[ScheduledRequest]
    batch: Batch
    samples: Samples
    logits: dict[Request, Tensor]  # of requests that need them; good until the next launch
    started: float  # seconds, of perf_counter
    draft_s: float  # that drafting took before
