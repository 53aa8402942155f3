"""Text becomes the ids that the model's own tokenizer gives, from a GGUF file and from a folder; chats; bad files."""

from __future__ import annotations

import json
import random
import stat
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors

from retain.models.resolve import resolve_model
from retain.processing import Tokenizer
from retain.processing.gguf_tokenizer import _build_sentencepiece
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint

BUNDLED = ["smollm2", "gemma3"]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you? <b>&amp;</b>"},
    {"role": "assistant", "content": "Größe 😀"},
    {"role": "user", "content": " spaces \n"},
]
TEXT_FRAGMENTS = [
    *("a", "b", "the", "The", " the", "'s", "'LL", "don't", ".", "!", "--", "_", "http://x.org/?a=1", "====", "x2y3"),
    *(
        " ",
        "  ",
        "   ",
        " " * 33,
        "\n",
        "\n\n",
        "\n" * 35,
        "\t",
        "\r\n",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "\u2028",
        "\x00",
    ),
    *(
        "1",
        "23",
        "4567",
        "3.14",
        "½",
        "٣",
        "é",
        "e\u0301",
        "ß",
        "ﬁ",
        "\U0001d518",
        "\U0010ffff",
        "\ufffd",
        "😀",
        "👨‍👩‍👧",
        "🇩🇪",
    ),
    *(
        "中文",
        "日本語",
        "한국어",
        "العربية",
        "हिन्दी",
        "ไทย",
        "▁",
        "Ġ",
        "Ċ",
        "<0x0A>",
        "<0xff>",
        "<unk>",
        "<pad>",
        "<mask>",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused3>"),
    *("[multimodal]", "<table>", "</td>", "<|im_start", "<<bos>>"),
]


def sample_texts() -> list[str]:
    """This project's own files, and all kinds of text strung together at random."""
    here = Path(__file__).parents[1]
    files = [p for pattern in ("src/**/*.py", "tests/**/*.py", "*.toml", "docs/*.md") for p in here.glob(pattern)]
    draw = random.Random(0)
    mixed = ["".join(draw.choices(TEXT_FRAGMENTS, k=draw.randint(0, 25))) for _ in range(800)]
    spans = ((0x20, 0x7E), (0, 0x2FF), (0, 0xD7FF), (0xE000, 0x10FFFF))
    drawn = ["".join(chr(draw.randint(*draw.choice(spans))) for _ in range(draw.randint(0, 25))) for _ in range(500)]
    return [p.read_text(encoding="utf-8") for p in sorted(files)[::4]] + mixed + drawn


@cache
def open_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.open(resolve_model(name))


@cache
def transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_ids_and_the_text_are_those_of_transformers(name: str) -> None:
    ours, right = open_tokenizer(name), transformers_tokenizer(resolve_model(name))
    assert ours.vocab_size == len(right)
    for text in sample_texts():
        ids = ours.encode(text)
        assert ids == right(text).input_ids, text[:200]
        assert ours.decode(ids) == right.decode(ids, skip_special_tokens=True), text[:200]


def test_how_texts_begin() -> None:
    assert open_tokenizer("gemma3").encode("") == [2]
    assert open_tokenizer("gemma3").encode("", add_special_tokens=False) == open_tokenizer("smollm2").encode("") == []


def test_what_ends_an_answer() -> None:
    assert open_tokenizer("smollm2").stop_token_ids == {2}  # <|im_end|>
    assert open_tokenizer("gemma3").stop_token_ids == {1, 106}  # <eos>, <end_of_turn>


def test_the_bytes_of_single_tokens() -> None:
    k = open_tokenizer("smollm2")
    assert [k.token_bytes(i) for i in k.encode(" é<|im_end|>")] == [" é".encode(), b"<|im_end|>"]
    assert b"".join(k.token_bytes(i) for i in k.encode("🦤 dodo")) == "🦤 dodo".encode()
    g = open_tokenizer("gemma3")
    assert [g.token_bytes(i) for i in (2, 106, 108, 138, 248)] == [b"<bos>", b"<end_of_turn>", b"\n\n", b"  ", b"\n"]
    for nonsense in (-1, 262_144, 1 << 40):
        assert g.token_bytes(nonsense) == b"" and g.decode([nonsense]) == ""


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        open_tokenizer("smollm2").encode("a\ud800")


@pytest.mark.parametrize(
    "vocabulary",
    [
        BYTE_LEVEL_VOCABULARY,
        SENTENCEPIECE_VOCABULARY,
        {**SENTENCEPIECE_VOCABULARY, "tokenizer.ggml.add_space_prefix": False},
    ],
)
def test_small_vocabularies_too(tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    """SentencePiece puts a space before a text, and takes it away again."""
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=vocabulary)
    ours, right = Tokenizer.open(path), transformers_tokenizer(path)
    spaced = vocabulary.get("tokenizer.ggml.add_space_prefix", True)
    words = ["the", " cat", " sat", "  ", "x", "é", "\n", "中", "hello", " world", "<tag>", "</s>", "<|a|>", ",."]
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choices(words, k=draw.randint(0, 8)))
        ids = ours.encode(text)
        if spaced:  # transformers does not read that flag
            assert ids == right(text).input_ids, text
            assert ours.decode(ids) == right.decode(ids, skip_special_tokens=True)
        plain = not text.startswith(" ") and "<tag>" not in text  # before and after which spaces come and go
        if vocabulary is not BYTE_LEVEL_VOCABULARY and "</s>" not in text and (plain or not spaced):
            assert ours.decode(ids) == text


EXPECTED_WORDS = {
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", "\n\n", "  ", " x", "?!\n"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "?!\n"],
    "gpt-2": ["I", "'", "LL", " pay", " 12345", "\n\n  ", " x", "?!", "\n"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "?!\n"],
}


@pytest.mark.parametrize("pre", EXPECTED_WORDS)
def test_words_are_cut_as_pre_says(tmp_path: Path, pre: str) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.pre": pre}
    )
    core = Tokenizer.open(path)._core
    text = "".join(EXPECTED_WORDS[pre])
    assert [text[a:b] for _, (a, b) in core.pre_tokenizer.pre_tokenize_str(text)] == EXPECTED_WORDS[pre]


def test_llama3_takes_whole_words(tmp_path: Path) -> None:
    words = [
        *BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"][:-4],
        "cat",
        *BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"][-3:],
    ]  # no merge makes "cat"
    for pre, length in (("llama-bpe", 2), ("gpt-2", 3)):
        vocabulary = BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.tokens": words, "tokenizer.ggml.pre": pre}
        path = write_gguf(
            tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=vocabulary, extra={"tokenizer.ggml.merges": []}
        )
        assert len(Tokenizer.open(path).encode("cat")) == length  # with Llama 3's bos


def merge_by_rank(text: str, rank: dict[str, int]) -> list[str]:
    """SentencePiece's rule: of all neighbours, always merge the two whose union ranks first, the leftmost of equals."""
    parts = list(text)
    while pairs := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text("abc", min_size=2, max_size=6), min_size=1, max_size=40, unique=True), st.data())
def test_one_merge_for_each_token_is_enough(words: list[str], data: st.DataObject) -> None:
    """Tokens that no merging makes are never made, the others always in the same way: any vocabulary, in any order."""
    tokens = ["a", "b", "c", *words]
    scores = data.draw(st.permutations(range(len(words))))
    meta = {"tokenizer.ggml.scores": np.array([0, 0, 0, *scores]), "tokenizer.ggml.add_space_prefix": False}
    core = _build_sentencepiece(meta, tokens)
    rank = {w: -s for w, s in zip(words, scores, strict=True)}
    for text in data.draw(st.lists(st.text("abc", max_size=30), min_size=3, max_size=3)):
        assert core.encode(text).tokens == merge_by_rank(text, rank)


def test_llama3_begins_with_bos_although_its_files_do_not_say(tmp_path: Path) -> None:
    vocabulary = BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.pre": "llama-bpe"}
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=vocabulary)
    assert Tokenizer.open(path).encode("a")[0] == 125
    vocabulary |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=vocabulary)
    assert Tokenizer.open(path).encode("a") == [BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"].index("a"), 126]


# The cache


def test_a_built_tokenizer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=SENTENCEPIECE_VOCABULARY)
    ids = Tokenizer.open(path).encode("the cat sat")
    (kept,) = (tmp_path / "cache/tokenizers").iterdir()
    whole = kept.read_bytes()
    with monkeypatch.context() as m:
        m.setattr("retain.processing.gguf_tokenizer._sentencepiece", lambda *a: pytest.fail("built again"))
        assert Tokenizer.open(path).encode("the cat sat") == ids
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[:31], whole[:-1], bytes(flipped)):
        kept.write_bytes(damaged)
        assert Tokenizer.open(path).encode("the cat sat") == ids
        assert kept.read_bytes() == whole
    other = SENTENCEPIECE_VOCABULARY | {
        "tokenizer.ggml.tokens": [*SENTENCEPIECE_VOCABULARY["tokenizer.ggml.tokens"][:-1], "ö"]
    }
    changed = Tokenizer.open(write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=other))
    assert changed.encode("ö")[-1] == len(SENTENCEPIECE_VOCABULARY["tokenizer.ggml.tokens"]) - 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(stat.S_IRUSR)
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "file/cache"))
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=SENTENCEPIECE_VOCABULARY)
    assert Tokenizer.open(path).decode(Tokenizer.open(path).encode("the cat")) == "the cat"


# Chats


def test_the_chat_template_is_rendered_as_transformers_does() -> None:
    k, right = open_tokenizer("smollm2"), transformers_tokenizer(resolve_model("smollm2"))
    for turns, generate in ((CONVERSATION, True), (CONVERSATION[1:], False)):
        text = right.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)
        assert k.apply_chat_template(turns, generate) == text
        assert k.encode_chat(turns, generate) == right(text, add_special_tokens=False).input_ids
    with pytest.raises(ValueError, match="no chat template"):
        open_tokenizer("gemma3").apply_chat_template(CONVERSATION)


def tokenizer_with_template(template: str) -> Tokenizer:
    return Tokenizer(
        open_tokenizer("gemma3")._core,
        Path("x"),
        chat_template=template,
        special_tokens_map={"bos_token": "<bos>"},
        bos_ids=[2],
    )


def test_a_chat_has_one_bos() -> None:
    k = tokenizer_with_template(
        "{{ bos_token }}{% for m in messages %}\n  {% if true %}{{ m.content | trim }}{% endif %}{% endfor %}"
    )
    assert k.apply_chat_template([{"role": "user", "content": " a "}]) == "<bos>a"
    assert k.encode_chat([{"role": "user", "content": " a "}]) == k.encode("a")


def test_what_templates_may_use() -> None:
    assert tokenizer_with_template("{{ {'a': '<é>'} | tojson }}").apply_chat_template([]) == '{"a": "<é>"}'
    assert tokenizer_with_template("{{ strftime_now('%Y') }}").apply_chat_template([]).startswith("20")
    assert (
        tokenizer_with_template(
            "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        ).apply_chat_template([])
        == "01"
    )
    assert (
        tokenizer_with_template("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}").apply_chat_template([]) == "2"
    )
    with pytest.raises(ValueError, match=r"fails: roles must alternate$"):
        tokenizer_with_template("{{ raise_exception('roles must alternate') }}").apply_chat_template([])


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
def test_hostile_and_broken_templates(template: str) -> None:
    try:
        assert not tokenizer_with_template(template).apply_chat_template([{"role": "user", "content": "a"}])
    except ValueError as e:
        assert str(e).startswith("the model's chat template ") and "\n" not in str(e)


# Folders


def test_a_folder(tmp_path: Path) -> None:
    k = Tokenizer.open(write_tokenizer_folder(tmp_path))
    assert k.encode("hello world<|c|>")[0] == 125
    assert k.decode(k.encode("hello world, in the end<|c|>")) == "hello world, in the end"
    assert k.stop_token_ids == {126}
    assert k.apply_chat_template([]) == "<|a|><|b|>" and k.encode_chat([]) == [125, 126]


def test_all_that_a_folder_says_of_ends_and_templates(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [127, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.open(tmp_path).stop_token_ids == {126, 127, 5, 7}
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.open(tmp_path).apply_chat_template([]) == "default"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.open(tmp_path).apply_chat_template([]) == "from a file"


@pytest.mark.parametrize("name", BUNDLED)
def test_a_folder_that_transformers_saved(tmp_path: Path, name: str) -> None:
    transformers_tokenizer(resolve_model(name)).save_pretrained(tmp_path)
    ours, right = Tokenizer.open(tmp_path), open_tokenizer(name)
    for text in sample_texts()[::20]:
        assert ours.encode(text) == right.encode(text)
    assert ours.stop_token_ids <= right.stop_token_ids and ours.stop_token_ids
    if right.chat_template:
        assert ours.apply_chat_template(CONVERSATION) == right.apply_chat_template(CONVERSATION)


def test_an_older_folder(tmp_path: Path) -> None:
    """vocab.json and merges.txt instead of tokenizer.json: transformers converts it."""
    words = BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"]
    (tmp_path / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate([*words, "<|endoftext|>"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(BYTE_LEVEL_VOCABULARY["tokenizer.ggml.merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    k = Tokenizer.open(tmp_path)
    assert k.encode("hello world") == [words.index("hello"), words.index("Ġworld")]
    assert k.decode(k.encode("hello world")) == "hello world"


# What is wrong with a file


def open_error(path: Path) -> str:
    with pytest.raises(ValueError) as e:
        Tokenizer.open(path)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    ("base", "extra", "why"),
    [
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.model": "bert"}, "'bert' are not supported"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.pre": "chinese"}, "'chinese' is not supported"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.token_type": [1, 2]}, "differ in length"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.merges": ["h zz"]}, "zz"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.merges": ["hello"]}, "damaged"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.eos_token_id": 128}, "128"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.bos_token_id": "a"}, "'a'"),
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.chat_template": 3}, "template"),
        (SENTENCEPIECE_VOCABULARY, {"tokenizer.ggml.scores": [1.0]}, "differ in length"),
        (SENTENCEPIECE_VOCABULARY, {"tokenizer.ggml.scores": "x"}, "differ in length"),
    ],
)
def test_metadata_that_makes_no_sense(tmp_path: Path, base: dict[str, Any], extra: dict[str, Any], why: str) -> None:
    assert why in open_error(write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=base, extra=extra))


def test_no_token_is_sometimes_all_ones(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF, "tokenizer.ggml.add_bos_token": True}
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), vocabulary=BYTE_LEVEL_VOCABULARY, extra=extra)
    assert len(Tokenizer.open(path).encode("a")) == 1


def test_damaged_folders(tmp_path: Path) -> None:
    whole = (write_tokenizer_folder(tmp_path) / "tokenizer.json").read_bytes()
    for damaged in (b"", b"{}", b"\xff", whole[: len(whole) // 2], whole.replace(b"ByteLevel", b"NoLevel")):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        open_error(tmp_path)
    unknown = json.loads(whole) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unknown))
    assert "decoders of type WordPiece" in open_error(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(whole)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json: damaged" in open_error(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    open_error(tmp_path)


def test_rust_panics_are_value_errors(tmp_path: Path) -> None:
    from retain.processing.tokenizer import wrap_errors

    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ValueError, match=r"damaged tokenizer: out of bounds$"), wrap_errors(tmp_path):
        raise panic("out of bounds\nat line 3")
    with pytest.raises(KeyboardInterrupt), wrap_errors(tmp_path):
        raise KeyboardInterrupt


def test_categories_are_covered() -> None:
    """The texts above hold every general category of Unicode that can be written."""
    seen = {unicodedata.category(c) for text in sample_texts() for c in text}
    assert seen >= {
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "Mn",
        "Mc",
        "Nd",
        "Nl",
        "No",
        "Pd",
        "Ps",
        "Sm",
        "So",
        "Zs",
        "Cc",
        "Cf",
        "Co",
    }
