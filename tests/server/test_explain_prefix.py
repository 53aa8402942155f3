"""`explain_prefix` over HTTP: in every choice, in streams, and never with the text of another key or salt."""

import json

from prefix_doctor.__main__ import main
from tests.helpers.cli import run_cli
from tests.server.conftest import API_KEYS, HTTP

STORY = (
    "Today is 2026-01-{day}. Once upon a time there was a lamp that nobody could put out, and people came to see it."
)


def complete(server, prompt, headers=None, **fields):
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    response = HTTP.post(f"{server.url}/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def prefixes(server, prompt, **fields):
    answer = complete(server, prompt, explain_prefix=True, **fields).json()
    details = answer["usage"]["prompt_tokens_details"]
    found = [choice["prefix"] for choice in answer["retain"]]
    assert found[0]["cached_tokens"] == details["cached_tokens"]
    return found


def test_every_choice_says_why_no_more_was_cached(tiny_server):
    complete(tiny_server, STORY.format(day=26))
    found = prefixes(tiny_server, STORY.format(day=27), n=2)
    assert found[0] == found[1] and len(found) == 2
    assert found[0]["cause"] == "diverged" and found[0]["is_miss"]
    assert found[0]["common_tokens"] == STORY.index("{") + 1
    assert found[0]["prompt_text"].startswith("7. Once") and found[0]["nearest_text"].startswith("6. Once")
    assert prefixes(tiny_server, STORY.format(day=27))[0]["cause"] == "complete"
    for fields in ({}, {"explain_prefix": False}):
        assert "prefix" not in complete(tiny_server, STORY.format(day=28), **fields).json()["retain"][0]


def test_the_doctor_explains_what_an_answer_says(tiny_server, tmp_path, capsys):
    """Both choices, without a model: the texts that an answer shows are enough for a date."""
    complete(tiny_server, "The doctor. " + STORY.format(day=16))
    answer = complete(tiny_server, "The doctor. " + STORY.format(day=17), explain_prefix=True, n=2)
    file = tmp_path / "answers.jsonl"
    file.write_text(answer.text)
    result = run_cli(capsys, file, "--json", main=main)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [f["cause"] for f in found] == ["date_or_id"] * 2, result
    said = answer.json()["retain"][0]["prefix"]
    assert found[0] == said | {k: found[0][k] for k in ("cause", "reason", "explanation", "request", "nearest")}


def test_a_stream_says_it_with_its_usage(tiny_server):
    for day in (11, 12):
        fields = {"stream": True, "stream_options": {"include_usage": True}, "explain_prefix": True}
        events = complete(tiny_server, "A stream. " + STORY.format(day=day), **fields).text.split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["retain"][0]["prefix"]["cause"] == "diverged"


def test_an_answer_never_has_text_of_another_key_or_salt(secured_server):
    """Bob repeats Ann's prompt, with and without the salt that Ann chose, and learns nothing."""
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in API_KEYS.values())
    secret = "~ the code of the door is 4417, and the second one is 9923. " * 2
    complete(secured_server, secret, ann, cache_salt="s", explain_prefix=True)
    begin = secret[: secret.index("4417")]
    for headers, salt in ((bob, "s"), (bob, ""), (ann, "t"), (ann, "")):
        (found,) = prefixes(secured_server, begin, headers=headers, cache_salt=salt)
        assert found["common_tokens"] == found["known_tokens"] == 0  # other tests use these keys, without a "~"
        assert "4417" not in json.dumps(found)
    assert prefixes(secured_server, begin + "???", headers=ann, cache_salt="s")[0]["nearest_text"].startswith("4417")
