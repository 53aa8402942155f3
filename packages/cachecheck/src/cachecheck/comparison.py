"""Compare an answer with the one that it must equal. Rounding may turn near ties; nothing else may differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cachecheck.answer import Answer, Token
from cachecheck.texts import Prompt

RUN = 3  # words in the same order, by which a text is recognised
ALMOST_HALF = -0.7  # a log-probability: no other token can be as likely as one above


@dataclass(frozen=True)
class Difference:
    """How an answer differs. `is_certain`: rounding cannot explain it."""

    detail: str
    is_certain: bool = True


def compare(reference: Answer, answer: Answer, tolerance: float) -> Difference | None:
    """Return how an answer differs from its reference, None where it does not or goes on after a near tie."""
    if not (reference.tokens and answer.tokens):
        same = (reference.text, reference.finish_reason) == (answer.text, answer.finish_reason)
        return None if same else Difference(f"{answer.text!r} instead of {reference.text!r}", is_certain=False)
    for place, (expected, found) in enumerate(zip(reference.tokens, answer.tokens, strict=False)):
        if expected.text != found.text:
            return _compare_choices(place, expected, found, tolerance)
        gap = abs(expected.logprob - found.logprob)
        if not gap <= tolerance:  # NaN differs
            return Difference(f"token {place} {found.text!r}: its log-probability differs by {gap:.4f}")
    return _compare_ends(reference, answer, tolerance)


def _compare_choices(place: int, expected: Token, found: Token, tolerance: float) -> Difference | None:
    """Compare two choices of a token: each was the likelier one, where both are almost as likely it may be rounding."""
    margins = [_margin(expected, found), _margin(found, expected)]
    if max(margins) <= 2 * tolerance:
        return None
    return Difference(
        f"token {place} is {found.text!r} instead of {expected.text!r}, which is {margins[0]:.2f} nats likelier"
    )


def _margin(chosen: Token, other: Token) -> float:
    """Return how much likelier the chosen token is than another one, at least: that may not be among the likeliest."""
    return chosen.logprob - chosen.top.get(other.text, min(chosen.top.values(), default=-float("inf")))


def _compare_ends(reference: Answer, answer: Answer, tolerance: float) -> Difference | None:
    """Compare two answers of which one begins with the other."""
    shorter, longer = sorted((reference, answer), key=lambda a: len(a.tokens))
    if len(shorter.tokens) == len(longer.tokens):
        same = (reference.text, reference.finish_reason) == (answer.text, answer.finish_reason)
        return None if same else Difference(f"{_ending(answer)} instead of {_ending(reference)}")
    next_token = longer.tokens[len(shorter.tokens)]
    if shorter.finish_reason == "stop" and next_token.logprob <= ALMOST_HALF + tolerance:
        return None  # the end of the text, whose probability is not listed, may be as likely
    return Difference(f"{_ending(answer)} instead of {_ending(reference)}")


def _ending(answer: Answer) -> str:
    return f"{answer.text[-40:]!r}, {len(answer.tokens)} tokens, {answer.finish_reason}"


def largest_gap(first: Answer, second: Answer) -> float:
    """Return the largest difference of tokens that both answers list at a place, up to where they part."""
    gap = 0.0
    for one, other in zip(first.tokens, second.tokens, strict=False):
        listed = {one.text: one.logprob, **one.top}
        also_listed = {other.text: other.logprob, **other.top}
        gaps = (abs(listed[text] - also_listed[text]) for text in listed.keys() & also_listed.keys())
        gap = max([gap, *(g if g == g else math.inf for g in gaps)])  # a NaN differs from every number
        if one.text != other.text:
            break
    return gap


def find_foreign_words(answer: Answer, own: Prompt, others: Sequence[Prompt]) -> str | None:
    """Return words of the answer that another prompt has in this order, and its own does not; None for none."""
    known = _runs(own.words)
    foreign = {run for other in others for run in _runs(other.words)} - known
    return next((" ".join(run) for run in _runs(own.words[-RUN:] + answer.text.split()) if run in foreign), None)


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
