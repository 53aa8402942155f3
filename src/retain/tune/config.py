"""Options of `retain tune`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from retain.options import Bounds, NonNegativeInt, check_bounds, option


@dataclass(frozen=True)
class TuneConfig:
    """Options of `retain tune`. Raises ValueError."""

    data: Path = field(metadata={"help": "JSON lines with prompt and answer, article and highlights, or text"})
    within: str = field(
        metadata={
            "help": "the bound: kl=0.02 (nats a token), loss=1% (of the full cache's, or nats), top1=0.95 (share of "
            "tokens with the same likeliest one), or rouge=0.98 (of the full cache's ROUGE-L)"
        }
    )
    policies: tuple[str, ...] = option(
        (
            "gate",
            "reread:share=all,value=norm",
            "h2o:share=all,value=norm",
            "h2o",
            "snapkv",
            "keydiff",
            "sinks",
        ),
        "KV policies to try, separated by spaces",
        separator=" ",
    )
    budgets: tuple[str, ...] = option(
        ("75%", "60%", "50%", "40%", "30%", "20%", "12%", "8%"),
        "budgets of each policy that names none, comma-separated",
        separator=",",
    )
    first: NonNegativeInt = option(0, "records to skip at the start of the data")
    num_items: Annotated[int, Bounds(4)] = option(32, "prompts at most; few policies are measured on all of them")
    max_prompt_len: Annotated[int, Bounds(64)] = option(2000, "tokens of a prompt, at most")
    output_len: Annotated[int, Bounds(2)] = option(64, "tokens of the model's own answers, where the data has none")
    journal: Path | None = option(None, "file of the measurements: a run that was stopped continues from it")

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.policies or not self.budgets:
            raise ValueError("tune needs at least one policy and one budget")
