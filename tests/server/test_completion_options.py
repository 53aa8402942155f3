"""Fields of other engines that completions honour: names for the same thing, usage in every chunk, token ids."""

import json
import re

import pytest

from tests.server.conftest import HTTP, chat_template_replaced

MESSAGES = [{"role": "user", "content": "Hello there"}]
CHAT = ("/chat/completions", {"messages": MESSAGES})
TEXT = ("/completions", {"prompt": ["Hello there", "Good bye"]})
GREEDY = {"model": "smollm2", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def post(server, path, body):
    response = HTTP.post(f"{server.url}{path}", json=body)
    assert response.status_code == 200, response.text
    return response


def complete(server, path, **fields):
    return post(server, path, {"model": "smollm2", **fields}).json()


def stream(server, path, **fields):
    text = post(server, path, {"model": "smollm2", "stream": True, **fields}).text
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT])
def test_continuous_usage_counts_what_was_sent(tiny_server, path, prompt):
    """With several choices, text that is held back may have been counted in the chunk of another choice."""
    prompt = prompt if "messages" in prompt else {"prompt": prompt["prompt"][0]}
    fields = {**GREEDY, **prompt, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, end = stream(tiny_server, path, **fields, stream_options=options)
    num_sent = 0
    for chunk in chunks:
        num_sent += sum(len(c["token_ids"]) for c in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == num_sent
        assert chunk["usage"]["prompt_tokens"] == end["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"] == end["usage"] and num_sent == 6
    with_usage = stream(tiny_server, path, **fields, stream_options={"include_usage": True})
    assert [c["usage"] for c in with_usage[:-1]] == [None] * len(chunks)
    without = stream(tiny_server, path, **fields, stream_options={"continuous_usage_stats": True})
    assert len(without) == len(chunks) and not any("usage" in c for c in without)


@pytest.mark.parametrize("stop", [[], ["e", "a", "i", "o"]])
@pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT])
def test_token_ids_are_those_of_prompt_and_answer(tiny_server, path, prompt, stop):
    """Streamed ones are those of the full answer, also where text is held back."""
    fields = {**GREEDY, **prompt, "n": 2, "seed": 3, "temperature": 1, "stop": stop}
    full = complete(tiny_server, path, **fields, return_token_ids=True)
    rendered = complete(tiny_server, f"{path}/render", **fields)
    rendered = rendered if isinstance(rendered, list) else [rendered]
    choices = full["choices"]
    prompts = [c.get("prompt_token_ids", full.get("prompt_token_ids")) for c in choices]
    assert prompts == [r["token_ids"] for r in rendered for _ in range(2)]
    assert sum(len(c["token_ids"]) for c in choices) == full["usage"]["completion_tokens"]
    decode = tiny_server.service.llm.tokenizer.decode
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert decode(choice["token_ids"]).startswith(text)
    streamed, first = {}, {}
    for event in stream(tiny_server, path, **fields, return_token_ids=True):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
            first.setdefault(choice["index"], choice.get("prompt_token_ids", event.get("prompt_token_ids")))
    assert [streamed[c["index"]] for c in choices] == [c["token_ids"] for c in choices]
    assert [first[c["index"]] for c in choices] == prompts
    assert "token_ids" not in complete(tiny_server, path, **fields)["choices"][0]


SAMPLED = {"seed": 5, "temperature": 0.8, "max_tokens": 20}


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"top_k": -1}, {}),
        ({"repeat_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repeat_penalty": 1.7, "repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
        ({"max_tokens": None, "n_predict": 9}, {"max_tokens": 9}),
        ({"n_predict": 9}, {}),
        ({"max_tokens": -1, "stop": "e"}, {"max_tokens": 10**6, "stop": "e"}),
        ({"top_p": 0}, {"temperature": 0}),
        ({"stop": "", "grammar": "", "kv_policy": "", "pin": 0}, {}),
    ],
)
@pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT])
def test_names_of_other_engines_mean_the_same(tiny_server, path, prompt, fields, same):
    ours, theirs = (complete(tiny_server, path, **prompt, **SAMPLED | f)["choices"] for f in (same, fields))
    assert ours == theirs


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/messages", {"messages": MESSAGES, "max_tokens": 6}),
        ("/responses", {"input": "Hello there", "max_output_tokens": 6}),
        ("/completions", {"prompt": "Hello there", "max_tokens": 6, "suffix": "", "seed": -1}),
        ("/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "seed": -1}),
    ],
)
def test_a_top_p_of_zero_is_greedy(tiny_server, path, prompt):
    """An empty suffix is none, and a seed of -1 changes nothing in what is not random."""
    greedy, narrow = (complete(tiny_server, path, **prompt, **f) for f in ({"temperature": 0}, {"top_p": 0}))
    names = [name for name in ("content", "output", "choices") if name in greedy]
    texts = [json.dumps([answer[name] for name in names]) for answer in (greedy, narrow)]
    first, second = (re.sub('"id": "[^"]*"', "", text) for text in texts)
    assert names and first == second


@pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT])
def test_a_seed_of_minus_one_is_random(tiny_server, path, prompt):
    fields = {**prompt, "temperature": 2, "max_tokens": 20, "ignore_eos": True}
    answers = [json.dumps(complete(tiny_server, path, **fields, seed=-1)["choices"]) for _ in range(2)]
    assert answers[0] != answers[1]


def test_a_penalty_of_llama_cpp_has_an_effect(tiny_server):
    """Without it the law above would hold for a field that is ignored."""
    path, prompt = CHAT
    plain, penalized = (complete(tiny_server, path, **prompt, **SAMPLED, **f) for f in ({}, {"repeat_penalty": 1.7}))
    assert plain["choices"] != penalized["choices"]


@pytest.mark.parametrize("path", [CHAT[0], TEXT[0]])
def test_min_tokens_hold_back_stop_tokens_and_strings(server, path):
    prompt = {"messages": MESSAGES} if path == CHAT[0] else {"prompt": "The capital of France is"}
    fields = {"temperature": 0, "max_tokens": 16, **prompt, "stop": [" "]}
    short = complete(server, path, **fields, return_token_ids=True)
    longer = complete(server, path, **fields, min_tokens=8, return_token_ids=True)
    ids = [answer["choices"][0]["token_ids"] for answer in (short, longer)]
    assert len(ids[0]) < 8 < len(ids[1]) and ids[1][: len(ids[0])] == ids[0]
    error = HTTP.post(f"{server.url}{path}", json={"model": "smollm2", **fields, "min_tokens": 17}).json()["error"]
    assert error["param"] == "min_tokens" and "that are asked for" in error["message"]


TEMPLATE = """{{ messages[0].content }}
{%- if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif %}
{%- if enable_thinking is defined %} thinking={{ enable_thinking }}{% endif %}
{%- if style is defined %} style={{ style.name }}{% endif %}"""


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"reasoning_effort": "high"}, " effort=high thinking=True"),
        ({"reasoning_effort": "none"}, " effort=none thinking=False"),
        ({"reasoning": {"effort": "low"}}, " effort=low thinking=True"),
        ({"reasoning": {"enabled": False}}, " thinking=False"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, " effort=low thinking=False"),
        ({"chat_template_kwargs": {"style": {"name": "dry"}, "unused": [1]}}, " style=dry"),
        ({"chat_template_kwargs": {"style": None}}, ""),
    ],
)
def test_variables_reach_the_chat_template(tiny_server, fields, shown):
    with chat_template_replaced(tiny_server, TEMPLATE):
        rendered = complete(tiny_server, "/chat/completions/render", messages=MESSAGES, **fields)
    assert tiny_server.service.llm.tokenizer.decode(rendered["token_ids"]) == "Hello there" + shown
