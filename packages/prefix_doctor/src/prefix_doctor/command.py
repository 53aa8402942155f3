"""The command: explains the prompts of files, in order. Loads no weights."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefix_doctor.answers import find_prefixes
from prefix_doctor.causes import Parting
from prefix_doctor.explanations import decode_parting, explain
from prefix_doctor.recorded import encode_body, iter_bodies
from prefix_doctor.simulation import CacheSimulation, RecordedPrompt
from retain.kv.eviction.auto_policy import check_spec
from retain.models.resolve import resolve_model
from retain.processing.output import describe_prefix
from retain.processing.tokenizer import Tokenizer

SHOWS_PARTING = ("new_text", "diverged")


@dataclass(frozen=True)
class Explained:
    """A prompt of a file. `prefix`: the object `retain.prefix` with an explanation; `nearest`: where the text is."""

    source: str
    prefix: dict[str, Any]
    nearest: str | None = None

    def format(self) -> Sequence[str]:
        """Return the lines about it."""
        p = self.prefix
        num_tokens = p["cached_tokens"] + p["computed_tokens"]
        lines = [f"{self.source}: {p['cached_tokens']} of {num_tokens} tokens cached; {p['cause']}: {p['explanation']}"]
        if p["reason"] in SHOWS_PARTING:
            lines.append(f"    after token {p['common_tokens']}: {p['before']!r}")
            lines.append(f"    it goes on with       {p['prompt_text']!r}")
        if p["reason"] == "diverged":
            lines.append(f"    {self.nearest or 'the nearest text'} with {p['nearest_text']!r}")
        return lines


def explain_files(args: Namespace) -> int:
    """Print each prompt of the files with what was cached of it, or would be after those before it, and why."""
    check_spec(args.kv_policy)
    doctor = Doctor(getattr(args, "model", None), args.kv_policy)
    num_prompts = num_tokens = num_cached = 0
    for file in args.files:
        for found in doctor.explain(Path(file)):
            num_prompts += 1
            num_cached += found.prefix["cached_tokens"]
            num_tokens += found.prefix["cached_tokens"] + found.prefix["computed_tokens"]
            if args.json:
                print(json.dumps({"request": found.source, "nearest": found.nearest, **found.prefix}))
            else:
                print("\n".join(found.format()))
    if not args.json:
        print(f"{num_prompts} prompts: {num_cached} of {num_tokens} tokens cached")
    return 0


class Doctor:
    """Explains files. Requests need a model's tokenizer; answers of a server say what there is to know."""

    def __init__(self, model: str | None, default_policy: str):
        self.tokenizer = Tokenizer.open(resolve_model(model)) if model else None
        self.simulation = CacheSimulation(default_policy)

    def explain(self, path: Path) -> Iterator[Explained]:
        """Explain the prompts of a file. Raises OSError, and ValueError with the place."""
        for source, body in iter_bodies(path):
            try:
                if prefixes := find_prefixes(body):
                    yield from (Explained(source, _explain_prefix(prefix)) for prefix in prefixes)
                    continue
                if self.tokenizer is None:
                    raise ValueError("--model is missing: a model's tokenizer and chat template encode requests")
                for prompt in encode_body(source, body, self.tokenizer):
                    yield self._explain_prompt(prompt, self.tokenizer)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None

    def _explain_prompt(self, prompt: RecordedPrompt, tokenizer: Tokenizer) -> Explained:
        diagnosis, nearest = self.simulation.explain(prompt)
        parting = decode_parting(diagnosis, tokenizer)
        return Explained(prompt.source, explain(describe_prefix(diagnosis, tokenizer), parting), nearest)


def _explain_prefix(prefix: dict[str, Any]) -> dict[str, Any]:
    """Explain what a server said; it shows a few tokens, and nothing of its chat template."""
    return explain(prefix, Parting(prefix["before"], prefix["prompt_text"], prefix["nearest_text"]))
