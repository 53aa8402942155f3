"""What a simulated replica knows of a real one: the seconds of a step as a linear function of its work, and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


class StepWork(NamedTuple):
    """The work of steps, or the seconds that one unit of each kind of work takes.

    A slot is counted once for each fresh token that attends to it: a prompt's chunk of n tokens behind c others reads
    n * c + n * (n + 1) / 2.
    """

    steps: float = 0.0
    prompt_tokens: float = 0.0
    prompt_slots: float = 0.0
    decode_rows: float = 0.0
    decode_slots: float = 0.0


def measure_work(chunks: Iterable[tuple[int, int]]) -> StepWork:
    """Return the work of one step that computes chunks of (tokens before it, fresh tokens); one fresh token decodes."""
    prompt_tokens = prompt_slots = decode_rows = decode_slots = 0
    for num_before, n in chunks:
        slots = n * num_before + n * (n + 1) // 2
        if n == 1:
            decode_rows, decode_slots = decode_rows + 1, decode_slots + slots
        else:
            prompt_tokens, prompt_slots = prompt_tokens + n, prompt_slots + slots
    return StepWork(1, prompt_tokens, prompt_slots, decode_rows, decode_slots)


@dataclass(frozen=True)
class Calibration:
    """Measured step times and sizes of one replica."""

    seconds: StepWork  # of one unit of each kind of work
    page_size: int  # tokens of a page
    page_bytes: int  # of one page in all layers and heads
    num_pages: int  # pages of tokens that the pool holds
    max_running_requests: int
    max_batched_tokens: int
    max_model_len: int
    vocab_size: int
    options: Mapping[str, Any]  # of the engine that was measured
    machine: str
    num_threads: int
    num_steps: int  # that the fit is from
    median_error: float  # of the fit, relative to a step's time

    def step_seconds(self, work: StepWork) -> float:
        """Return the time of a step."""
        return sum(s * w for s, w in zip(self.seconds, work, strict=True))

    def seconds_alone(self, prompt_len: int, output_len: int) -> float:
        """Return the time of a request that runs alone and begins with no cached prefix."""
        starts = range(0, prompt_len, self.max_batched_tokens)
        prompt = ((c, min(self.max_batched_tokens, prompt_len - c)) for c in starts)
        decode = ((prompt_len + i, 1) for i in range(output_len - 1))
        return sum(self.step_seconds(measure_work([chunk])) for chunks in (prompt, decode) for chunk in chunks)

    def summarize(self) -> dict[str, Any]:
        """Return the figures of the fit: milliseconds of a step, and microseconds of each kind of work in it."""
        micros = {f"{name}_us": round(1e6 * s, 3) for name, s in self.seconds._asdict().items() if name != "steps"}
        figures = {"step_ms": round(1e3 * self.seconds.steps, 3), **micros}
        return figures | {"num_steps": self.num_steps, "median_error": self.median_error, "num_pages": self.num_pages}

    def save(self, path: Path) -> None:
        """Write the calibration as JSON. Raises OSError."""
        values = asdict(self) | {"seconds": self.seconds._asdict()}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises OSError, or ValueError where the file is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Calibration(**(values | {"seconds": StepWork(**values["seconds"])}))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of `python -m tools.simulation --calibrate`: {error}") from None
