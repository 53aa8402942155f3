"""Laws of all objects in requests: null is absence, and each field is honoured, accepted or refused by its name."""

import json
import tomllib
from itertools import product
from pathlib import Path

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from retain.sampling_params import MAX_STOP_LENGTH
from retain.server import client_fields
from retain.server.anthropic.protocol import MessagesRequest
from retain.server.client_fields import Accepted, read_field_tables
from retain.server.openai.body import parse_body
from retain.server.openai.chat_protocol import AssistantMessageParam, ChatCompletionRequest, TextContentPart
from retain.server.openai.errors import to_validation_error
from retain.server.openai.protocol import CompletionRequest, StreamOptions
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.tokenization import TokenizeChatRequest
from retain.server.request_model import REFUSED_FIELD, StrictModel

TABLES = tomllib.loads(Path(client_fields.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KEYS_OF_RULES = ({"accepted"}, {"refused"}, {"only"}, {"only", "why"})
ANYTHING = [True, 0, 7, "x", ["x"], {"x": 1}]


def list_models(base=StrictModel):
    """Return the classes of all objects in requests."""
    return [model for cls in base.__subclasses__() for model in (cls, *list_models(cls))]


def build_value(schema, definitions):
    """Return a value that a JSON schema of a required field allows."""
    if "$ref" in schema:
        return build_value(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return build_value(alternatives[0], definitions)
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: build_value(properties[name], definitions) for name in schema.get("required", ())}
    if kind == "array":
        return [build_value(schema["items"], definitions)]
    return {"string": "x", "integer": schema.get("minimum", 1), "boolean": True, "number": 1.5}[kind]


def build_body(model):
    schema = model.model_json_schema()
    return build_value(schema, schema.get("$defs", {}))


# Others are left out whole, whatever fields they have.
STRICT = (model for model in list_models() if model.model_config["extra"] == "forbid")
MODELS = sorted(STRICT, key=lambda m: f"{m.__module__}.{m.__name__}")


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_null_and_accepted_values_are_as_good_as_absent(model):
    body = build_body(model)
    parsed = model.model_validate(body)
    optional = [f.alias or name for name, f in model.model_fields.items() if not f.is_required()]
    for name in [*optional, *model.other_fields, "no_such_field"]:
        assert model.model_validate({**body, name: None}) == parsed, name
    for name, rule in model.other_fields.items():
        for value in (rule.values if rule.values is not None else ANYTHING) if isinstance(rule, Accepted) else ():
            assert model.model_validate({**body, name: value}) == parsed, name


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_other_values_are_errors_that_name_the_field(model):
    body = build_body(model)
    with pytest.raises(ValidationError) as raised:
        model.model_validate({**body, "no_such_field": 1})
    assert raised.value.errors()[0]["loc"][-1] == "no_such_field"
    for (name, rule), value in product(model.other_fields.items(), ANYTHING):
        if isinstance(rule, Accepted) and rule.allows(value):
            continue
        with pytest.raises(ValidationError) as raised:
            model.model_validate({**body, name: value})
        (error,) = raised.value.errors()
        assert error["type"] == REFUSED_FIELD and error["ctx"]["field"] == name and error["msg"].endswith(rule.why)


def is_reason(value):
    return isinstance(value, str) and value != "" and value == value.strip()


def test_the_file_of_tables_is_well_formed():
    """Each rule is of one kind, and each refusal or acceptance has its reason."""
    assert TABLES.keys() == {"includes", "fields", "refused_types", "left_out_types"}
    for types in TABLES["left_out_types"].values():
        assert all(map(is_reason, types)) and len(set(types)) == len(types)
    for name, rules in TABLES["fields"].items():
        for field, rule in rules.items():
            assert rule.keys() in KEYS_OF_RULES, (name, field)
            assert all(is_reason(value) for key, value in rule.items() if key != "only"), (name, field)
            assert "only" not in rule or (isinstance(rule["only"], list) and rule["only"]), (name, field)
    assert all(map(is_reason, TABLES["refused_types"].values()))


def test_a_table_includes_those_above_it_and_changes_what_they_say():
    """A field that says the same again would be one that is changed in one place only."""
    names = list(TABLES["fields"])
    for name, included in TABLES["includes"].items():
        assert names.index(name) > max(map(names.index, included)), name
        for field, rule in TABLES["fields"][name].items():
            known = {key: value for table in included for key, value in read_field_tables()[table].items()}
            assert known.get(field) != read_field_tables()[name][field], (name, field, rule)


def test_every_table_is_of_a_model_or_included():
    used = [id(model.other_fields) for model in list_models()]
    included = {table for tables in TABLES["includes"].values() for table in tables}
    assert [name for name, table in read_field_tables().items() if id(table) not in used and name not in included] == []


def test_no_field_is_both_honoured_and_in_a_table():
    for model in MODELS:
        assert not model.model_fields.keys() & model.other_fields.keys(), model


MESSAGES = [{"role": "user", "content": "x"}]
KNOWN = [  # what clients send today, at values that must work
    (
        ChatCompletionRequest,
        {"model": "m", "messages": MESSAGES},
        {
            "top_k": -1,
            "best_of": 1,
            "reasoning_effort": "high",
            "verbosity": "low",
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "implicit"},
            "safety_identifier": "s",
            "store": True,
            "skip_special_tokens": True,
            "return_token_ids": True,
            "typical_p": 1.0,
            "repeat_penalty": 1.1,
            "min_tokens": 3,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "chat_template_kwargs": {"enable_thinking": True, "any": [1, {"x": None}]},
        },
    ),
    (
        AssistantMessageParam,
        {"role": "assistant"},
        {"annotations": [{}], "audio": None, "function_call": None, "refusal": "No.", "reasoning": "r"}
        | {"reasoning_content": "r", "cache_control": {"type": "ephemeral"}},
    ),
    (TextContentPart, {"type": "text", "text": "x"}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    (StreamOptions, {}, {"continuous_usage_stats": True, "include_obfuscation": False}),
    (CompletionRequest, {"model": "m", "prompt": "x"}, {"best_of": 1, "n_predict": 5, "top_k": -1, "min_tokens": 2}),
    (MessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 1}, {"top_k": -1, "min_tokens": 1}),
    (TokenizeChatRequest, {"messages": MESSAGES}, {"add_generation_prompt": False, "add_special_tokens": False}),
    (ResponsesRequest, {"model": "m", "input": "x"}, {"top_k": -1, "min_tokens": 2, "prompt_cache_key": "k"}),
]


@pytest.mark.parametrize(("model", "body", "fields"), KNOWN, ids=[m.__name__ for m, _, _ in KNOWN])
def test_fields_of_clients_are_known(model, body, fields):
    for name, value in fields.items():
        model.model_validate({**body, name: value})
    model.model_validate({**body, **fields})


def test_an_accepted_value_keeps_its_type():
    """False is not 0, and 1.0 is 1, in JSON."""
    body = {"model": "m", "messages": MESSAGES}
    for accepted in ({"priority": 0}, {"typical_p": 1.0}, {"mirostat": 0.0}):
        ChatCompletionRequest.model_validate(body | accepted)
    for refused in ({"priority": False}, {"typical_p": True}, {"skip_special_tokens": 1}):
        with pytest.raises(ValidationError):
            ChatCompletionRequest.model_validate(body | refused)


PARTS = [{"type": kind, "image_url": {"url": "data:"}} for kind in ("image_url", "input_audio", "file", None, 5)]


@pytest.mark.parametrize("part", [*PARTS, [], "x", 1, None, {}])
def test_content_that_is_no_text_is_refused_in_words(part):
    content = [{"type": "text", "text": "x"}, part]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(RequestValidationError) as raised:
        parse_body(json.dumps(body).encode(), TypeAdapter(ChatCompletionRequest))
    error = to_validation_error(raised.value.errors())
    assert error.param == "messages.0.content.1" and "only text is supported" in error.message


STOP_FIELDS = [(ChatCompletionRequest, "stop"), (CompletionRequest, "stop"), (MessagesRequest, "stop_sequences")]
TOO_MANY = {
    "should have at most 16 items": ["a"] * 17,
    f"{MAX_STOP_LENGTH + 1} characters together: at most {MAX_STOP_LENGTH}": ["a" * MAX_STOP_LENGTH, "b"],
    "should have at least 1 character": ["a", ""],
}


@pytest.mark.parametrize(("model", "field"), STOP_FIELDS, ids=[m.__name__ for m, _ in STOP_FIELDS])
def test_stop_strings_beyond_a_bound_are_refused_in_words(model, field):
    def validate(stop):
        parse_body(json.dumps({**build_body(model), field: stop}).encode(), TypeAdapter(model))

    for words, stop in TOO_MANY.items():
        with pytest.raises(RequestValidationError) as raised:
            validate(stop)
        error = to_validation_error(raised.value.errors())
        assert (error.param or "").startswith(field) and "<" not in error.message and words in error.message
    validate(["a"] * 15 + ["b" * (MAX_STOP_LENGTH - 15)])
    if field == "stop":
        validate("a" * MAX_STOP_LENGTH)
        with pytest.raises(RequestValidationError, match="characters together"):
            validate("a" * (MAX_STOP_LENGTH + 1))


NEUTRAL = {  # what clients send who want nothing special: as good as absent
    "CompletionRequest": {"seed": -1, "suffix": "", "stop": "", "best_of": 1, "n": 1, "echo": False, "n_predict": -1},
    "ChatCompletionRequest": {"seed": -1, "stop": [], "tools": [], "response_format": {"type": "text"}, "n": 1}
    | {"tool_choice": "auto", "top_logprobs": 0, "logprobs": False, "functions": [], "modalities": ["text"]},
    "ResponsesRequest": {"seed": -1, "tools": [], "include": [], "previous_response_id": "", "top_logprobs": 0}
    | {"text": {}, "reasoning": {}, "metadata": {}, "instructions": "", "generate": True},
    "MessagesRequest": {"tools": [], "stop_sequences": [], "mcp_servers": [], "metadata": {}, "system": []}
    | {"output_config": {}, "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}},
}
NEUTRAL_SAMPLING = {"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": []}
NEUTRAL_SAMPLING |= {
    "ignore_eos": False,
    "temperature": 1,
    "pin": 0,
    "cache_salt": "",
    "kv_policy": "",
    "speculate": "",
}
NEUTRAL_SAMPLING |= {"speculate": ""}
NEUTRAL_COMPLETION = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "repeat_penalty": 1, "user": ""}
NEUTRAL_COMPLETION |= {"grammar": "", "regex": "", "guided_regex": "", "lora_path": "", "stop": "", "max_tokens": -1}
NEUTRAL_COMPLETION |= {"metadata": {}, "stream_options": {}, "typical_p": 1, "mirostat": 0, "top_k": 0}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_are_accepted(name):
    model = next(m for m in MODELS if m.__name__ == name)
    body = build_body(model)
    values = {**NEUTRAL_SAMPLING, **NEUTRAL[name]} | (NEUTRAL_COMPLETION if "Completion" in name else {})
    parsed = model.model_validate({**body, **values})
    for field, value in values.items():
        model.model_validate({**body, field: value})
    if "Completion" in name:
        plain = model.model_validate(body)
        assert parsed.to_sampling_params(9, None) == plain.to_sampling_params(9, None)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest])
def test_a_top_p_of_zero_is_allowed_and_less_is_not(model):
    body = build_body(model)
    assert model.model_validate({**body, "top_p": 0}).top_p == 0
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValidationError):
            model.model_validate({**body, "top_p": wrong})
