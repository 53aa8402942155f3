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
from retain.bench.tasks import longbench, needles, ruler_4k
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


LONGBENCH_ANSWERS = {
    "qasper": ("The  Unanswerable!", "unanswerable", 100),
    "hotpotqa": ("It was Ada Lovelace", "Ada Lovelace", 200 * 2 / 6),
    "samsum": ("\nAda bakes.\nBob eats.", "Ada bakes.", 100),
    "gov_report": ("one two three", "one three", 80),
    "trec": ("Type: city\nstate", "city", 100),
    "passage_count": ("There are 7 of 8", "7", 50),
    "passage_retrieval_en": ("Paragraph 12", "Paragraph 12", 100),
    "lcc": ("```python\n# a comment\nreturn x", "return x", 100),
}


@pytest.mark.parametrize("task", LONGBENCH_ANSWERS)
def test_an_answer_of_longbench_has_its_marks(task: str) -> None:
    answer, right, marks = LONGBENCH_ANSWERS[task]
    classes = ("city", "other city", "state")
    assert longbench.mark_best(answer, [["nothing 0", right]], task, classes) == pytest.approx(marks)
    assert longbench.mark_best(right, [[right]], task, classes) == 100
    assert longbench.mark_best("", [[right]], task, classes) == 0


def test_a_class_of_longbench_shares_its_marks_with_other_classes() -> None:
    """A class whose name is a part of the right one's is no other class."""
    classes = ["city", "other city", "state"]
    assert longbench.mark_best("other city", [["other city"]], "trec", classes) == 100
    assert longbench.mark_best("other city or state", [["other city"]], "trec", classes) == 50
    assert longbench.mark_best("other city", [["state"]], "trec", classes) == 0


def test_records_of_longbench_come_task_by_task_and_chinese_is_left_out(tmp_path: Path) -> None:
    llm = LLM("smollm2", kv_memory="64MiB")
    record = {"context": "It is so.", "question": "What?", "answer_prefix": "Answer:", "max_new_tokens": 32}
    records = [
        record | {"task": task, "answers": ["a", "b"], "all_classes": None}
        for task in ("qasper", "qasper", "dureader", "lcc")
    ]
    (tmp_path / "longbench.jsonl").write_text("\n".join(map(json.dumps, records)))
    questions = [d.questions[0] for d in longbench.load_items(llm, tmp_path, 9, 4096)]
    assert [q.kind for q in questions] == ["qasper", "lcc", "qasper"]
    assert questions[0].facts == (("a", "b"),) and questions[0].mark("B", questions[0].facts) == 100


def test_each_length_of_needles_has_each_depth(tmp_path: Path) -> None:
    llm = LLM("smollm2", kv_memory="64MiB")
    essay = " ".join(f"Sentence {i} says nothing of note." for i in range(2000))
    (tmp_path / "paul_graham_essays.jsonl").write_text(json.dumps({"text": essay}))
    documents = needles.load_items(llm, tmp_path, 36, 1600)
    for i, (kind, share) in enumerate(needles.LENGTHS.items()):
        of_length = documents[i::4]
        depths = []
        for document in of_length:
            (question,) = document.questions
            text = llm.tokenizer.decode(document.text)
            assert question.kind == kind and 0.4 * share < len(document.text) / 1600 <= share
            depths.append(text.index(f"The pass key is {question.facts[0][0]}") / len(text))
        assert len(depths) == needles.NUM_DEPTHS and depths == sorted(depths)
        assert depths[0] < 0.2 and depths[-1] > 0.6


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
