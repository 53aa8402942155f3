"""Options of the bench of sessions, each with its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from retain.options import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Seed, check_bounds
from retain.plugins import check_choice

HINTS = ("none", "learned", "told")


@dataclass(frozen=True)
class AgentBenchConfig:
    """Options of the bench. Raises ValueError for a number out of range."""

    methods: tuple[str, ...] = field(
        default=("full", "full int8", "auto:budget=25%,demote=int4:43% int8", "full ram:capacity=1GiB"),
        metadata={
            "help": "KV policies, each with a dtype of K and V and with tiers if wanted, as in 'full int8'; "
            "semicolon-separated",
            "separator": ";",
        },
    )
    sessions: tuple[PositiveInt, ...] = field(
        default=(2, 4, 8), metadata={"help": "sessions at once, ascending, comma-separated", "separator": ","}
    )
    min_found: Fraction = field(
        default=0.9,
        metadata={"help": "share of the histories that must be found cached; at more sessions a method is not run"},
    )
    recording: Path | None = field(
        default=None, metadata={"help": "JSON Lines file of conversations to replay (default: generated ones)"}
    )
    save_recording: Path | None = field(default=None, metadata={"help": "write the conversations to this file"})
    kl_sessions: NonNegativeInt = field(
        default=2, metadata={"help": "sessions whose answers are compared with the full cache's"}
    )
    hints: tuple[str, ...] = field(
        default=("none",),
        metadata={
            "help": "what is said about pauses: none, learned (which tool runs) or told (when it ends, about); "
            "comma-separated",
            "separator": ",",
        },
    )
    estimate_error: Fraction = field(
        default=0.5, metadata={"help": "told pauses are wrong by up to this share of them, either way"}
    )
    step_time: PositiveFloat = field(
        default=0.05,
        metadata={"help": "seconds of the sessions' clock that a step takes: requests have the same order everywhere"},
    )
    seed: Seed = field(default=0, metadata={"help": "of generated conversations, and of pauses that a file lacks"})
    turns: PositiveInt = field(default=40, metadata={"help": "generated: turns of a session, half more or less"})
    system_len: PositiveInt = field(default=2000, metadata={"help": "generated: tokens of the system prompt"})
    tool_output_len: PositiveInt = field(default=1000, metadata={"help": "generated: mean tokens of a tool's output"})
    answer_len: PositiveInt = field(default=100, metadata={"help": "generated: mean tokens of an answer"})
    pause: PositiveFloat = field(
        default=10.0, metadata={"help": "mean seconds of a tool; a user takes ten times as long"}
    )
    edit_rate: Probability = field(
        default=0.02, metadata={"help": "generated: share of turns that go back to an earlier message"}
    )
    branch_rate: Probability = field(
        default=0.2, metadata={"help": "generated: share of sessions that begin inside an earlier one"}
    )
    store_dir: Path | None = field(default=None, metadata={"help": "folder for temporary stores (default: /tmp)"})
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON"})

    def __post_init__(self) -> None:
        check_bounds(self)
        for hints in self.hints:
            check_choice("hints", hints, *HINTS)
        if not self.methods:
            raise ValueError("--methods names no method")
        if not self.sessions:
            raise ValueError("--sessions names no number")
