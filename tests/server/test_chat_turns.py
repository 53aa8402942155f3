"""What was thought is not history: the next turn finds what it can begin with, and dead branches hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retain.kv.text import Text
from retain.sequences import count_common
from retain.server.launch import GracefulServer
from tests.server.agent_model import dictated_answers, save_agent_model
from tests.server.conftest import HTTP, run_in_engine_thread, run_server, wait_until

TEMPLATES = Path(__file__).parents[1] / "helpers" / "chat_templates"
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text()
# As GLM-4.5's: answers before the last question have an empty thought, and an answer begins with the role alone.
GLM = """[gMASK]<sop>{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- elif m.role == 'assistant' %}<|assistant|>
<think>{% if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content.strip() }}{% endif %}</think>
{%- if m.content %}
{{ m.content.strip() }}{% endif %}
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# As Qwen3.5's: the prompt opens the reasoning.
OPEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@dataclass(frozen=True)
class Style:
    """A template, and how its model writes an answer behind a thought."""

    template: str
    answer: str
    model: str = "llama"


STYLES = {
    "qwen3": Style(QWEN3, "<think>\n{}\n</think>\n\n{}"),
    "gpt-oss": Style(
        (TEMPLATES / "gpt_oss.jinja").read_text(),
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    ),
    "glm": Style(GLM, "\n<think>{}</think>\n{}"),
    "qwen3, sliding windows": Style(
        (TEMPLATES / "qwen3.jinja").read_text(), "<think>\n{}\n</think>\n\n{}", "gemma3_text"
    ),
    "opened, sliding windows": Style(OPEN, "{}\n</think>\n\n{}", "gemma3_text"),
    "opened, states": Style(OPEN, "{}\n</think>\n\n{}", "qwen3_5_text"),
}
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "<|return|>",
    "<|call|>",
    "<|constrain|>",
]
QUESTION = "Tell me more of the pages of a cache, and of number {0}, as long as it takes. " * 3
ANSWER = "Page {0} holds keys and values. " * 4
THOUGHT = "I wonder what they mean by {0}; let me think about it for a while. " * 4
NUM_TURNS = 10


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> Style:
    return STYLES[request.param]


@pytest.fixture
def server(style: Style, tmp_path: Path) -> Iterator[GracefulServer]:
    folder = save_agent_model(tmp_path, style.model, SPECIAL)
    options = {"kv_memory": "64MiB", "dtype": "float32", "page_size": 16, "max_model_len": 16384}
    with run_server(str(folder), options, style.template) as running:
        yield running


def test_the_next_turn_finds_what_it_can_and_thoughts_hold_no_pages(server: GracefulServer, style: Style) -> None:
    """Found is at least 95 % of what any cache could find, and dead branches have at most 5 % of the pages."""
    messages: list[dict[str, Any]] = []
    texts: list[list[int]] = []
    num_found = num_possible = 0
    llm = server.service.llm
    for i in range(NUM_TURNS):
        messages.append({"role": "user", "content": QUESTION.format(i)})
        body = {"model": "smollm2", "messages": messages, "temperature": 0, "return_token_ids": True}
        with dictated_answers(server, [style.answer.format(THOUGHT.format(i), ANSWER.format(i))]):
            answer = HTTP.post(f"{server.url}/chat/completions", json=body).json()
        (choice,) = answer["choices"]
        assert choice["message"]["reasoning_content"].strip() == THOUGHT.format(i).strip()
        assert choice["message"]["content"].strip() == ANSWER.format(i).strip()
        prompt = answer["prompt_token_ids"]
        num_possible += max((count_common(text, prompt) for text in texts), default=0)
        num_found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        texts.append(prompt + choice["token_ids"])
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        wait_until(lambda: not server.service.admission.num_in_flight)
    assert num_found >= 0.95 * num_possible > 0
    following = HTTP.post(
        f"{server.url}/chat/completions/render",
        json={"model": "smollm2", "messages": [*messages, {"role": "user", "content": "0"}]},
    ).json()["token_ids"]

    def count_pages() -> tuple[int, int]:
        tree = llm.cache.prefix_cache.tree
        (link,) = tree.roots
        alive = tree.match_prefix(link, Text(following), len(following))
        return len(set(alive.pages[alive.pages > 0].tolist())), sum(node.page_list.size for node in tree.iter_nodes())

    num_alive, num_held = run_in_engine_thread(server, count_pages).result(60)
    assert num_held - num_alive <= 0.05 * num_held
