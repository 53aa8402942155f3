"""`retain cache why`: what a cache would have of recorded requests, and why not more. Loads no weights."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy, check_spec
from retain.kv.prefix.diagnosis import MissReason, PrefixDiagnosis, explain_from_history
from retain.kv.prefix.history import PrefixHistory, SeenText
from retain.kv.prefix.query import PrefixQuery
from retain.models.resolve import resolve_model
from retain.processing.prefix_report import PrefixReport, build_report
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.recorded import RecordedPrompt, read_prompts

SHOWS_PARTING = {MissReason.DIVERGED, MissReason.NEW_TEXT}


def explain_files(args: Namespace) -> int:
    """Print for each prompt of the files, in order, what an infinite cache would have of it after those before it."""
    check_spec(args.kv_policy)
    tokenizer = Tokenizer.open(resolve_model(args.model))
    simulation = CacheSimulation(args.kv_policy)
    num_tokens = num_cached = num_prompts = 0
    for file in args.files:
        for prompt in read_prompts(Path(file), tokenizer):
            diagnosis, nearest = simulation.explain(prompt)
            report = build_report(diagnosis, tokenizer)
            num_prompts = num_prompts + 1
            num_tokens = num_tokens + len(prompt.token_ids)
            num_cached += diagnosis.num_cached_tokens
            if args.json:
                print(json.dumps({"request": prompt.source, "nearest": nearest, **report.to_json()}))
            else:
                print("\n".join(format_report(prompt.source, nearest, report)))
    if not args.json:
        print(f"{num_prompts} prompts: {num_cached} of {num_tokens} tokens would be cached")
    return 0


class CacheSimulation:
    """A cache that keeps every prompt and evicts nothing."""

    def __init__(self, default_policy: str):
        self.default_policy = default_policy
        self.history = PrefixHistory(max_texts=sys.maxsize, max_tokens=sys.maxsize)
        self.sources: dict[int, str] = {}  # by the identity of a text's tokens

    def explain(self, prompt: RecordedPrompt) -> tuple[PrefixDiagnosis, str | None]:
        """Diagnose a prompt, then keep it. Returns the source of the nearest text, too. Raises ValueError."""
        ids = prompt.token_ids
        if not ids:
            raise ValueError(f"{prompt.source}: the prompt is empty")
        try:
            # Whatever `auto` stands for has a budget, and that is all that matters here.
            policy = policies.parse(AutoPolicy().choose(prompt.kv_policy or self.default_policy)).resolve(len(ids))
        except ValueError as error:
            raise ValueError(f"{prompt.source}: {error}") from None
        root = f"{policy.ring_window} {prompt.salt}".encode(errors="surrogatepass")
        diagnosis = explain_from_history(self.history, PrefixQuery(policy, ids, len(ids) - 1, prompt.salt), root)
        nearest = self.sources.get(id(diagnosis.nearest))
        text = SeenText(root, prompt.salt, policy, diagnosis.prompt, 0 if policy.has_budget else len(ids))
        self.history.add(text)
        self.sources[id(text.tokens)] = prompt.source
        return diagnosis, nearest


def format_report(source: str, nearest: str | None, report: PrefixReport) -> Sequence[str]:
    """Return the lines about one prompt."""
    d = report.diagnosis
    lines = [f"{source}: {d.num_cached_tokens} of {len(d.prompt)} tokens cached; {report.cause}: {report.explanation}"]
    if d.reason in SHOWS_PARTING:
        lines.append(f"    after token {d.common_length}: {report.before!r}")
        lines.append(f"    it goes on with       {report.prompt_text!r}")
    if d.reason is MissReason.DIVERGED:
        lines.append(f"    {nearest} with {report.nearest_text!r}")
    return lines
