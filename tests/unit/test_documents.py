"""Questions about documents: their answers are in the text, and asking later changes nothing of a full cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain import LLM
from retain.bench.documents import Document, Question, ask, mark_answer, name_strings
from retain.bench.tasks import ruler_4k
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


def test_strings_count_inside_of_words_and_in_any_case() -> None:
    facts = [["910"], ["Blue"]]
    assert name_strings("It is 19100, bluegreen", facts) == 100
    assert name_strings("It is 19100", facts) == 50
    assert name_strings("It is 19100", [["blue", "9100"]]) == 100


def test_a_context_of_ruler_4k_and_its_question_are_one_turn_of_a_chat(tmp_path: Path) -> None:
    """The tasks come in turn, and an answer is read up to the end of the model's turn."""
    llm = LLM("smollm2", kv_memory="64MiB")
    records = [
        {"context": f"It is {i}.", "question": "\nWhat?", "answer_prefix": " It", "answer": ["a", "b"]}
        | {"task": task, "max_new_tokens": 30}
        for i, task in enumerate(["vt", "vt", "vt", "qa_1", "qa_1", "cwe"])
    ]
    (tmp_path / "ruler_4096.jsonl").write_text("\n".join(map(json.dumps, records)))
    documents = ruler_4k.load_items(llm, tmp_path, 5, 4096)
    assert [d.questions[0].kind for d in documents] == ["vt", "qa_1", "cwe", "vt", "qa_1"]
    (question,) = documents[0].questions
    chat = [{"role": "user", "content": "It is 0.\nWhat?"}]
    text = llm.tokenizer.apply_chat_template(chat) + " It"
    assert llm.tokenizer.decode_raw([*documents[0].text, *question.text]) == text
    assert question.facts == (("a",), ("b",)) and documents[1].questions[0].facts == (("a", "b"),)
    assert question.num_answer_tokens == 30 and question.end_ids == llm.tokenizer.stop_token_ids


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
