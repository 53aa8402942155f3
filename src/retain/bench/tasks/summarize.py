"""summarize: summaries that the model writes, by ROUGE: against the references, and against the full cache's own.

ROUGE (Lin, 2004) by the `rouge-score` package, F measures with stemming, as the summarisation papers have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retain.bench.tasks import Row, articles
from retain.engine.request import SamplingParams
from retain.llm import LLM

METRICS = ("R-1", "R-2", "R-L", "R-1 to full", "R-2 to full", "R-L to full")
ROWS = 1
ANSWER = 100  # tokens at most
KINDS = {"R-1": "rouge1", "R-2": "rouge2", "R-L": "rougeL"}


@dataclass(frozen=True)
class Article:
    """The prompt as ids, and a summary by its editors."""

    prompt: list[int]
    reference: str


def items(llm: LLM, data: Path, n: int, longest: int) -> list[Article]:
    """Articles that are no longer than `longest` tokens."""
    return [Article(*pair) for pair in articles(llm, data, n, longest)]


def measure(
    llm: LLM, items: list[Article], chosen: Sequence[str], full: list[str] | None
) -> tuple[list[Row], list[str]]:
    """ROUGE, 0 to 100. Raises ValueError where the package is missing."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("summarize needs the rouge-score package: pip install 'retain[bench]'") from None
    scorer = RougeScorer(list(KINDS.values()), use_stemmer=True)
    params = SamplingParams(max_tokens=ANSWER, temperature=0, seed=0)
    each = [policy for policy in chosen for _ in items]
    texts = [a.text for a in llm.generate([i.prompt for i in items] * len(chosen), params, each)]
    rows = []
    for item, text, own in zip([*items] * len(chosen), texts, [*(full or texts)] * len(chosen), strict=True):
        true, near = scorer.score(item.reference, text), scorer.score(own, text)
        row = {name: 100 * true[kind].fmeasure for name, kind in KINDS.items()}
        rows.append(row | {f"{name} to full": 100 * near[kind].fmeasure for name, kind in KINDS.items()})
    return rows, texts
