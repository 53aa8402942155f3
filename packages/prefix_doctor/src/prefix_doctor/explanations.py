"""Explanations for people: why a prompt began with no more cached tokens, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefix_doctor.causes import Cause, Parting, find_cause
from retain.kv.prefix.start import MissReason, PrefixDiagnosis
from retain.processing.tokenizer import Tokenizer

MAX_COMPARED_TOKENS = 4096  # on each side of the place where texts part

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
    Cause.SYSTEM_TAIL: "the end of the system prompt differs, and messages behind it are the same: put it behind them",
    Cause.OTHER_TEXT: "another text begins here",
}


def explain(prefix: Mapping[str, Any], parting: Parting) -> dict[str, Any]:
    """Return the object `retain.prefix` with its likely cause and an explanation, which quotes nothing of a prompt.

    `reason` is the cause that the server named. `parting` has what the texts say where they part.
    """
    reason = prefix["cause"]
    cause = find_cause(parting) if reason == MissReason.DIVERGED.value else MissReason(reason)
    words = EXPLANATIONS[cause]
    if prefix["age_s"] is not None:
        words += f" {prefix['age_s']:.0f} s ago"
    if cause in (MissReason.NO_SNAPSHOT, MissReason.NO_STATE):
        usable = min(prefix["common_tokens"], prefix["cached_tokens"] + prefix["computed_tokens"] - 1)
        words += f" (none between {prefix['cached_tokens']} and {usable} tokens)"
    if prefix["detail"]:
        words += f" ({prefix['detail']})"
    return {**prefix, "reason": reason, "cause": cause.value, "explanation": words}


def decode_parting(d: PrefixDiagnosis, tokenizer: Tokenizer) -> Parting:
    """Return the texts of a diagnosis around the place where the prompt and the nearest text part."""
    at = d.common_length
    texts = (d.prompt[max(at - MAX_COMPARED_TOKENS, 0) : at], d.prompt[at:], d.nearest[at:])
    before, prompt, nearest = (tokenizer.decode_raw(t[:MAX_COMPARED_TOKENS]) for t in texts)
    special = [tokenizer.decode_raw([t]) for t in tokenizer.special_token_ids]
    return Parting(before, prompt, nearest, special, tokenizer.chat_template or "")
