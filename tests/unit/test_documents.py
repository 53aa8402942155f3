"""Questions about documents: their answers are in the text, and asking later changes nothing of a full cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain import LLM
from retain.bench.documents import Document, Question, ask, mark_answer
from retain.bench.tasks.ruler import METRICS, REQUESTS_PER_ITEM, make_puzzles

pytestmark = pytest.mark.usefixtures("shared_engines")


@given(st.integers(0, 2**32))
def test_the_facts_of_a_puzzle_have_one_answer_each(seed: int) -> None:
    facts, puzzles = make_puzzles(random.Random(seed))
    text = ". ".join(facts)
    assert [kind for kind, *_ in puzzles] == list(METRICS[1:]) and len(puzzles) == REQUESTS_PER_ITEM
    for _, _, _, answers in puzzles:
        assert mark_answer(text, [[a] for a in answers]) == 100
        assert mark_answer(text, [[a] for a in answers] + [["nothing like that"]]) < 100
    links = [fact.removeprefix("Let ").split(" = ") for fact in facts if fact.startswith("Let ")]
    known = {links[0][1]}
    for name, value in links:  # every variable is given a value that is known by then
        assert value in known
        known.add(name)


@given(st.lists(st.sampled_from(["A b", "c", "d-e", "10"]), min_size=1, max_size=4, unique=True), st.data())
def test_an_answer_is_marked_by_the_facts_that_it_names(facts: list[str], data: st.DataObject) -> None:
    named = data.draw(st.lists(st.sampled_from(facts), unique=True))
    answer = "So:  " + ", ".join(named).upper() + "!"
    assert mark_answer(answer, [["no", f] for f in facts]) == pytest.approx(100 * len(named) / len(facts))
    assert mark_answer("910, 100", [["10"]]) == 0  # words count, not parts of them


@pytest.mark.slow
def test_a_question_asked_later_gets_the_answer_of_a_full_cache() -> None:
    llm = LLM("smollm2", kv_memory="256MiB")
    encode = llm.tokenizer.encode
    names = ("Anna", "Bert", "Carla", "David")
    text = " ".join(f"{name} has the key {i}{i}{i} in a box under the old bed." for i, name in enumerate(names))
    asked = [encode(f"\n\nWhich key has {n}?\n{n} has the key", add_special_tokens=False) for n in names]
    questions = [Question("key", ids, ((f"{i}{i}{i}",),)) for i, ids in enumerate(asked)]
    documents = [Document(llm.encode(text), tuple(questions))]
    full, many, few = ask(llm, documents, ["full", "h2o:budget=400", "window:budget=10"], after_eviction=True)
    assert full == many == ask(llm, documents, ["full"], after_eviction=False)[0]
    assert set(full) == {"key", "mean"} and full["mean"] > few["mean"] == 0
