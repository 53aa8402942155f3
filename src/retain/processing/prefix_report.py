"""Reports for people: why a prompt began with no more cached tokens, in words, with some text of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retain.kv.prefix.start import MissReason, PrefixDiagnosis
from retain.processing.prefix_causes import Cause, Parting, find_cause
from retain.processing.tokenizer import Tokenizer

SHOWN_TOKENS = 20  # of each side, and before the place
MAX_COMPARED_TOKENS = 4096  # on each side of the place

EXPLANATIONS: dict[MissReason | Cause, str] = {  # they quote nothing of a prompt
    MissReason.COMPLETE: "everything that is cached of the prompt was used",
    MissReason.WHOLE_BLOCKS: "texts go on from the ends of whole blocks and of answers",
    MissReason.NEW_TEXT: "the prompt goes on where the nearest text ends: the rest is new",
    MissReason.FIRST_TEXT: "no text of this salt is cached",
    MissReason.EVICTED: "the text was cached, and evicted",
    MissReason.NOT_STORED: "the text was computed, but not kept",
    MissReason.IN_PROGRESS: "another request was still computing this text",
    MissReason.OTHER_POLICY: "the text is cached under a policy with other windows",
    MissReason.OWN_POLICY: "the request's own policy scores these tokens, so it computes them",
    MissReason.NO_SNAPSHOT: "no snapshot of the sliding layers is kept at this place; from now on one is",
    MissReason.NO_STATE: "the request's budget goes on from the ends of earlier answers, and from none at this place",
    MissReason.NO_PAGES: "the KV memory had no pages to attach the text",
    MissReason.NOT_LOADED: "a tier has the text, and computing it was estimated to be faster",
    MissReason.OTHER_FORMAT: "a tier has the text in another format",
    MissReason.OFF: "the engine caches no prefixes",
    Cause.TOKENIZATION: "the same text as other tokens, as where one text ends inside a word of the other",
    Cause.TOOL_ORDER: "the same tools in another order, or with their keys in another order",
    Cause.TOOLS: "other tools, or the same ones with other descriptions",
    Cause.TEMPLATE: "the chat template writes something else here: a role, thinking, today's date, its own text",
    Cause.WHITE_SPACE: "only white space differs",
    Cause.DATE_OR_ID: "a date, a time or an id differs: put it behind everything that repeats",
    Cause.OTHER_TEXT: "another text begins here",
}
CAUSES = {  # where the name of the reason is not the word for people
    MissReason.NOT_STORED: "never_kept",
    MissReason.OTHER_POLICY: "policy",
    MissReason.OWN_POLICY: "policy",
    MissReason.OTHER_FORMAT: "precision",
}
NO_MISS = (MissReason.COMPLETE, MissReason.WHOLE_BLOCKS, MissReason.NEW_TEXT, MissReason.FIRST_TEXT)


@dataclass(frozen=True)
class PrefixReport:
    """A diagnosis in words. `is_miss`: more could have been there; if not, the prompt had nothing to begin with."""

    diagnosis: PrefixDiagnosis
    is_miss: bool
    cause: str
    explanation: str  # without any text of a prompt
    before: str  # the last text that the prompt and the nearest text share
    prompt_text: str  # what follows in the prompt
    nearest_text: str  # what follows in the nearest text; empty where it ends

    def to_json(self) -> dict[str, Any]:
        """Return the object `retain.prefix` of a choice."""
        d = self.diagnosis
        return {
            "cached_tokens": d.num_cached_tokens,
            "computed_tokens": d.num_computed_tokens,
            "is_miss": self.is_miss,
            "cause": self.cause,
            "explanation": self.explanation,
            "common_tokens": d.common_length,
            "known_tokens": max(d.known_length, d.num_cached_tokens),
            "before": self.before,
            "prompt_text": self.prompt_text,
            "nearest_text": self.nearest_text,
        }

    def summarize(self) -> str:
        """Return one line without any text of a prompt, for logs."""
        d = self.diagnosis
        return (
            f"{d.num_cached_tokens} of {len(d.prompt)} tokens cached, {d.num_computed_tokens} computed, "
            f"{d.common_length} shared with the nearest text; {self.cause}: {self.explanation}"
        )


def build_report(diagnosis: PrefixDiagnosis, tokenizer: Tokenizer) -> PrefixReport:
    """Put a diagnosis into words."""
    d = diagnosis
    at = diagnosis.common_length
    cause, explanation = _explain(d, tokenizer)
    return PrefixReport(
        d,
        is_miss=d.reason not in NO_MISS,
        cause=cause,
        explanation=explanation,
        before=decode(tokenizer, d.prompt[max(at - SHOWN_TOKENS, 0) : at].tolist()),
        prompt_text=decode(tokenizer, d.prompt[at : at + SHOWN_TOKENS].tolist()),
        nearest_text=decode(tokenizer, d.nearest[at : at + SHOWN_TOKENS].tolist()),
    )


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decode tokens, special ones included. Broken characters become U+FFFD."""
    return b"".join(tokenizer.token_bytes(t) for t in token_ids).decode(errors="replace")


def _explain(d: PrefixDiagnosis, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the name of the cause, and the words for it."""
    parting = _compare_texts(d, tokenizer) if d.reason is MissReason.DIVERGED else None
    words = EXPLANATIONS[parting or d.reason]
    if d.age is not None:
        words += f" {d.age:.0f} s ago"
    if d.detail:
        words += f" ({d.detail})"
    return parting.value if parting else CAUSES.get(d.reason, d.reason.value), words


def _compare_texts(d: PrefixDiagnosis, tokenizer: Tokenizer) -> Cause:
    """Return the likely cause of the prompt and the nearest text parting."""
    at = d.common_length
    texts = (d.prompt[max(at - MAX_COMPARED_TOKENS, 0) : at], d.prompt[at:], d.nearest[at:])
    before, prompt, nearest = (decode(tokenizer, t[:MAX_COMPARED_TOKENS].tolist()) for t in texts)
    special = [decode(tokenizer, [t]) for t in tokenizer.special_token_ids]
    return find_cause(Parting(before, prompt, nearest, special, tokenizer.chat_template or ""))
