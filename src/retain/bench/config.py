"""Options of the benches, each with its help: one frozen dataclass a bench."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from retain.options import Fraction, PositiveFloat, PositiveInt, Size, check_bounds


@dataclass(frozen=True)
class SpeedBenchConfig:
    """Options of `retain bench speed`."""

    workloads: tuple[str, ...] = field(
        default=(),
        metadata={"help": "names, comma-separated (default: all but short-64 to short-256)", "separator": ","},
    )
    peer: str | None = field(
        default=None,
        metadata={"help": "command of another engine: it gets a workload's name and prints JSON; shows the ratios"},
    )


@dataclass(frozen=True)
class BudgetBenchConfig:
    """Options of `retain bench budget`."""

    measurements: tuple[str, ...] = field(
        default=("scoring", "decode"),
        metadata={"help": "of scoring, eviction, decode and throughput, comma-separated", "separator": ","},
    )


@dataclass(frozen=True)
class PrecisionBenchConfig:
    """Options of `retain bench precision`. Raises ValueError for a number below 1, or without a dtype."""

    kv_dtypes: tuple[str, ...] = field(
        default=("bfloat16", "int8", "k8v4"),
        metadata={"help": "dtypes of K and V, comma-separated; ratios are to the first", "separator": ","},
    )
    policies: tuple[str, ...] = field(
        default=("full",),
        metadata={"help": "KV policies of each dtype that can have them, separated by spaces", "separator": " "},
    )
    measurements: tuple[str, ...] = field(
        default=("prefill", "decode", "requests"),
        metadata={"help": "of prefill, decode and requests, comma-separated", "separator": ","},
    )
    prompt_len: PositiveInt = field(default=7000, metadata={"help": "tokens that each request of decode attends to"})
    batch_size: PositiveInt = field(default=8, metadata={"help": "requests of decode"})
    num_repeats: PositiveInt = field(
        default=5, metadata={"help": "prefills, and eighths of the decode steps, of each dtype"}
    )

    def __post_init__(self) -> None:
        if not self.kv_dtypes:
            raise ValueError("--kv-dtypes names no dtype")
        if not self.policies:
            raise ValueError("--policies names no policy")
        check_bounds(self)


@dataclass(frozen=True)
class QualityBenchConfig:
    """Options of `retain bench quality`. Raises ValueError for a number below 1."""

    data_dir: Path = field(default=Path("."), metadata={"help": "folder with the files of the tasks"})
    tasks: tuple[str, ...] = field(
        default=("fidelity",), metadata={"help": "names, comma-separated, or all", "separator": ","}
    )
    policies: tuple[str, ...] = field(
        default=("window", "sinks", "random", "h2o", "keyformer"),
        metadata={"help": "KV policies, separated by spaces", "separator": " "},
    )
    budgets: tuple[str, ...] = field(
        default=("50%", "25%"),
        metadata={"help": "budgets of each policy that names none, comma-separated", "separator": ","},
    )
    kv_dtypes: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "run everything with K and V in these dtypes too, comma-separated; --kv-dtype is what they are "
            "compared with",
            "separator": ",",
        },
    )
    num_prompts: PositiveInt = field(default=20, metadata={"help": "items of each task"})
    max_prompt_len: PositiveInt = field(default=900, metadata={"help": "tokens of a prompt, at most"})
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON"})

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class SpeculateBenchConfig:
    """Options of `retain bench speculate`. Raises ValueError for a number below 1."""

    data_dir: Path = field(default=Path("."), metadata={"help": "folder with the files of the workloads"})
    workloads: tuple[str, ...] = field(
        default=("humaneval", "summaries"), metadata={"help": "names, comma-separated", "separator": ","}
    )
    drafters: tuple[str, ...] = field(
        default=("ngram", "suffix", "draft:weights=int4", "self"),
        metadata={"help": "drafters, separated by spaces", "separator": " "},
    )
    num_prompts: PositiveInt = field(default=8, metadata={"help": "prompts of each workload"})
    batch_size: PositiveInt = field(default=1, metadata={"help": "prompts that run together"})
    output_len: PositiveInt = field(default=128, metadata={"help": "output tokens of each prompt"})
    context_lens: tuple[PositiveInt, ...] = field(
        default=(4000,), metadata={"help": "tokens of each prompt of books, comma-separated", "separator": ","}
    )
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON"})

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.context_lens:
            raise ValueError("--context-lens names no length")


@dataclass(frozen=True)
class PrefixBenchConfig:
    """Options of `retain bench prefix`. Raises ValueError for a number out of range."""

    data_dir: Path = field(default=Path("."), metadata={"help": "folder with the files of the workloads"})
    workloads: tuple[str, ...] = field(
        default=("copa", "document", "trace"),
        metadata={
            "help": "of copa, piqa, openbookqa, document, documents, trace, chats and edits, comma-separated",
            "separator": ",",
        },
    )
    methods: tuple[str, ...] = field(
        default=("recompute", "memory", "ram", "ssd", "ssd-200", "selective-200"),
        metadata={"help": "where prefixes are found, comma-separated", "separator": ","},
    )
    selective_ratio: Fraction = field(
        default=0.25, metadata={"help": "share of the tokens that the selective methods load"}
    )
    ram_capacity: Size = field(
        default=64 * 2**20, metadata={"help": "memory of selective-lru, selective-lfu and selective-importance"}
    )
    remote: str = field(
        default="", metadata={"help": "options of the remote tier that remote methods use (default: a folder's)"}
    )
    measure_accuracy: bool = field(default=False, metadata={"help": "choose the answers of tasks too"})
    store_dir: Path | None = field(default=None, metadata={"help": "folder for temporary stores (default: /tmp)"})
    num_prompts: PositiveInt = field(default=20, metadata={"help": "requests of each workload"})
    shared_prefix_len: PositiveInt = field(
        default=4000, metadata={"help": "tokens that the prompts of a workload share"}
    )
    num_chats: PositiveInt = field(default=4, metadata={"help": "chats and edits: chats that take turns"})
    num_turns: PositiveInt = field(default=10, metadata={"help": "chats and edits: turns of each"})
    chat_len: PositiveInt = field(default=600, metadata={"help": "chats and edits: tokens before the first turn"})
    user_len: PositiveInt = field(default=8, metadata={"help": "chats and edits: tokens of a message"})
    answer_len: PositiveInt = field(default=32, metadata={"help": "chats and edits: tokens of an answer"})
    pool_multiples: tuple[PositiveFloat, ...] = field(
        default=(1.0, 2.0, 4.0),
        metadata={
            "help": "chats and edits: sizes of the pool, times what all chats need, comma-separated",
            "separator": ",",
        },
    )
    chat_policies: tuple[str, ...] = field(
        default=("full",),
        metadata={"help": "chats and edits: KV policies of the requests, semicolon-separated", "separator": ";"},
    )
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON"})

    def __post_init__(self) -> None:
        check_bounds(self)
