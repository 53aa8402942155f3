"""`--normalize-prompts`: a list of tasks at the end of a system prompt, and the history that it no longer moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.chat_renderer import MOVED_TAIL
from retain.server.openai.system_tails import SystemTails
from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers, save_agent_model
from tests.server.conftest import HTTP, run_server, wait_until
from tests.server.test_chat_turns import GLM, SPECIAL, TEMPLATES

RULES = "You are a coding agent. Read before you write.\nSay what you did.\n" * 12
ANSWER = "Read file {} of the cache, and found keys and values in it."
NUM_TURNS = 8
SYSTEM_FIRST = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# It drops what was thought before the last question, as most do, so a new last message changes the history.
SHOWS_LAST = """{%- for m in messages %}<|{{ m.role }}|>{% if loop.index0 == messages | length - 2 %}*{% endif %}
{{- m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

FIRST_SYSTEM = """{%- for m in messages if m.role == 'system' %}<|system|>{{ m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# As Qwen3.5's: one system message, and what was thought since the last question of a user.
LAST_QUESTION = """{%- set ns = namespace(last=0) %}{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}
{%- endfor %}{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def system_prompt(turn: int) -> str:
    tasks = [f"- [{'x' if i < turn else ' '}] read file {i}" for i in range(NUM_TURNS)]
    return "\n".join([RULES, "# Tasks", "", *tasks])


def agent_turns() -> list[dict[str, Any]]:
    """Return the requests of an agent that shows its tasks in the system prompt, with tools or without."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Read all files. " * 20}]
    turns = []
    for turn in range(NUM_TURNS):
        system = {"role": "system", "content": system_prompt(turn)}
        turns.append({"model": "smollm2", "temperature": 0, "messages": [system, *history]})
        history += [{"role": "assistant", "content": ANSWER.format(turn)}, {"role": "user", "content": "Go on. " * 20}]
    return turns


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("template", ["agent", "qwen3", "glm", "first"])
def test_a_changing_end_of_the_system_prompt_costs_no_history(tmp_path, template, family):
    """From the fourth request on, all before the last answer is found: also by windows and states."""
    texts = {"agent": AGENT_TEMPLATE, "qwen3": (TEMPLATES / "qwen3.jinja").read_text(), "glm": GLM}
    folder = save_agent_model(tmp_path, family, SPECIAL)
    options = {"kv_memory": "64MiB", "dtype": "float32", "page_size": 16, "max_model_len": 16384}
    with run_server(str(folder), options, texts.get(template, SYSTEM_FIRST), normalize_prompts=True) as server:
        answers = []
        for turn, body in enumerate(agent_turns()):
            with dictated_answers(server, [ANSWER.format(turn)]):
                answers.append(HTTP.post(f"{server.url}/chat/completions", json=body | {"return_token_ids": True}))
            wait_until(lambda: not server.service.admission.num_in_flight)
        tokenizer = server.service.llm.tokenizer
    most_lost = 40 if family == "llama" else 40 + 64  # the markup before the answer, and a block of windows or states
    notes = [answer.headers.get("x-retain-warning") for answer in answers]
    assert notes == [None] * 2 + [MOVED_TAIL] * (NUM_TURNS - 2)
    for turn, answer in enumerate(answers):
        found = answer.json()
        text = tokenizer.decode_raw(found["prompt_token_ids"])
        assert all(text.count(line) == 1 for line in system_prompt(turn).split("\n# ")[1].splitlines() if line)
        if turn < 3:
            continue
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        num_old = len(tokenizer.encode(text[: text.index(ANSWER.format(turn - 1))], add_special_tokens=False))
        assert num_old - most_lost <= cached <= num_old


@pytest.mark.parametrize("template", [SHOWS_LAST, FIRST_SYSTEM, LAST_QUESTION], ids=["last", "hoisted", "question"])
def test_a_template_that_shows_the_history_otherwise_then_is_left_alone(tmp_path, template):
    """Also where it would do so only behind the result of a tool: a prompt that flips is found less than before."""
    folder = save_agent_model(tmp_path, "llama")
    with run_server(str(folder), {"kv_memory": "64MiB"}, template, normalize_prompts=True) as server:
        for body in agent_turns():
            answer = HTTP.post(f"{server.url}/chat/completions", json=body | {"max_tokens": 1})
            assert "x-retain-warning" not in answer.headers


def body_of(system: str, *texts: str, salt: str | None = None) -> ChatCompletionRequest:
    history = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ChatCompletionRequest(model="m", cache_salt=salt, messages=[{"role": "system", "content": system}, *history])


def tasks(i: int) -> str:
    return f"{RULES}\n# Tasks\n\n- {i}\n- more"


def note_turns(tails: SystemTails, key: str, prompts: list[str], salt: str | None = None) -> None:
    """Note the requests of a conversation, one a system prompt."""
    texts = ["Hi"]
    for prompt in prompts:
        tails.note(key, body_of(prompt, *texts, salt=salt))
        texts += ["Yes", "On"]


def test_only_conversations_that_go_on_tell_of_an_end_that_changes():
    tails = SystemTails()
    for i in range(9):
        tails.note("k", body_of(tasks(i), "Hi"))  # one conversation each, perhaps
    note_turns(tails, "k", [tasks(0), tasks(1)])
    note_turns(tails, "other", [tasks(0), tasks(1), tasks(2)])
    note_turns(tails, "k", [tasks(0), tasks(1), tasks(2)], salt="s")
    assert tails.split("k", body_of(tasks(9), "Hi")) is None
    note_turns(tails, "k", [tasks(0), tasks(1), tasks(2)])
    assert tails.split("k", body_of(tasks(9), "Hi")) == (f"{RULES}\n", "# Tasks\n\n- 9\n- more")
    assert tails.split("k", body_of(f"{RULES}\n")) is None
    assert tails.split("k", body_of(tasks(9), "Hi", salt="t")) is None


def test_an_end_that_changes_once_a_day_stays_and_one_that_no_longer_changes_goes_back():
    tails = SystemTails()
    note_turns(tails, "k", [tasks(0), *[tasks(1)] * 20, tasks(2)])
    assert tails.split("k", body_of(tasks(2), "Hi")) is None
    note_turns(tails, "k", [tasks(3), *[tasks(4)] * 2, tasks(5)])
    assert tails.split("k", body_of(tasks(5), "Hi"))
    note_turns(tails, "k", [tasks(5)] * 40)
    assert tails.split("k", body_of(tasks(5), "Hi")) is None


def test_what_is_most_of_a_system_prompt_is_no_end():
    tails = SystemTails()
    prompts = [f"Be brief.\nIt is 10:3{i}.\n{RULES}" for i in range(5)]
    note_turns(tails, "k", prompts)
    assert tails.split("k", body_of(prompts[-1], "Hi")) is None


LINES = st.lists(st.sampled_from(["# Tasks", "", "- a", "- b", "<env>", "Now:", "It is.", "\r", "\ud800"]), max_size=12)


@given(LINES, LINES, LINES)
def test_the_parts_are_the_whole(head, before, after):
    tails = SystemTails()
    one, two = ("\n".join([*head, *lines]) for lines in (before, after))
    note_turns(tails, "k", [one, two, one, two])
    for text in (one, two):
        if parts := tails.split("k", body_of(text, "Hi")):
            assert "".join(parts) == text and (one + "\n").startswith(parts[0]) and (two + "\n").startswith(parts[0])
