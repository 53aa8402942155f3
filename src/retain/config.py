"""The options of an engine: one frozen dataclass. Does not depend on: what the names in it mean."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """An engine. Sizes are bytes, lengths are tokens; None means: chosen from the model and the machine."""

    model: str
    dtype: str = "bfloat16"  # or float32, the mode in which equalities are tested
    weights: str = "auto"  # of matrices: as the file has them; or bf16, int8, int4
    kv_policy: str = "full"  # of layers that see everything; sliding layers are rings always
    prefix_cache: str = "exact"  # what requests leave to others: all, exact:keep=prompt, or off (docs/prefix.md)
    tier: str | tuple[str, ...] = ()  # where pages sleep: ram:capacity=4GiB, disk:path=DIR,capacity=50GiB
    speculate: str | None = None  # who drafts: ngram, draft:weights=int4, self (docs/speculation.md)
    kv_memory: int | None = None  # hard cap of the pool
    page_size: int = 64  # slots of a page
    max_running_requests: int = 64  # running at once
    max_batched_tokens: int = 512  # fresh tokens of a step, at most
    max_model_len: int | None = None  # shorter than the model's own, to plan for less
    backend: str = "auto"
    device: str = "auto"  # cpu or cuda

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is not supported: choose float32, bfloat16 or float16 (on a GPU)")
        check_weights(self.weights, self.dtype)
        for name in ("page_size", "max_running_requests", "max_batched_tokens", "kv_memory", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, not {self.page_size}")
        if self.max_batched_tokens <= self.max_running_requests:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must exceed max_running_requests ({self.max_running_requests}), "
                "or prompts would starve"
            )


def default_kv_memory(max_request_bytes: int, free_gpu_memory: int | None = None) -> int:
    """The pool's cap where none is chosen, in bytes. On a GPU 85 % of the memory that is free there, `gpu`: steps want
    some, and recorded ones keep it.

    On a CPU 4 GiB, or `whole` (one request of the longest context) where that is more, but at most half of the memory
    that is free now; K and V cost nothing there until they are written.
    """
    if free_gpu_memory is not None:
        return int(0.85 * free_gpu_memory)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free // 2, max(4 * 2**30, max_request_bytes))


def check_weights(weights: str, dtype: str) -> None:
    """Raise ValueError for a kind of weights that there is not, or that contradicts the dtype."""
    if weights not in ("auto", "bf16", "int8", "int4"):
        raise ValueError(f"weights {weights!r} is not supported: choose auto, bf16, int8 or int4")
    if dtype == "float32" and weights != "auto":
        raise ValueError(f"weights {weights!r} contradicts dtype float32, which means float32 everywhere")
