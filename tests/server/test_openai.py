"""OpenAI's own client gets the engine's outputs, full and streamed."""

import json

import openai
import pytest

from retain import SamplingParams
from retain.processing.input import GenerateRequest
from tests.helpers.marks import slow
from tests.server.conftest import HTTP, run_in_engine_thread

STORY = "Once upon a time there was a lamp that nobody could put out."
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def smollm2_client(smollm2_server):
    return openai.OpenAI(base_url=smollm2_server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(server):
    return server.service.llm


def generate_in_engine(server, **fields):
    """Generate with the server's own engine, in its thread."""
    requests = [GenerateRequest(**fields)]
    (output,) = run_in_engine_thread(server, lambda: server.service.llm.generate_from_requests(requests)).result(60)
    return output


def test_list_and_get_models(client, server):
    (model,) = client.models.list().data
    assert model.id == "smollm2" and client.models.retrieve("smollm2").max_model_len == 2048
    assert model.retain == {"kv_policy": "full", "speculate": None, "drafters": ["ngram", "self"]}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


@pytest.mark.slow
def test_chat_completion_equals_engine(smollm2_client, smollm2_server):
    llm = smollm2_server.service.llm
    response = smollm2_client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    prompt, params = llm.tokenizer.encode_chat(MESSAGES), SamplingParams(max_tokens=12, temperature=0)
    output = generate_in_engine(smollm2_server, prompt=prompt, params=params)
    assert response.choices[0].message.content == output.text and "Paris" in output.text
    assert response.choices[0].finish_reason == output.finish_reason
    assert response.usage.prompt_tokens == output.prompt_tokens
    assert response.usage.completion_tokens == len(output.token_ids)
    assert response.retain[0]["kv"]["bytes_peak"] > 0 and response.retain[0]["num_preemptions"] == 0


@pytest.mark.parametrize(
    "fields", [{"stop": ["lamp", "light"]}, *slow({}, {"logprobs": 2}, {"n": 3, "temperature": 0.8, "seed": 5})]
)
def test_completion_stream_equals_full(client, fields):
    request = {"model": "smollm2", "prompt": STORY, "max_tokens": 12, "temperature": 0, **fields}
    full = client.completions.create(**request)
    text, usage, reasons, tokens = {}, None, {}, {}
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for c in chunk.choices:
            text[c.index] = text.get(c.index, "") + c.text
            reasons[c.index] = c.finish_reason or reasons.get(c.index)
            if c.logprobs:
                tokens.setdefault(c.index, []).extend(zip(c.logprobs.tokens, c.logprobs.text_offset, strict=True))
        usage = chunk.usage or usage
    assert [text[c.index] for c in full.choices] == [c.text for c in full.choices]
    assert [reasons[c.index] for c in full.choices] == [c.finish_reason for c in full.choices]
    assert usage.completion_tokens == full.usage.completion_tokens
    for c in full.choices:
        if c.logprobs:
            assert tokens[c.index] == list(zip(c.logprobs.tokens, c.logprobs.text_offset, strict=True))
            assert "".join(c.logprobs.tokens) == c.text and len(c.logprobs.top_logprobs[0]) == 2
    assert len({c.text for c in full.choices}) == len(full.choices)


def test_chat_stream_equals_full(client):
    request = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True}
    full = client.chat.completions.create(**request, top_logprobs=3).choices[0]
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == full.message.content
    tokens = [t.token for c in chunks for t in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert tokens == [t.token for t in full.logprobs.content]
    for t in full.logprobs.content:
        assert bytes(t.bytes).decode() == t.token and t.top_logprobs[0].logprob >= t.logprob


@pytest.mark.slow
def test_sampling_params_reach_the_engine(client, server):
    """With every parameter set, the server samples the same tokens as the engine."""
    names = {"temperature": 0.9, "top_p": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    extensions = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    without_bias = SamplingParams(max_tokens=20, **names, **extensions)
    sampled = generate_in_engine(server, prompt=STORY, params=without_bias).token_ids[3]
    bias = {"logit_bias": {str(sampled): -100.0}}
    response = client.completions.create(
        model="smollm2", prompt=STORY, max_tokens=20, **bias, **names, extra_body=extensions
    )
    params = SamplingParams(max_tokens=20, logit_bias=((sampled, -100.0),), **names, **extensions)
    output = generate_in_engine(server, prompt=STORY, params=params)
    assert response.choices[0].text == output.text and sampled not in output.token_ids


def test_token_id_and_multiple_prompts(client, llm):
    ids = llm.encode(STORY)
    fields = {"model": "smollm2", "max_tokens": 8, "temperature": 0}
    one, two = (client.completions.create(prompt=p, **fields).choices[0].text for p in (STORY, "The sea"))
    both = client.completions.create(prompt=[ids, llm.encode("The sea")], **fields)
    assert [c.text for c in both.choices] == [one, two] and [c.index for c in both.choices] == [0, 1]
    assert both.usage.prompt_tokens == len(ids) + 2


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_returns_prompt_logprobs(client, llm, max_tokens):
    """lm-eval sums the log-probabilities of a prompt's tokens, full or streamed."""
    ids = llm.encode(STORY)
    request = {"model": "smollm2", "max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(prompt=ids, **request).choices
    logprobs = choice.logprobs
    assert choice.text.startswith(STORY) and len(logprobs.tokens) == len(ids) + max_tokens
    assert logprobs.token_logprobs[0] is None and "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    chunks = client.completions.create(prompt=ids, stream=True, **request)
    streamed = [x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(logprobs.token_logprobs, abs=1e-4)


def test_echo_is_the_prompt_as_it_was_sent(client):
    """With special tokens and split characters, each prompt of several, full and streamed."""
    prompts = ["<|im_start|>user\nHello<|im_end|>\n", "日本語 🙂 done"]
    request = {"model": "smollm2", "prompt": prompts, "temperature": 0, "echo": True, "logprobs": 0}
    for max_tokens in (0, 2):
        choices = client.completions.create(**request, max_tokens=max_tokens).choices
        streamed: dict[int, list] = {0: [], 1: []}
        for chunk in client.completions.create(**request, max_tokens=max_tokens, stream=True):
            for c in chunk.choices:
                streamed[c.index] += list(zip(c.logprobs.tokens, c.logprobs.text_offset, strict=True))
        for prompt, choice in zip(prompts, choices, strict=True):
            tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
            assert choice.text.startswith(prompt) and (max_tokens or choice.text == prompt)
            assert streamed[choice.index] == list(zip(tokens, offsets, strict=True))
            parts = [choice.text[a:b] for a, b in zip(offsets, [*offsets[1:], len(choice.text)], strict=True)]
            assert "".join(parts) == choice.text
            if max_tokens == 0:
                assert all(part == token for token, part in zip(tokens, parts, strict=True) if "\ufffd" not in token)
                assert "🙂" not in prompt or " 🙂" in parts  # of a split character the last token has all


def test_echo_logprobs_equal_score(client, server, llm):
    ids = llm.encode(STORY)
    (choice,) = client.completions.create(
        model="smollm2", prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0
    ).choices
    (scores,) = run_in_engine_thread(server, lambda: llm.score([ids[:1]], [ids[1:]])).result(60)
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["off", "ngram", "self"])
def test_json_schema_response_format(smollm2_client, speculate):
    """Sampled output follows the schema, and drafts change none of it."""
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Describe a person."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        "max_tokens": 80,
    }
    client, extra = smollm2_client, {"speculate": speculate}
    sampled = client.chat.completions.create(**request, temperature=1.3, n=2, seed=1, extra_body=extra)
    for c in sampled.choices:
        person = json.loads(c.message.content)
        assert set(person) == {"name", "age"} and 1 <= person["age"] <= 99 and c.finish_reason == "stop"
    plain = client.chat.completions.create(**request, temperature=0, extra_body={"speculate": "off"})
    chunks = client.chat.completions.create(**request, temperature=0, stream=True, extra_body=extra)
    assert plain.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks)


@pytest.mark.slow
def test_json_object_response_format(client):
    response = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=40, temperature=0
    )
    (choice,) = response.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


@pytest.mark.slow
def test_kv_policy_per_request(client):
    messages = [{"role": "user", "content": STORY * 20}]
    request = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0}
    full = client.chat.completions.create(**request).retain[0]["kv"]
    quarter = client.chat.completions.create(**request, extra_body={"kv_policy": "h2o:budget=25%"}).retain[0]["kv"]
    assert quarter["bytes_end"] < 0.6 * full["bytes_end"] and quarter["policy"].startswith("h2o")


@pytest.mark.slow
def test_speculate_per_request(client):
    request = {"model": "smollm2", "prompt": "one two three four " * 10, "max_tokens": 20, "temperature": 0}
    plain = client.completions.create(**request)
    drafted = client.completions.create(**request, extra_body={"speculate": "ngram"})
    assert drafted.choices[0].text == plain.choices[0].text
    # How many drafts are tried depends on measured times.
    assert plain.retain[0]["speculate"] is None and drafted.retain[0]["speculate"] is not None


def test_tokenize_and_detokenize(server, llm):
    root = server.url.removesuffix("/v1")
    response = HTTP.post(f"{root}/tokenize", json={"prompt": STORY}).json()
    assert response["tokens"] == llm.encode(STORY) and response["count"] == len(response["tokens"])
    chat = HTTP.post(f"{root}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == llm.tokenizer.encode_chat(MESSAGES)
    assert HTTP.post(f"{root}/detokenize", json={"tokens": response["tokens"]}).json()["prompt"] == STORY


GATEWAY_FIELDS = {  # what sglang-router 0.3.2 and vllm-router 0.1.17 add to bodies
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
GATEWAY_CHAT_FIELDS = GATEWAY_FIELDS | {
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "stream": False,
    "logprobs": False,
    "ignore_eos": False,
}


@pytest.mark.slow
def test_fields_that_gateways_add_change_nothing(client, server):
    chat = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    text = {"model": "smollm2", "prompt": STORY, "max_tokens": 5, "temperature": 0}
    for path, body, fields in (
        ("/chat/completions", chat, GATEWAY_CHAT_FIELDS),
        ("/completions", text, GATEWAY_FIELDS | {"echo": False, "min_tokens": 0, "stop_token_ids": []}),
    ):
        plain, forwarded = (client.post(path, cast_to=dict, body=b)["choices"] for b in (body, body | fields))
        assert forwarded == plain
        nulls = dict.fromkeys(GATEWAY_FIELDS)
        assert client.post(path, cast_to=dict, body=body | nulls)["choices"] == plain
    root = server.url.removesuffix("/v1")
    asked = {"model": "smollm2", "messages": MESSAGES}
    tokens = [
        HTTP.post(f"{root}/tokenize", json=asked | more).json() for more in ({}, {"continue_final_message": False})
    ]
    assert tokens[0] == tokens[1] and tokens[0]["tokens"]


def test_invalid_field_of_a_union_is_named(server):
    """The parameter names the field, without the name of the request model that it was checked against."""
    error = HTTP.post(f"{server.url.removesuffix('/v1')}/tokenize", json={"prompt": 1}).json()["error"]
    assert error["param"] == "prompt" and "Request" not in error["message"]


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="/etc/passwd", prompt="x")
