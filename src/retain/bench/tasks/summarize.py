"""Task `summarize`: ROUGE of generated summaries against the references and against the full cache's summaries.

ROUGE (Lin, 2004) of the `rouge-score` package: F measures with stemming, as in the papers on summarization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retain.bench.tasks import ItemMetrics, load_articles
from retain.llm import LLM
from retain.plugins import needs_extra
from retain.sampling_params import SamplingParams

METRICS = ("R-1", "R-2", "R-L", "R-1 vs full", "R-2 vs full", "R-L vs full")
REQUESTS_PER_ITEM = 1
MAX_SUMMARY_TOKENS = 100
ROUGE_TYPES = {"R-1": "rouge1", "R-2": "rouge2", "R-L": "rougeL"}


@dataclass(frozen=True)
class Article:
    """A prompt as ids, and the reference summary."""

    prompt: list[int]
    reference: str


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Article]:
    """Return articles of at most `max_prompt_len` tokens."""
    return [Article(*pair) for pair in load_articles(llm, data, num_items, max_prompt_len)]


def measure(
    llm: LLM, items: list[Article], policy_specs: Sequence[str], full_state: list[str] | None
) -> tuple[list[ItemMetrics], list[str]]:
    """Return ROUGE, 0 to 100. Raises ValueError where the package is missing."""
    with needs_extra("summarize", "bench"):
        from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer(list(ROUGE_TYPES.values()), use_stemmer=True)
    params = SamplingParams(max_tokens=MAX_SUMMARY_TOKENS, temperature=0, seed=0)
    n = len(policy_specs)
    policies = [policy for policy in policy_specs for _ in items]
    texts = [output.text for output in llm.generate([i.prompt for i in items] * n, params, policies)]
    rows = []
    for item, text, full_text in zip([*items] * n, texts, [*(full_state or texts)] * n, strict=True):
        to_reference = scorer.score(item.reference, text)
        to_full = scorer.score(full_text, text)
        row = {name: 100 * to_reference[kind].fmeasure for name, kind in ROUGE_TYPES.items()}
        rows.append(row | {f"{name} vs full": 100 * to_full[kind].fmeasure for name, kind in ROUGE_TYPES.items()})
    return rows, texts
