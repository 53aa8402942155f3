"""summarize: summaries that the model writes, by ROUGE: against the references, and against the full cache's own.

ROUGE (Lin, 2004) by the `rouge-score` package, F measures with stemming, as the summarisation papers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retain.bench.tasks import ItemMetrics, load_articles
from retain.llm import LLM
from retain.sampling_params import SamplingParams

METRICS = ("R-1", "R-2", "R-L", "R-1 to full", "R-2 to full", "R-L to full")
REQUESTS_PER_ITEM = 1
MAX_SUMMARY_TOKENS = 100  # tokens at most
ROUGE_TYPES = {"R-1": "rouge1", "R-2": "rouge2", "R-L": "rougeL"}


@dataclass(frozen=True)
class Article:
    """The prompt as ids, and a summary by its editors."""

    prompt: list[int]
    reference: str


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Article]:
    """Articles that are no longer than `longest` tokens."""
    return [Article(*pair) for pair in load_articles(llm, data, num_items, max_prompt_len)]


def measure(
    llm: LLM, items: list[Article], policy_specs: Sequence[str], full_state: list[str] | None
) -> tuple[list[ItemMetrics], list[str]]:
    """ROUGE, 0 to 100. Raises ValueError where the package is missing."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("summarize needs the rouge-score package: pip install 'retain[bench]'") from None
    scorer = RougeScorer(list(ROUGE_TYPES.values()), use_stemmer=True)
    params = SamplingParams(max_tokens=MAX_SUMMARY_TOKENS, temperature=0, seed=0)
    each = [policy for policy in policy_specs for _ in items]
    texts = [a.text for a in llm.generate([i.prompt for i in items] * len(policy_specs), params, each)]
    rows = []
    for item, text, own in zip(
        [*items] * len(policy_specs), texts, [*(full_state or texts)] * len(policy_specs), strict=True
    ):
        true, near = scorer.score(item.reference, text), scorer.score(own, text)
        row = {name: 100 * true[kind].fmeasure for name, kind in ROUGE_TYPES.items()}
        rows.append(row | {f"{name} to full": 100 * near[kind].fmeasure for name, kind in ROUGE_TYPES.items()})
    return rows, texts
