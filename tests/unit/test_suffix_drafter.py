"""The suffix drafter: longest matches as a plain scan finds them, bounded memory, no match across salts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from retain.engine import drafters
from retain.engine.drafters.suffix import Drafter, Place, PlaceIndex, RecentAnswers, extend
from tests.helpers.engines import make_request

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def matching_places(texts: Sequence[Sequence[int]], tokens: Sequence[int], n: int) -> list[tuple[int, int]]:
    """The definition: every place behind the longest suffix of `tokens` of at least n that occurs and goes on."""
    for length in range(len(tokens), n - 1, -1):
        suffix = list(tokens[len(tokens) - length :])
        found = [
            (i, end)
            for i, text in enumerate(texts)
            for end in range(length, len(text))
            if list(text[end - length : end]) == suffix
        ]
        if found:
            return found
    return []


@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 3))
def test_matches_are_those_of_a_scan(tokens: list[int], answers: list[list[int]], n: int) -> None:
    texts = [*answers, tokens]
    expected = matching_places(texts, tokens, n)
    answer_index, own = RecentAnswers(n, 1000), PlaceIndex(n)
    for answer in answers:
        answer_index.add("", answer)
    own.add(tokens, 0, len(tokens))
    places = [*answer_index.find("", tokens), *own.find(tokens)]
    longest = max((p.match_length(tokens) for p in places), default=0)
    found = [p for p in places if p.match_length(tokens) == longest]
    assert bool(found) == bool(expected)
    by_identity = {id(text): i for i, text in enumerate(texts)}
    if len(places) < 32:  # what leaves a full list of places may be the longest match
        assert sorted((by_identity[id(p.text)], p.position) for p in found) == sorted(expected)


def test_most_places_decide_and_few_stop_the_draft() -> None:
    answers = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 9], [1, 2, 8]]
    places = [Place(answer, 2) for answer in answers]
    assert extend(places, [1, 2], 9, 0.0) == [3, 4, 5]  # 3/4, 2/3, 1/2: of equal counts the first
    assert extend(places, [1, 2], 9, 0.5) == [3, 4]
    assert extend(places, [1, 2], 9, 0.6) == [3]
    assert extend(places, [1, 2], 1, 0.0) == [3]
    assert extend([], [1, 2], 9, 0.0) == []


@given(TEXTS, st.integers(1, 20))
def test_repeating_text_is_drafted_beyond_its_end(period: list[int], limit: int) -> None:
    tokens = [4, *period * 3]
    drafts = extend([Place(tokens, 1 + 2 * len(period))], tokens, limit, 0.3)
    assert drafts == (period * (limit // len(period) + 1))[:limit]


@given(st.lists(st.tuples(st.sampled_from("abc"), TEXTS), max_size=30), st.integers(0, 120))
def test_answers_are_bounded_and_salted(answers: list[tuple[str, list[int]]], capacity: int) -> None:
    memory = RecentAnswers(2, capacity)
    for salt, answer in answers:
        memory.add(salt, answer)
    kept = [(salt, answer) for salt, answer in answers if 2 < len(answer) <= capacity]
    while sum(len(answer) for _, answer in kept) > capacity:
        kept.pop(0)
    assert memory.num_tokens == sum(len(answer) for _, answer in kept) <= capacity
    for salt in "abcd":
        for first in range(4):
            for second in range(4):
                texts = [a for s, a in kept if s == salt]
                expected = [end for a in texts for end in range(2, len(a)) if a[end - 2 : end] == [first, second]]
                assert [p.position for p in memory.find(salt, [0, first, second])] == expected[-32:]
    assert set(memory._indexes) == {salt for salt, _ in kept}


def test_an_answer_drafts_for_later_requests_of_its_salt() -> None:
    drafter = drafters.parse("suffix:k=4")
    ended = make_request([1, 2, 3], 10, salt="a")
    ended.text.ids += [5, 6, 7, 8, 9, 5]
    drafter.remove_request(ended)
    for salt, drafts in (("a", [7, 8, 9, 5]), ("b", [])):
        request = make_request([5, 6], 10, salt=salt)
        drafter.propose([(request, 4)], {})
        assert request.drafts == drafts


def test_short_matches_draft_few_tokens() -> None:
    request = make_request([1, 2, *range(10, 40), 1, 2], 10)
    Drafter(min=2, factor=2.0).propose([(request, 9)], {})
    assert request.drafts == [10, 11, 12, 13]
