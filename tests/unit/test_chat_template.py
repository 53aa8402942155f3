"""Chat templates: their environment, and a sandbox that hostile and broken ones do not leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retain import LLM
from retain.processing.chat_template import read_chat_template
from retain.processing.tokenizer import Tokenizer
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY
from tests.helpers.tokenizers import open_tokenizer, write_tokenizer_file


def tokenizer_with_template(template: str) -> Tokenizer:
    core = open_tokenizer("gemma3")._core
    special_tokens = {"bos_token": "<bos>"}
    return Tokenizer(
        core, Path("x"), chat_templates={"default": template}, special_tokens_map=special_tokens, bos_ids=[2]
    )


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
    assert render("{{ [{'b': 1, 'a': 'é'}] | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}") == (
        '[{"a":"\\u00e9","b":1}]'
    )
    assert render("{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}") == "a21"
    assert render("{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 2) | tojson }}") == '{"a": 1}{"a": 2, "b": 2}'
    assert render("{% set c = cycler(1, 2) %}{% set j = joiner('-') %}{{ j() }}{{ c.next() }}{{ j() }}") == "1-"
    assert render("{% set n = namespace(self=3) %}{{ n.self }}") == "3"
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
        "{% set n = namespace(_x=1) %}a",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}a",
        "{{ dict.__class__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% generation %}a",
    ],
)
def test_hostile_and_broken_templates_fail_in_one_line(template: str) -> None:
    try:
        assert not tokenizer_with_template(template).apply_chat_template([{"role": "user", "content": "a"}])
    except ValueError as e:
        assert str(e).startswith("the model's chat template ") and "\n" not in str(e)


# Which template


MESSAGES, TOOLS = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
NAMED = {"default": "default {{ messages[0].content }}", "tool_use": "{{ tools | length }} tools", "rag": "rag"}


def test_null_fields_are_absent_and_reasoning_has_every_name() -> None:
    tokenizer = tokenizer_with_template("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    message = {"role": "assistant", "content": None, "reasoning": "r"}
    assert json.loads(tokenizer.apply_chat_template([message])) == {
        "role": "assistant",
        **dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "r"),
    }
    tokenizer = tokenizer_with_template("{{ x }}{{ y is defined }}")
    assert tokenizer.apply_chat_template(MESSAGES, variables={"x": 1, "y": None}) == "1False"


def test_conversations_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """In a GGUF file by keys, in a folder by files, which take precedence over its configuration."""
    keys = {f"tokenizer.chat_template.{name}": source for name, source in NAMED.items() if name != "default"}
    keys |= {"tokenizer.chat_template": NAMED["default"], "tokenizer.chat_templates": ["rag", "tool_use"]}
    tokenizer = Tokenizer.open(write_tokenizer_file(tmp_path, BYTE_LEVEL_VOCABULARY, keys))
    assert tokenizer.chat_templates.sources == NAMED and tokenizer.chat_template == NAMED["default"]
    assert tokenizer.apply_chat_template(MESSAGES) == "default a"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "1 tools"
    tokenizer.choose_chat_template(name="rag")
    assert tokenizer.apply_chat_template(MESSAGES) == "rag"


def test_a_model_without_a_default_template_says_which_it_has() -> None:
    sources = {name: NAMED[name] for name in ("tool_use", "rag")}
    tokenizer = Tokenizer(open_tokenizer("gemma3")._core, Path("x"), chat_templates=sources)
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "1 tools"
    with pytest.raises(ValueError, match=r"choose rag, tool_use \(--chat-template\)$"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_broken_template_is_an_error_of_the_start(tmp_path: Path) -> None:
    """Another one may be given: a file, a source or a name."""
    options = {"kv_memory": "16MiB", "dtype": "float32"}
    keys = {"tokenizer.chat_template": "{% frobnicate %}", "tokenizer.chat_template.rag": "rag"}
    path = write_tokenizer_file(tmp_path, BYTE_LEVEL_VOCABULARY, keys)
    with pytest.raises(ValueError) as e:
        LLM(str(path), **options)
    assert str(e.value).startswith(f"{path}: the model's chat template is broken: ") and "\n" not in str(e.value)
    assert str(e.value).endswith("(--chat-template gives another)") and "frobnicate" in str(e.value)
    (tmp_path / "mine.jinja").write_text("é {{ messages[0].content }}", encoding="utf-8")
    for given, text in ((str(tmp_path / "mine.jinja"), "é a"), ("{{ 1 }}", "1"), ("rag", "rag")):
        llm = LLM(str(path), chat_template=given, **options)
        assert llm.tokenizer.apply_chat_template(MESSAGES) == text
    for wrong, words in (
        ("nothing", "'nothing' is neither a file nor a name: the model's are default, rag"),
        ("{% for %}", "broken"),
        (str(tmp_path / "none.jinja"), "no such chat template"),
        (str(path), "is not UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=words) as e:
            LLM(str(path), chat_template=wrong, **options)
        assert "\n" not in str(e.value) and "gives another" not in str(e.value)


def test_a_file_precedes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_chat_template("default") is None is read_chat_template(None)
    Path("default").write_text("from a file")
    assert read_chat_template("default") == "from a file"
    assert read_chat_template("{{ default }}") == "{{ default }}"
