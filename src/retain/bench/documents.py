"""Questions about documents, asked together with the document or after it was evicted to its budget.

The latter is a cache that is compressed once and asked many times: the question is forced on the model behind the
prompt, so no policy knows it when the budget begins. The model answers by itself, greedily.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from retain.bench.tasks import ItemMetrics, absolute_budget
from retain.llm import LLM
from retain.processing.input import GenerateRequest
from retain.processing.tokenizer import Tokenizer
from retain.sampling_params import SamplingParams

ANSWER_TOKENS = 40


def mark_answer(answer: str, facts: Sequence[Sequence[str]]) -> float:
    """Return the share of facts that an answer names in any of their forms, 0 to 100. Case and spaces do not count."""
    words = f" {_normalize(answer)} "
    return 100 * _mean([float(any(f" {_normalize(form)} " in words for form in forms)) for forms in facts])


def name_strings(answer: str, facts: Sequence[Sequence[str]]) -> float:
    """Return the share of facts that an answer contains as a string in one of their forms, in any case, 0 to 100."""
    found = answer.casefold()
    return 100 * _mean([float(any(form.casefold() in found for form in forms)) for forms in facts])


@dataclass(frozen=True)
class Question:
    """A question and the first words of its answer, as ids. The answer names all `facts`, each in one of its forms.

    It is read up to one of `end_ids`, and has `num_answer_tokens` at most. `mark` gives it 0 to 100.
    """

    kind: str
    text: list[int]
    facts: tuple[tuple[str, ...], ...]
    num_answer_tokens: int = ANSWER_TOKENS
    end_ids: frozenset[int] = frozenset()
    mark: Callable[[str, Sequence[Sequence[str]]], float] = mark_answer


@dataclass(frozen=True)
class Document:
    """A text as ids, and the questions about it."""

    text: list[int]
    questions: tuple[Question, ...]


def ask(
    llm: LLM,
    documents: Sequence[Document],
    policy_specs: Sequence[str],
    after_eviction: bool,
) -> list[ItemMetrics]:
    """Return the marks of the answers, 0 to 100, by kind of question and their `mean`.

    There is one row for each policy and document, those of the first policy first. Budgets in percent are of the
    document without the question. Raises ValueError.
    """
    requests: list[GenerateRequest] = []
    questions: list[Question] = []
    for spec in policy_specs:
        for document in documents:
            policy = absolute_budget(spec, 0 if after_eviction else len(document.text))
            requests += [_make_request(document.text, q, policy, after_eviction) for q in document.questions]
            questions += document.questions
    outputs = llm.generate_from_requests(requests)
    marks = []
    for request, question, output in zip(requests, questions, outputs, strict=True):
        answer = output.token_ids[len(request.forced_tokens) :]
        end = next((i for i, token in enumerate(answer) if token in question.end_ids), len(answer))
        marks.append(question.mark(llm.tokenizer.decode(answer[:end]), question.facts))
    rows = []
    begin = 0
    for document in [*documents] * len(policy_specs):
        found = marks[begin : begin + len(document.questions)]
        begin += len(found)
        kinds = dict.fromkeys(q.kind for q in document.questions)
        row = {k: _mean([m for m, q in zip(found, document.questions, strict=True) if q.kind == k]) for k in kinds}
        rows.append(row | {"mean": _mean(found)})
    return rows


def measure(
    llm: LLM, items: Sequence[Document], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], None]:
    """Ask each question together with its document (see retain.bench.tasks)."""
    return ask(llm, items, policy_specs, after_eviction=False), None


def measure_later(
    llm: LLM, items: Sequence[Document], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], None]:
    """Ask each question after its document was evicted to its budget (see retain.bench.tasks)."""
    return ask(llm, items, policy_specs, after_eviction=True), None


def load_contexts(
    llm: LLM,
    records: Iterable[dict[str, Any]],
    ask_about: Callable[[dict[str, Any], Question], Question],
    num_items: int,
    max_prompt_len: int,
) -> list[Document]:
    """Return contexts of at most `max_prompt_len` tokens with their question, of each task in turn.

    Records are those of kvpress' datasets: context, question, answer_prefix, task, max_new_tokens. `ask_about` gives a
    record's question its facts and its marks.
    """
    documents = (_make_document(llm.tokenizer, record, ask_about) for record in take_in_turn(records))
    return list(itertools.islice((d for d in documents if len(d.text) <= max_prompt_len), num_items))


def take_in_turn(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first record of each task, then the second ones."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    yield from (r for turn in itertools.zip_longest(*by_task.values()) for r in turn if r)


def _make_document(
    tokenizer: Tokenizer, record: dict[str, Any], ask_about: Callable[[dict[str, Any], Question], Question]
) -> Document:
    before, after = split_turn(tokenizer)
    text = tokenizer.encode(before + record["context"], add_special_tokens=not before)
    asked = tokenizer.encode(record["question"] + after + record["answer_prefix"], add_special_tokens=False)
    question = Question(record["task"], asked, (), int(record["max_new_tokens"]), tokenizer.stop_token_ids)
    return Document(text, (ask_about(record, question),))


def split_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of a conversation before and behind what the user says; two empty ones without a template."""
    if tokenizer.chat_template is None:
        return "", ""
    user = "What the user says."
    before, _, after = tokenizer.apply_chat_template([{"role": "user", "content": user}]).partition(user)
    return before, after


def _make_request(document: list[int], question: Question, policy: str, after_eviction: bool) -> GenerateRequest:
    forced = tuple(question.text) if after_eviction else ()
    prompt = document if after_eviction else [*document, *question.text]
    params = SamplingParams(max_tokens=len(forced) + question.num_answer_tokens, temperature=0, ignore_eos=True, seed=0)
    return GenerateRequest(prompt, params, policy, forced_tokens=forced)


def _normalize(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
