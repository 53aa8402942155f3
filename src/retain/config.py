"""The options of an engine, each with its help: one frozen dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from retain.options import Bounds, NonNegativeInt, PositiveInt, Size, check_bounds, option

DTYPES = ("bfloat16", "float32", "float16")
# As multiples of page_size: pages of no more bytes than bfloat16 has, of whole blocks that a GPU attends to (64 slots).
SLOTS_PER_PAGE = {"int8": 2, "k8v4": 2, "int4": 3, "fp8": 2}
WEIGHTS = ("auto", "bf16", "int8", "int4")
KV_DTYPES = ("auto", "bfloat16", "int8", "k8v4", "int4", "fp8")
PROMPT_ACTIVATIONS = ("int8", "bfloat16")
POOLINGS = ("auto", "off", "last", "mean")
CHOICES = {"kv_dtype": KV_DTYPES, "prompt_activations": PROMPT_ACTIVATIONS, "pooling": POOLINGS}


@dataclass(frozen=True)
class Config:
    """The options of an engine. Sizes are bytes, lengths are tokens. None: chosen from the model and the machine.

    Raises ValueError for a value that no model could be run with.
    """

    model: str = field(
        metadata={"help": "smollm2, gemma3, a .gguf file, a Hugging Face folder, a hub id, or random:SHAPE"}
    )
    chat_template: str | None = option(
        None,
        "chat template: a file, or the name of one of the model's (default: `default`, and `tool_use` for "
        "conversations with tools)",
    )
    pooling: str = option(
        "auto",
        "make a vector of each text: last (the state of its last token), mean (of all), auto (as the "
        "model's files say), or off (generate)",
    )
    dtype: str = option(
        "bfloat16", "bfloat16, float32 (float32 everywhere, from dequantized weights), or float16 on a GPU"
    )
    weights: str = option("auto", "weights of matrices: auto (as the file has them), bf16, int8 or int4")
    prompt_activations: str = option(
        "int8",
        "activations of prompts, on a CPU and with quantized weights: int8, or bfloat16 (more exact; "
        "slower without AMX)",
    )
    kv_policy: str = option(
        "full",
        "KV policy: full, ring:window=N, or a budget such as keyformer:budget=25%; auto:budget=50% chooses "
        "by the model",
    )
    allow_policy: tuple[str, ...] = option(
        (),
        "KV policy that requests may select, of those that need room in the cache: for tokens in 4 bits "
        "(demote=int4), for keys in 4 bits (looks), or for masses of each query head (heads=query); and of those that "
        "cost more than requests may choose (may be repeated)",
    )
    prefix_cache: str = option("exact", "reuse of prefixes: exact, exact:keep=prompt, selective:ratio=0.25, or off")
    snapshot_interval: NonNegativeInt = option(
        2048,
        "tokens between the positions of a long text where others can leave it, in models whose layers "
        "slide or hold states; 0: at its end only",
    )
    tier: tuple[str, ...] = option(
        (),
        "offloading tier of prefix pages: ram:capacity=4GiB, disk:path=DIR,capacity=50GiB, "
        "remote:url=s3://BUCKET/FOLDER (may be repeated)",
    )
    speculate: str | None = option(
        None, "drafter of speculative decoding: ngram, suffix, draft:weights=int4, draft:model=M, self"
    )
    tensor_parallel: Annotated[int, Bounds(1, 64)] = option(
        1, "ranks that compute the model together: processes, each with a part of the weights and of the KV cache"
    )
    lora: tuple[str, ...] = option(
        (),
        "adapters (LoRA) that requests may name: NAME=FOLDER[,NAME=FOLDER], in PEFT's layout (may be repeated)",
    )
    max_loras: Annotated[int, Bounds(1, 1024)] | None = option(
        None, "adapters that there is room for (default: those of --lora)"
    )
    max_lora_rank: Annotated[int, Bounds(1, 256)] | None = option(
        None, "largest rank of an adapter, up to 256 (default: that of --lora, or 16)"
    )
    kv_memory: Size | None = option(
        None, "hard cap of the KV pool, of all ranks (default: 4GiB, or 85% of the free memory of a GPU)"
    )
    kv_offload: str | None = option(
        None,
        "file with K and V of the KV pool, for texts longer than memory whose answers look (look:slots=1024): "
        "disk:path=DIR,capacity=50GiB; --kv-memory is then of what stays in memory, a quarter of that or more",
    )
    kv_dtype: str = option(
        "auto",
        "K and V in the cache: auto (as --dtype), bfloat16, int8 (up to 2 times the tokens in the same "
        "bytes, by head size), k8v4 (8 bits for K, 4 for V: up to 2.5 times), int4 (up to 3.5 times), or on a "
        "GPU fp8 (e4m3, up to 2 times)",
    )
    page_size: PositiveInt = option(64, "slots of a page of 16 bits, a multiple of 16; those of 8 and 4 bits have more")
    max_running_requests: PositiveInt = option(64, "requests that run at the same time, at most")
    max_batched_tokens: PositiveInt = option(512, "fresh tokens of a step, at most")
    max_model_len: PositiveInt | None = option(
        None, "tokens of a prompt with its output, at most (default: the model's own limit)"
    )
    backend: str = option("auto", "kernels: auto, cpu, triton or reference")
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda")

    def __post_init__(self) -> None:
        for name in ("tier", "allow_policy", "lora"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not supported: choose float32, bfloat16 or float16 (on a GPU)")
        check_weights(self.weights, self.dtype)
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} {value!r} is not supported: choose {', '.join(allowed)}")
        if self.prompt_activations != "int8" and (self.dtype == "float32" or self.weights == "bf16"):
            raise ValueError(f"prompt_activations {self.prompt_activations} is for quantized weights")
        check_bounds(self)
        if self.tensor_parallel > 1 and self.kv_offload:
            raise ValueError("tensor_parallel does not go with kv_offload: K and V stay in memory")
        if self.page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, not {self.page_size}")
        if self.max_batched_tokens <= self.max_running_requests:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must exceed max_running_requests "
                f"({self.max_running_requests}), or prompts would starve"
            )

    @property
    def slot_dtype(self) -> str:
        """The dtype of K and V in the cache."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def slots_per_page(self) -> int:
        """Slots of a page, a multiple of 16, whose bytes are no more than those of 16 bits."""
        return self.page_size * SLOTS_PER_PAGE.get(self.slot_dtype, 1)


def default_kv_memory(max_request_bytes: int, free_gpu_memory: int | None = None) -> int:
    """Return the cap of the KV pool in bytes where the configuration names none.

    On a GPU 85 % of its free memory: steps and recorded graphs need the rest. On a CPU 4 GiB, or the size of one
    request of the longest context where that is more, but at most half of the free memory. Pages of the CPU pool take
    no memory before they are first written.
    """
    if free_gpu_memory is not None:
        return int(0.85 * free_gpu_memory)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free // 2, max(4 * 2**30, max_request_bytes))


def check_weights(weights: str, dtype: str) -> None:
    """Raise ValueError for an unknown kind of weights, or for one that contradicts the dtype."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} is not supported: choose auto, bf16, int8 or int4")
    if dtype == "float32" and weights != "auto":
        raise ValueError(f"weights {weights!r} contradicts dtype float32, which means float32 everywhere")
