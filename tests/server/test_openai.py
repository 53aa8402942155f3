"""OpenAI's own client, and what it is told: the engine's answers, whole and as streams."""

import json

import openai
import pytest

from retain import SamplingParams
from retain.desk import GenerateRequest

STORY = "Once upon a time there was a lamp that nobody could put out."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(server):
    return server.service.llm


def generate_in_engine(server, **fields):
    """The same of the engine itself, in its own thread."""
    import asyncio

    service = server.service
    future = asyncio.run_coroutine_threadsafe(
        service.worker.call(lambda: service.llm.ask([GenerateRequest(**fields)])), service.worker._loop
    )
    return future.result(60)


def test_list_and_get_models(client, server):
    (model,) = client.models.list().data
    assert model.id == "smollm2" and client.models.retrieve("smollm2").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_chat_completion_equals_engine(client, server, llm):
    said = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_completion_tokens=12, temperature=0)
    (own,) = generate_in_engine(
        server, prompt=llm.tokenizer.encode_chat(MESSAGES), params=SamplingParams(max_tokens=12, temperature=0)
    )
    assert said.choices[0].message.content == own.text and "Paris" in own.text
    assert said.choices[0].finish_reason == own.why
    assert said.usage.prompt_tokens == own.prompt_tokens and said.usage.completion_tokens == len(own.token_ids)
    assert said.retain[0]["kv"]["bytes_peak"] > 0


@pytest.mark.parametrize(
    "more", [{}, {"stop": ["lamp", "light"]}, {"logprobs": 2}, {"n": 3, "temperature": 0.8, "seed": 5}]
)
def test_completion_stream_equals_full(client, fields):
    asked = {"model": "smollm2", "prompt": STORY, "max_tokens": 24, "temperature": 0, **fields}
    whole = client.completions.create(**asked)
    text, usage, reasons, tokens = {}, None, {}, {}
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for c in chunk.choices:
            text[c.index] = text.get(c.index, "") + c.text
            reasons[c.index] = c.finish_reason or reasons.get(c.index)
            if c.logprobs:
                tokens.setdefault(c.index, []).extend(zip(c.logprobs.tokens, c.logprobs.text_offset, strict=True))
        usage = chunk.usage or usage
    assert [text[c.index] for c in whole.choices] == [c.text for c in whole.choices]
    assert [reasons[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    for c in whole.choices:
        if c.logprobs:
            assert tokens[c.index] == list(zip(c.logprobs.tokens, c.logprobs.text_offset, strict=True))
            assert "".join(c.logprobs.tokens) == c.text and len(c.logprobs.top_logprobs[0]) == 2
    assert len({c.text for c in whole.choices}) == len(whole.choices)


def test_chat_stream_equals_full(client):
    asked = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=3).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    spelled = [t.token for c in chunks for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert spelled == [t.token for t in whole.logprobs.content]
    for t in whole.logprobs.content:
        assert bytes(t.bytes).decode() == t.token and t.top_logprobs[0].logprob >= t.logprob


def test_sampling_params_reach_the_engine(client, server):
    """Every parameter reaches the engine: the same draws as its own."""
    names = {"temperature": 0.9, "top_p": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    ours = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    said = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=20, logit_bias={"260": -100.0}, **names, extra_body=ours
    )
    params = SamplingParams(max_tokens=20, logit_bias=((260, -100.0),), **names, **ours)
    assert said.choices[0].text == generate_in_engine(server, prompt=STORY, params=params)[0].text
    plain = generate_in_engine(server, prompt=STORY, params=SamplingParams(max_tokens=20, **names, **ours))[0]
    assert 260 in plain.token_ids, "the bias would show nothing"


def test_token_id_and_multiple_prompts(client, llm):
    ids = llm.encode(STORY)
    asked = {"model": "smollm2", "max_tokens": 8, "temperature": 0}
    one, two = (client.completions.create(prompt=p, **asked).choices[0].text for p in (STORY, "The sea"))
    both = client.completions.create(prompt=[ids, llm.encode("The sea")], **asked)
    assert [c.text for c in both.choices] == [one, two] and [c.index for c in both.choices] == [0, 1]
    assert both.usage.prompt_tokens == len(ids) + 2


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_echo_returns_prompt_logprobs(client, llm, tokens):
    """What lm-eval sums: log-probabilities of a prompt's own tokens, as teacher forcing finds them."""
    ids = llm.encode(STORY)
    asked = {"model": "smollm2", "max_tokens": tokens, "temperature": 0, "echo": True, "logprobs": 1}
    (said,) = client.completions.create(prompt=ids, **asked).choices
    found = said.logprobs
    assert said.text.startswith(STORY) and len(found.tokens) == len(ids) + tokens
    assert found.token_logprobs[0] is None and "".join(found.tokens) == said.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    chunks = client.completions.create(prompt=ids, stream=True, **asked)
    streamed = [x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(found.token_logprobs, abs=1e-4)


def test_echo_logprobs_equal_score(client, server, llm):
    import asyncio

    ids = llm.encode(STORY)
    (said,) = client.completions.create(
        model="smollm2", prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0
    ).choices
    worker = server.service.worker
    own = asyncio.run_coroutine_threadsafe(worker.call(lambda: llm.score([ids[:1]], [ids[1:]])), worker._loop)
    assert said.logprobs.token_logprobs[1:] == pytest.approx(own.result(60)[0], abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("speculate", ["off", "ngram", "self"])
def test_json_schema_response_format(client, speculate):
    """JSON of a schema, drawn hot; and drafts change nothing of it."""
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Describe a person."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        "max_tokens": 80,
    }
    hot = client.chat.completions.create(**asked, temperature=1.3, n=4, seed=1, extra_body={"speculate": speculate})
    for c in hot.choices:
        person = json.loads(c.message.content)
        assert set(person) == {"name", "age"} and 1 <= person["age"] <= 99 and c.finish_reason == "stop"
    cold = [
        client.chat.completions.create(**asked, temperature=0, extra_body={"speculate": s}).choices[0].message.content
        for s in ("off", speculate)
    ]
    chunks = client.chat.completions.create(**asked, temperature=0, stream=True, extra_body={"speculate": speculate})
    cold.append("".join(c.choices[0].delta.content or "" for c in chunks))
    assert cold[0] == cold[1] == cold[2]


def test_json_object_response_format(client):
    said = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    if said.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(said.choices[0].message.content), dict)
    assert said.choices[0].message.content.lstrip().startswith("{")


def test_kv_policy_per_request(client):
    long = [{"role": "user", "content": STORY * 20}]
    asked = {"model": "smollm2", "messages": long, "max_tokens": 8, "temperature": 0}
    full = client.chat.completions.create(**asked).retain[0]["kv"]
    half = client.chat.completions.create(**asked, extra_body={"kv_policy": "h2o:budget=25%"}).retain[0]["kv"]
    assert half["bytes_end"] < 0.6 * full["bytes_end"] and half["policy"].startswith("h2o")


def test_speculate_per_request(client):
    asked = {"model": "smollm2", "prompt": "one two three four " * 10, "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**asked)
    drafted = client.completions.create(**asked, extra_body={"speculate": "ngram"})
    assert drafted.choices[0].text == plain.choices[0].text
    assert plain.retain[0]["speculate"] is None and drafted.retain[0]["speculate"]["accepted"] > 0


def test_tokenize_and_detokenize(server, client, llm):
    import httpx

    root = server.url.removesuffix("/v1")
    there = httpx.post(f"{root}/tokenize", json={"prompt": STORY}).json()
    assert there["tokens"] == llm.encode(STORY) and there["count"] == len(there["tokens"])
    talk = httpx.post(f"{root}/tokenize", json={"messages": MESSAGES}).json()
    assert talk["tokens"] == llm.tokenizer.encode_chat(MESSAGES)
    assert httpx.post(f"{root}/detokenize", json={"tokens": there["tokens"]}).json()["prompt"] == STORY


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", 3, "temperature"),
        ("max_tokens", 10**6, "tokens"),
        ("messages", [{"role": "user", "content": "word " * 5000}], "context"),
        ("kv_policy", "nothing:x=1", "unknown KV policy"),
        ("kv_policy", "h2o", "needs budget"),
        ("speculate", "draft:model=/etc/passwd", "speculate is one of"),
        ("frobnicate", 1, "frobnicate"),
        ("n", 1000, "n"),
        ("stop", "", "stop"),
        ("logit_bias", {"99999999": 1.0}, "vocabulary"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user"}], "content"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("response_format", {"type": "json_schema"}, "json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, "form"),
        ("pin", 10**9, "pin"),
    ],
)
def test_invalid_field_gives_one_line_error(client, field, value, expected):
    asked = {"messages": MESSAGES, "max_tokens": 4, field: value}
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/chat/completions", cast_to=object, body={"model": "smollm2", **asked})
    body = error.value.body
    assert (
        expected in body["message"]
        and "\n" not in body["message"]
        and set(body) == {"message", "type", "param", "code"}
    )


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="/etc/passwd", prompt="x")
