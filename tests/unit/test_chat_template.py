"""Chat templates: their environment, and a sandbox that hostile and broken ones do not leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from retain.processing.tokenizer import Tokenizer
from tests.helpers.tokenizers import open_tokenizer


def tokenizer_with_template(template: str) -> Tokenizer:
    core = open_tokenizer("gemma3")._core
    special_tokens = {"bos_token": "<bos>"}
    return Tokenizer(core, Path("x"), chat_template=template, special_tokens_map=special_tokens, bos_ids=[2])


def render(template: str) -> str:
    return tokenizer_with_template(template).apply_chat_template([])


def test_chat_has_one_bos() -> None:
    tokenizer = tokenizer_with_template(
        "{{ bos_token }}{% for m in messages %}\n  {% if true %}{{ m.content | trim }}{% endif %}{% endfor %}"
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": " a "}]) == "<bos>a"
    assert tokenizer.encode_chat([{"role": "user", "content": " a "}]) == tokenizer.encode("a")


def test_environment_of_templates() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') }}").startswith("20")
    assert render("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}") == "2"
    with pytest.raises(ValueError, match=r"fails: roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ dict.mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{% import 'os' as os %}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ undefined.thing }}",
        "{{ messages[0].content",
        "{% for %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 18 }}",
    ],
)
def test_hostile_and_broken_templates_fail_in_one_line(template: str) -> None:
    try:
        assert not tokenizer_with_template(template).apply_chat_template([{"role": "user", "content": "a"}])
    except ValueError as e:
        assert str(e).startswith("the model's chat template ") and "\n" not in str(e)
