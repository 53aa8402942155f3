"""Options of the benches, each with its help: one frozen dataclass a bench."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retain.options import Fraction, PositiveFloat, PositiveInt, Size, check_bounds, option


@dataclass(frozen=True)
class SpeedBenchConfig:
    """Options of `retain bench speed`."""

    workloads: tuple[str, ...] = option(
        (), "names, comma-separated (default: all but short-64 to short-256)", separator=","
    )
    peer: str | None = option(
        None, "command of another engine: it gets a workload's name and prints JSON; shows the ratios"
    )


@dataclass(frozen=True)
class BudgetBenchConfig:
    """Options of `retain bench budget`."""

    measurements: tuple[str, ...] = option(
        ("scoring", "decode"), "of scoring, eviction, decode, throughput and looks, comma-separated", separator=","
    )


@dataclass(frozen=True)
class PrecisionBenchConfig:
    """Options of `retain bench precision`. Raises ValueError for a number below 1, or without a dtype."""

    kv_dtypes: tuple[str, ...] = option(
        ("bfloat16", "int8", "k8v4"), "dtypes of K and V, comma-separated; ratios are to the first", separator=","
    )
    policies: tuple[str, ...] = option(
        ("full",), "KV policies of each dtype that can have them, separated by spaces", separator=" "
    )
    measurements: tuple[str, ...] = option(
        ("prefill", "decode", "requests"), "of prefill, decode and requests, comma-separated", separator=","
    )
    prompt_len: PositiveInt = option(7000, "tokens that each request of decode attends to")
    batch_size: PositiveInt = option(8, "requests of decode")
    num_repeats: PositiveInt = option(5, "prefills, and eighths of the decode steps, of each dtype")

    def __post_init__(self) -> None:
        if not self.kv_dtypes:
            raise ValueError("--kv-dtypes names no dtype")
        if not self.policies:
            raise ValueError("--policies names no policy")
        check_bounds(self)


@dataclass(frozen=True)
class QualityBenchConfig:
    """Options of `retain bench quality`. Raises ValueError for a number below 1."""

    data_dir: Path = option(Path("."), "folder with the files of the tasks")
    tasks: tuple[str, ...] = option(("fidelity",), "names, comma-separated, or all", separator=",")
    policies: tuple[str, ...] = option(
        ("window", "sinks", "random", "h2o", "keyformer"), "KV policies, separated by spaces", separator=" "
    )
    budgets: tuple[str, ...] = option(
        ("50%", "25%"), "budgets of each policy that names none, comma-separated", separator=","
    )
    kv_dtypes: tuple[str, ...] = option(
        (),
        "run everything with K and V in these dtypes too, comma-separated; --kv-dtype is what they are compared with",
        separator=",",
    )
    num_prompts: PositiveInt = option(20, "items of each task")
    max_prompt_len: PositiveInt = option(900, "tokens of a prompt, at most")
    output_dir: Path | None = option(None, "write every number as JSON")
    report: Path | None = option(None, "write a page of tables and pictures into this folder")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class SpeculateBenchConfig:
    """Options of `retain bench speculate`. Raises ValueError for a number below 1."""

    data_dir: Path = option(Path("."), "folder with the files of the workloads")
    workloads: tuple[str, ...] = option(("humaneval", "summaries"), "names, comma-separated", separator=",")
    drafters: tuple[str, ...] = option(
        ("ngram", "suffix", "draft:weights=int4", "self"), "drafters, separated by spaces", separator=" "
    )
    num_prompts: PositiveInt = option(8, "prompts of each workload")
    batch_size: PositiveInt = option(1, "prompts that run together")
    output_len: PositiveInt = option(128, "output tokens of each prompt")
    context_lens: tuple[PositiveInt, ...] = option(
        (4000,), "tokens of each prompt of books, comma-separated", separator=","
    )
    output_dir: Path | None = option(None, "write every number as JSON")

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.context_lens:
            raise ValueError("--context-lens names no length")


@dataclass(frozen=True)
class PrefixBenchConfig:
    """Options of `retain bench prefix`. Raises ValueError for a number out of range."""

    data_dir: Path = option(Path("."), "folder with the files of the workloads")
    workloads: tuple[str, ...] = option(
        ("copa", "document", "trace"),
        "of copa, piqa, openbookqa, document, documents, trace, chats and edits, comma-separated",
        separator=",",
    )
    methods: tuple[str, ...] = option(
        ("recompute", "memory", "ram", "ssd", "ssd-200", "selective-200"),
        "where prefixes are found, comma-separated",
        separator=",",
    )
    selective_ratio: Fraction = option(0.25, "share of the tokens that the selective methods load")
    ram_capacity: Size = option(64 * 2**20, "memory of selective-lru, selective-lfu and selective-importance")
    remote: str = option("", "options of the remote tier that remote methods use (default: a folder's)")
    measure_accuracy: bool = option(False, "choose the answers of tasks too")
    store_dir: Path | None = option(None, "folder for temporary stores (default: /tmp)")
    num_prompts: PositiveInt = option(20, "requests of each workload")
    shared_prefix_len: PositiveInt = option(4000, "tokens that the prompts of a workload share")
    num_chats: PositiveInt = option(4, "chats and edits: chats that take turns")
    num_turns: PositiveInt = option(10, "chats and edits: turns of each")
    chat_len: PositiveInt = option(600, "chats and edits: tokens before the first turn")
    user_len: PositiveInt = option(8, "chats and edits: tokens of a message")
    answer_len: PositiveInt = option(32, "chats and edits: tokens of an answer")
    pool_multiples: tuple[PositiveFloat, ...] = option(
        (1.0, 2.0, 4.0), "chats and edits: sizes of the pool, times what all chats need, comma-separated", separator=","
    )
    chat_policies: tuple[str, ...] = option(
        ("full",), "chats and edits: KV policies of the requests, semicolon-separated", separator=";"
    )
    output_dir: Path | None = option(None, "write every number as JSON")

    def __post_init__(self) -> None:
        check_bounds(self)
