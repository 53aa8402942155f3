"""A prompt that is computed again is told why: 12 constructed misses, whose texts it may see, and what it costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_doctor.causes import Parting
from prefix_doctor.explanations import decode_parting, explain
from retain import LLM, SamplingParams
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.prefix.start import MissReason, PrefixDiagnosis
from retain.kv.text import Text
from retain.processing.output import describe_prefix
from tests.helpers.engines import AlwaysLoad, iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.tokenizers import open_tokenizer

THREE_TOKENS = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
OPTIONS = {"kv_memory": "2MiB", "page_size": 16, "max_model_len": 1024, "max_running_requests": 2, "dtype": "float32"}
RULES = "Answer in one sentence. Never say that you are sorry. Name the lamp and its price. " * 2
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a lamp", "parameters": {"type": "object"}}}
    for name in ("find", "buy", "return")
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "[assistant] "
)
THINKING_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if loop.last and m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}"
)
DATED_TEMPLATE = "Today is {{ strftime_now('%f') }}.\n" + TEMPLATE  # microseconds, so that every prompt has another


def system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": "Which lamp?"}]


def chat(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, template: str = TEMPLATE
) -> Callable[[LLM], list[int]]:
    """Return a prompt that is encoded by a chat template."""

    def encode(llm: LLM) -> list[int]:
        llm.tokenizer.choose_chat_template(template)
        return llm.tokenizer.encode_chat(messages, tools=tools)

    return encode


def text(text: str) -> Callable[[LLM], list[int]]:
    """Return a prompt of raw text."""
    return lambda llm: llm.tokenizer.encode(text)


@dataclass(frozen=True)
class Miss:
    """Two prompts of which the second misses what the first computed, and the cause that it is told."""

    name: str
    first: Callable[[LLM], list[int]]
    second: Callable[[LLM], list[int]]
    cause: str
    words: str
    first_options: dict[str, Any] = field(default_factory=dict)
    second_options: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)


def with_thinking(*more: str) -> list[dict[str, Any]]:
    turn = {"role": "assistant", "content": "The blue one.", "thinking": "They want a lamp."}
    return [*system(RULES), turn, *({"role": "user", "content": m} for m in more)]


QUESTION = f"{RULES} Which lamp?"
MISSES = [
    Miss(
        "a date in the head",
        chat(system(f"Today is Monday, 26 January 2026. {RULES}")),
        chat(system(f"Today is Tuesday, 27 January 2026. {RULES}")),
        "date_or_id",
        "behind everything that repeats",
    ),
    Miss(
        "an id in the head",
        chat(system(f"Session 1f0a33c2-77d1-4c1e-9a55-6f1f2f3e4d5c. {RULES}")),
        chat(system(f"Session 1f0b9dd0-12ab-4c1e-9a55-0a0a0b0b0c0c. {RULES}")),
        "date_or_id",
        "an id differs",
    ),
    Miss(
        "another order of tools",
        chat(system(RULES), TOOLS),
        chat(system(RULES), TOOLS[::-1]),
        "tool_order",
        "the same tools in another order",
    ),
    Miss("white space", text(f"A shop.\n{RULES}"), text(f"A shop.\n\n{RULES}"), "white_space", "only white space"),
    Miss(
        "thinking that the template leaves out",
        chat(with_thinking(), template=THINKING_TEMPLATE),
        chat(with_thinking("And its price?"), template=THINKING_TEMPLATE),
        "template",
        "thinking",
    ),
    Miss(
        "a date that the template writes",
        chat(system(RULES), template=DATED_TEMPLATE),
        chat(system(RULES), template=DATED_TEMPLATE),
        "template",
        "today's date",
    ),
    Miss(
        "another policy's windows",
        text(QUESTION),
        text(QUESTION),
        "policy",
        "(full)",
        second_options={"kv_policy": "ring:window=64"},
    ),
    Miss(
        "a policy that scores the prompt",
        text(QUESTION),
        text(QUESTION),
        "own_policy",
        "own policy scores",
        second_options={"kv_policy": "h2o:budget=64"},
    ),
    Miss("another precision", text(QUESTION), text(QUESTION), "precision", "dtype float32, here bfloat16"),
    Miss("evicted", text(QUESTION), text(QUESTION), "evicted", "evicted 0 s ago"),
    Miss(
        "an answer that is not kept",
        text(QUESTION),
        text(QUESTION),
        "never_kept",
        "keep=prompt",
        engine_options={"prefix_cache": "exact:keep=prompt"},
    ),
    Miss(
        "a request with a budget, which leaves nothing",
        text(QUESTION),
        text(QUESTION),
        "never_kept",
        "h2o:budget=64",
        first_options={"kv_policy": "h2o:budget=64"},
    ),
]


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing(LLM("random:tiny", **(OPTIONS | getattr(request, "param", {})))) as llm:  # type: ignore[arg-type]
        yield llm


def ask(llm: LLM, prompt: Sequence[int], params: SamplingParams = THREE_TOKENS, **options: Any) -> dict[str, Any]:
    """Answer a prompt, and return what is said about its prefix."""
    (output,) = llm.generate(prompt, params, explain_prefix=True, **options)
    assert output.prefix and output.prefix["cached_tokens"] == output.cached_tokens
    assert output.prefix["cached_tokens"] + output.prefix["computed_tokens"] == output.prompt_tokens
    return output.prefix


@pytest.mark.parametrize("miss", MISSES, ids=[m.name for m in MISSES])
def test_the_right_cause_of_a_constructed_miss(miss: Miss, tmp_path: Path) -> None:
    options: dict[str, Any] = OPTIONS | miss.engine_options
    tier = {"tier": (f"disk:path={tmp_path / 'store'},capacity=1GB",)} if miss.cause == "precision" else {}
    with closing(LLM("random:tiny", **(options | tier))) as llm:
        first = miss.first(llm)
        (answer,) = llm.generate(first, THREE_TOKENS, explain_prefix=True, **miss.first_options)
        assert answer.prefix and not answer.prefix["is_miss"] and answer.prefix["cause"] == "first_text"
        second = miss.second(llm)
        if miss.cause == "evicted":
            llm.cache.pool.ensure_free(llm.cache.total_pages)
        if miss.cause == "never_kept" and not miss.first_options:
            second = [*first, *answer.token_ids, *second]
        if not tier:
            found = ask(llm, second, **miss.second_options)
    if tier:
        with closing(LLM("random:tiny", **(options | tier | {"dtype": "bfloat16"}))) as llm:
            found = ask(llm, second)
    nearest = np.array([*first, *answer.token_ids], np.int32)
    at = found["common_tokens"]
    texts = PrefixDiagnosis(np.array(second, np.int32), at, nearest=nearest, common_length=at)
    explained = explain(found, decode_parting(texts, llm.tokenizer))
    assert found["is_miss"] and found["cause"] in (miss.cause, "diverged")
    assert explained["cause"] == miss.cause and miss.words in explained["explanation"], explained
    parts_at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if parts_at is not None:
        assert found["common_tokens"] == found["cached_tokens"] == parts_at
        shown = (
            llm.tokenizer.decode(second[parts_at : parts_at + 4]),
            llm.tokenizer.decode(first[parts_at : parts_at + 4]),
        )
        assert found["prompt_text"].startswith(shown[0]) and found["nearest_text"].startswith(shown[1])
        assert llm.tokenizer.decode(second[:parts_at]).endswith(found["before"])


def test_the_table_has_twelve_misses() -> None:
    assert len(MISSES) == 12


# ---- other outcomes --------------------------------------------------------------------------------------------------


def test_a_prompt_that_misses_nothing_is_told_so(llm: LLM) -> None:
    ids = llm.encode(QUESTION)
    assert ask(llm, ids)["cause"] == "first_text"
    again = ask(llm, ids)
    assert (again["cause"], again["is_miss"], again["computed_tokens"]) == ("complete", False, 1)
    (answer,) = llm.generate(ids, THREE_TOKENS)
    longer = ask(llm, [*ids, *answer.token_ids, *llm.encode(" And its price?")])
    assert (longer["cause"], longer["is_miss"], longer["nearest_text"]) == ("new_text", False, "")
    assert longer["cached_tokens"] == len(ids) + 2  # the last token of an answer is never computed


@pytest.mark.parametrize("llm", [{"prefix_cache": "off"}], indirect=True)
def test_an_engine_without_prefix_cache_says_so(llm: LLM) -> None:
    assert ask(llm, llm.encode(QUESTION))["cause"] == "off"


def explained(prompt: Sequence[int], **fields: Any) -> Any:
    return make_request(prompt, 4, explain_prefix=True, **fields)


def diagnosis_of(request: Any) -> PrefixDiagnosis:
    found = request.stats.prefix_diagnosis
    assert isinstance(found, PrefixDiagnosis)
    return found


def test_a_text_that_another_request_is_computing_is_in_progress() -> None:
    engine = make_engine("llama", prefix_cache="exact", max_batched_tokens=66)
    first, second = explained([*range(90), 1]), explained([*range(90), 2])
    engine.add(first)
    engine.step()
    engine.add(second)
    for _ in iter_steps(engine):
        pass
    found = diagnosis_of(second)
    assert found.reason is MissReason.IN_PROGRESS and found.known_length == 90


def test_sliding_layers_resume_only_where_windows_are_stored() -> None:
    """The second text finds no window where it leaves the first, and stores one; the third resumes there."""
    engine = make_engine("gemma3_text", prefix_cache="exact")
    requests = [explained([*range(70), *([i] * 40)]) for i in (1, 2, 3)]
    for request in requests:
        run_to_completion(engine, [request])
    second, third = map(diagnosis_of, requests[1:])
    assert second.reason is MissReason.NO_SNAPSHOT
    assert second.common_length == 70 and second.num_cached_tokens == 0
    assert third.reason is MissReason.DIVERGED and third.num_cached_tokens == 64


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prompt_of_less_than_a_page_is_explained(family: str) -> None:
    """With sliding layers nothing of it can be cached; that it is computed under another policy is a fact."""
    engine = make_engine(family, prefix_cache="exact")
    first, same, other = (explained(range(12), policy=p) for p in ("full", "full", "ring:window=5"))
    for request in (first, same, other):
        run_to_completion(engine, [request])
    reasons = [diagnosis_of(r).reason for r in (first, same, other)]
    assert reasons == [MissReason.FIRST_TEXT, MissReason.COMPLETE, MissReason.OTHER_POLICY]


def test_texts_in_a_tier_are_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is no miss but for the end of a page; what is dearer to load than to compute is named."""
    engine = make_engine("llama", prefix_cache="exact", tiers=("ram:capacity=1GB",))
    prompt = list(range(100))
    reasons = []
    for text in (prompt, prompt, [*prompt[:90], 7, 8, 9, *prompt]):
        request = explained(text)
        run_to_completion(engine, [request])
        engine.cache.pool.ensure_free(engine.cache.total_pages)
        reasons.append((diagnosis_of(request).reason, diagnosis_of(request).num_cached_tokens))
    assert reasons == [(MissReason.FIRST_TEXT, 0), (MissReason.WHOLE_BLOCKS, 96), (MissReason.DIVERGED, 80)]
    assert diagnosis_of(request).common_length == 90
    monkeypatch.setattr(AlwaysLoad, "should_load", lambda *_: False)
    run_to_completion(engine, [request := explained(prompt)])
    found = diagnosis_of(request)
    assert (found.reason, found.detail, found.known_length) == (MissReason.NOT_LOADED, "ram", 96)


INSIDE = "more tokens are known, inside a block of 32"


@pytest.mark.parametrize(
    ("prompt_len", "cut", "more", "reason", "num_cached", "detail"),
    [
        (17, 32, 3, MissReason.NEW_TEXT, 32, ""),
        (70, 85, 3, MissReason.NEW_TEXT, 85, ""),
        (20, 35, 0, MissReason.COMPLETE, 34, ""),
        (20, 20, 0, MissReason.WHOLE_BLOCKS, 0, f"19 {INSIDE}"),
        (20, 20, 9, MissReason.DIVERGED, 0, f"20 {INSIDE}"),
        (70, 70, 0, MissReason.COMPLETE, 69, ""),
        (70, 75, 60, MissReason.DIVERGED, 75, ""),
        (120, 50, 60, MissReason.NO_SNAPSHOT, 0, ""),
    ],
)
def test_what_is_inside_a_block_is_said(
    prompt_len: int, cut: int, more: int, reason: MissReason, num_cached: int, detail: str
) -> None:
    """Of layers with pages of several sizes: another text leaves an answer of 16 tokens at a place, or repeats it."""
    engine = make_engine("lfm2", prefix_cache="exact")
    first = make_request(range(prompt_len), 16, explain_prefix=True)
    run_to_completion(engine, [first])
    text = first.tokens[:cut] + [(first.tokens[cut] + 1) % 128] * more  # the answer's last token is in no cache
    run_to_completion(engine, [request := explained(text)])
    found = diagnosis_of(request)
    assert (found.reason, found.num_cached_tokens, found.detail) == (reason, num_cached, detail)
    if reason is not MissReason.COMPLETE:
        assert found.common_length == found.known_length == cut


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_tiers_say_that_they_keep_whole_blocks(family: str, is_restarted: bool, tmp_path: Path) -> None:
    """A text of less than a block is gone with the pool; of a longer one the tokens behind its last whole block are."""
    tiers = [f"disk:path={tmp_path},capacity=100MB"]
    engine = make_engine(family, prefix_cache="exact", tiers=tiers)
    block = engine.cache.planner.block_size
    found = []
    for length in (block - 8, 2 * block + 2):
        first = explained([length] * length)
        run_to_completion(engine, [first])
        engine.cache.pool.ensure_free(engine.cache.total_pages)
        assert isinstance(engine.cache.prefix_cache, PrefixCache) and engine.cache.prefix_cache.offloader
        engine.cache.prefix_cache.offloader.sync()
        if is_restarted:
            engine.cache.prefix_cache.close_offloader()
            engine = make_engine(family, prefix_cache="exact", tiers=tiers)
        run_to_completion(engine, [request := explained([*first.tokens, 1, 2, 3])])
        d = diagnosis_of(request)
        found.append((d.reason, d.num_cached_tokens, d.detail))
        engine.cache.pool.ensure_free(engine.cache.total_pages)
    engine.cache.prefix_cache.close_offloader()
    words = f"tiers keep whole blocks of {block} tokens"
    short = MissReason.FIRST_TEXT if is_restarted else MissReason.EVICTED
    long = MissReason.WHOLE_BLOCKS if is_restarted else MissReason.NEW_TEXT
    more = words if is_restarted else f"5 more tokens are known, inside a block of {block}"
    assert found == [(short, 0, words), (long, 2 * block, more)]


@pytest.mark.parametrize("end", ["kept", "evicted", "in a tier", "edited", "computing", "other", "off"])
def test_budgets_say_why_they_do_not_go_on(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn of a chat, whose first one has left a state after 93 tokens, or would have."""
    policy = "h2o:budget=25%,resume=off" if end == "off" else "h2o:budget=25%"
    engine = make_engine("llama", prefix_cache="exact", tiers=("ram:capacity=1GB",) if end == "in a tier" else ())
    first = explained(range(90), policy=policy)
    engine.add(first)
    if end == "computing":
        engine.step()
    else:
        run_to_completion(engine, [])
    text = [*range(90), *first.output_tokens, 1, 2, 3]
    if end in ("evicted", "in a tier"):
        engine.cache.pool.ensure_free(engine.cache.total_pages)
        monkeypatch.setattr(AlwaysLoad, "should_load", lambda *_: False)
    if end == "edited":
        text[80] = 127
    second = explained(text, policy="tova:budget=25%" if end == "other" else policy)
    engine.add(second)
    run_to_completion(engine, [])
    found = diagnosis_of(second)
    expected = {
        "kept": (MissReason.NEW_TEXT, 93, ""),
        "evicted": (MissReason.EVICTED, 0, ""),
        "in a tier": (MissReason.NOT_LOADED, 0, "ram"),
        "edited": (MissReason.OWN_POLICY, 0, "h2o:budget=24,recent=7"),  # masses are kept at ends of prompts only
        "computing": (MissReason.IN_PROGRESS, 80, ""),  # the whole pages of its prompt
        "other": (MissReason.NOT_STORED, 80, "h2o:budget=22,recent=6"),
        "off": (MissReason.NOT_STORED, 80, "h2o:budget=22,recent=6,resume=off"),
    }
    assert (found.reason, found.num_cached_tokens, found.detail) == expected[end]
    assert found.known_length == {"edited": 80, "computing": 90, "other": 90, "off": 90}.get(end, 93)
    assert (found.age is not None) == (end == "evicted")


@pytest.mark.parametrize("at", [20, 60, 80])
def test_streamed_budgets_say_between_where_no_state_is(at: int) -> None:
    """Its pages hold a selection from the first chunk on, and a chat keeps its ends alone."""
    policy = "h2o:budget=40,prefill=stream,chunk=24"
    engine = make_engine("llama", prefix_cache="exact")
    first = explained(range(90), policy=policy)
    run_to_completion(engine, [first])
    text = [*range(90), *first.output_tokens, 1, 2, 3]
    text[at] = 127
    second = explained(text, policy=policy)
    run_to_completion(engine, [second])
    found = diagnosis_of(second)
    assert (found.reason, found.num_cached_tokens, found.known_length) == (MissReason.NO_STATE, 0, at)
    said = explain(describe_prefix(found, open_tokenizer("smollm2")), Parting("", "", ""))
    assert found.common_length == at and f"(none between 0 and {at} tokens)" in said["explanation"]


def test_followers_of_an_equal_prompt_have_the_diagnosis_of_their_leader() -> None:
    engine = make_engine("llama", prefix_cache="exact")
    requests = [explained(range(50)), explained(range(50))]
    engine.add(*requests)
    for _ in iter_steps(engine):
        pass
    assert diagnosis_of(requests[0]) is diagnosis_of(requests[1])


# ---- whose texts it may see ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["cached", "evicted", "in progress", "not kept", "other windows"])
def test_a_diagnosis_knows_nothing_of_another_salt(state: str) -> None:
    engine, prompt = make_engine("llama", prefix_cache="exact", max_batched_tokens=66), list(range(100))
    policy = {"not kept": "h2o:budget=40", "other windows": "ring:window=30"}.get(state, "full")
    other, request = explained(prompt, salt="a", policy=policy), explained(prompt, salt="b")
    engine.add(other)
    engine.step()
    if state != "in progress":
        for _ in iter_steps(engine):
            pass
    if state == "evicted":
        engine.cache.pool.ensure_free(engine.cache.total_pages)
    engine.add(request)
    for _ in iter_steps(engine):
        pass
    found = diagnosis_of(request)
    assert (found.reason, found.known_length, found.common_length) == (MissReason.FIRST_TEXT, 0, 0)
    assert not len(found.nearest) and found.age is None and not found.detail
    same_salt = explained(prompt[:90], salt="a")
    run_to_completion(engine, [same_salt])
    assert diagnosis_of(same_salt).known_length >= 80  # it would have been found


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_it_costs_nothing_when_nobody_asks(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """No look-up, no history; a single request that asks makes one look-up."""
    calls = []
    for cls, name in ((RadixTree, "nearest_text"), (PrefixCache, "keep_history")):
        original = getattr(cls, name)

        def count(*args: Any, original: Any = original, name: str = name) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(cls, name, count)
    for prompt in (QUESTION, f"Today is Monday. {RULES}", f"Today is Tuesday. {RULES}"):
        (output,) = llm.generate(prompt, THREE_TOKENS)
        assert output.prefix is None
    prefix_cache = llm.cache.prefix_cache
    assert isinstance(prefix_cache, PrefixCache) and prefix_cache.tree.history is None and not calls
    ask(llm, llm.encode(f"Today is Sunday. {RULES}"))
    assert "nearest_text" in calls


def test_asking_changes_neither_tokens_nor_what_is_evicted_next(llm: LLM) -> None:
    tree = llm.cache.prefix_cache.tree  # type: ignore[union-attr]
    plain = [llm.generate(p, THREE_TOKENS)[0].token_ids for p in (QUESTION, RULES)]
    nodes = {id(n): (n.last_used, n.hits) for n in tree.iter_nodes()}
    tree.nearest_text(next(iter(tree.roots)), Text())
    assert {id(n): (n.last_used, n.hits) for n in tree.iter_nodes()} == nodes
    tree.clear()
    asked = [llm.generate(p, THREE_TOKENS, explain_prefix=True)[0].token_ids for p in (QUESTION, RULES)]
    assert plain == asked


def test_the_debug_log_has_the_cause_and_none_of_the_text(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="retain"):
        for day in ("Monday", "Tuesday"):
            (output,) = llm.generate(f"The shop on {day}. {RULES}", THREE_TOKENS)
            assert output.prefix is None  # only the log was asked for
    (line,) = [r.getMessage() for r in caplog.records if "diverged" in r.getMessage()]
    assert "12 of" in line and "day" not in line and "shop" not in line


def test_the_history_is_bounded() -> None:
    engine = make_engine("llama", prefix_cache="exact")
    prefix_cache = engine.cache.prefix_cache
    assert isinstance(prefix_cache, PrefixCache)
    history = prefix_cache.keep_history()
    history.max_texts, history.max_tokens = 3, 150
    for i in range(6):
        run_to_completion(engine, [make_request([i] * 60, 2)])
        assert history.num_tokens == sum(len(t.tokens) for t in history.texts) <= 150
    assert len(history.texts) == 2 and not any(t.is_running for t in history.texts)
    assert [int(t.tokens[0]) for t in history.texts] == [4, 5]
