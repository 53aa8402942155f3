"""Options of `retain cachecheck`."""

from __future__ import annotations

from dataclasses import dataclass, field

from retain.options import NonNegativeFloat, PositiveFloat, PositiveInt, Seed, check_bounds
from retain.plugins import check_choice

REFERENCES = ("cold", "replay")


@dataclass(frozen=True)
class CachecheckConfig:
    """Options of a run. Raises ValueError for a number out of its bounds."""

    model: str | None = field(default=None, metadata={"help": "name of the model (default: the first of /models)"})
    checks: tuple[str, ...] = field(
        default=(), metadata={"help": "names of checks, comma-separated (default: all)", "separator": ","}
    )
    seed: Seed | None = field(
        default=None,
        metadata={"help": "seed of all texts: the same seed sends the same requests (default: drawn, and reported)"},
    )
    reference: str = field(
        default="cold",
        metadata={
            "help": "what a turn of a chat must equal: cold, the same prompt without a cache; replay, the same chat "
            "from its first turn, for caches that drop tokens by design"
        },
    )
    tolerance: NonNegativeFloat | None = field(
        default=None,
        metadata={
            "help": "difference of log-probabilities that is no fault (default: 0.1, or three times that of "
            "repeated requests)"
        },
    )
    max_tokens: PositiveInt = field(default=8, metadata={"help": "tokens of an answer"})
    concurrency: PositiveInt = field(default=8, metadata={"help": "requests at once, in the check `concurrency`"})
    flush_command: str | None = field(
        default=None, metadata={"help": "shell command that empties the cache, for servers without salts"}
    )
    restart_command: str | None = field(
        default=None, metadata={"help": "shell command that restarts the server, for the check `restart`"}
    )
    reload_command: str | None = field(
        default=None,
        metadata={"help": "shell command that loads other weights behind the same address, for the check `reload`"},
    )
    timeout: PositiveFloat = field(default=120.0, metadata={"help": "seconds that an answer or a command may take"})

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("--reference", self.reference, *REFERENCES)
