"""Options of `retain fit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from retain.options import Bounds, NonNegativeInt, check_bounds, option
from retain.plugins import check_choice


@dataclass(frozen=True)
class FitConfig:
    """Options of `retain fit`. Raises ValueError."""

    data: Path = field(metadata={"help": "JSON lines with article and highlights, prompt and answer, or text"})
    out: Path = field(metadata={"help": "the gate's file, NAME.gate.safetensors"})
    budgets: bool = option(False, "learn the shares of heads alone, for share=fitted, and keep the gates of the file")
    target: str = option(
        "both", "what to fit: reread (attention of a second reading), answers (what they need), or both"
    )
    first: NonNegativeInt = option(0, "records to skip at the start of the data")
    num_items: Annotated[int, Bounds(7)] = option(40, "records at most; every seventh tests the gate")
    max_prompt_len: Annotated[int, Bounds(64)] = option(750, "tokens of a prompt, at most; memory is quadratic")

    def __post_init__(self) -> None:
        check_choice("target", self.target, "reread", "answers", "both")
        check_bounds(self)
