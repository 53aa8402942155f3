"""What is done with the text of a body: it is counted before it is parsed, and freed before it is validated."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from retain.server import exact_json
from retain.server.openai import body as body_module
from retain.server.openai.body import MAX_VALUES, find_excess_of_text, parse_body
from retain.server.openai.protocol import CompletionRequest

GENERATION = {"model": "smollm2", "prompt": "x", "max_tokens": 1}


def test_the_text_of_a_body_is_freed_before_it_is_validated() -> None:
    sizes: list[int] = []
    data = bytearray(orjson.dumps(GENERATION))

    class Adapter:
        def validate_python(self, value: Any) -> Any:
            sizes.append(len(data))
            return value

    adapter: Any = Adapter()
    assert parse_body(data, adapter) == GENERATION and sizes == [0]


JSON_TEXTS = st.recursive(
    st.none() | st.integers(0, 9) | st.text('"\\[{,x'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[{,x', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def count_containers_and_commas(value: Any) -> tuple[int, int]:
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [count_containers_and_commas(x) for x in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(x[0] for x in inner), max(0, len(value) - 1) + sum(x[1] for x in inner)


@given(JSON_TEXTS)
def test_lists_objects_and_commas_are_counted_outside_of_strings(value: Any) -> None:
    num_containers, num_commas = count_containers_and_commas(value)
    data = orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        for containers, commas in ((num_containers, num_commas), (num_containers - 1, 99), (99, num_commas - 1)):
            patch.setattr(body_module, "MAX_CONTAINERS", containers)
            patch.setattr(body_module, "MAX_VALUES", commas)
            is_legal = num_containers <= containers and num_commas <= commas
            assert (find_excess_of_text(data) is None) == is_legal


@pytest.mark.parametrize("item", ["[]", "{}", '""', "1", "[[],1]", '{"a":""}'])
def test_what_would_take_long_to_parse_is_not_parsed(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(exact_json.orjson, "loads", lambda data: parsed.append(bytes(data)))
    monkeypatch.setattr(body_module, "MAX_VALUES", 2000)
    monkeypatch.setattr(body_module, "MAX_CONTAINERS", 1000)
    text = f'{{"prompt":[{",".join([item] * 2002)}]}}'
    with pytest.raises(RequestValidationError, match=r"more than (1000 lists and objects|2000 values)"):
        parse_body(text.encode(), TypeAdapter(CompletionRequest))
    assert not parsed


def test_a_text_of_braces_and_commas_is_accepted() -> None:
    prompt = "[{," * (MAX_VALUES + 1)
    body = parse_body(orjson.dumps({**GENERATION, "prompt": prompt}), TypeAdapter(CompletionRequest))
    assert body.prompts == [prompt]
