"""Tokenizers of GGUF files give the ids and the text of the model's own; metadata that is invalid is refused."""

from __future__ import annotations

import random
import stat
import tomllib
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers

from retain.models.resolve import resolve_model
from retain.processing.gguf_tokenizer import PRE_TOKENIZERS, _build_sentencepiece, read_pre_tokenizers
from retain.processing.tokenizer import Tokenizer, wrap_errors
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY
from tests.helpers.tokenizers import (
    BUNDLED,
    FOLDER_TOKENIZERS,
    SMALL_VOCABULARIES,
    open_tokenizer,
    write_tokenizer_file,
)
from tests.helpers.transformers_gguf import load_transformers_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you? <b>&amp;</b>"},
    {"role": "assistant", "content": "Größe 😀"},
    {"role": "user", "content": " spaces \n"},
]
TEXT_FRAGMENTS = [
    *("a", "b", "the", "The", " the", "'s", "'LL", "don't", ".", "!", "--", "_", "http://x.org/?a=1", "====", "x2y3"),
    *(" ", "  ", "   ", " " * 33, "\n", "\n\n", "\n" * 35, "\t", "\r\n"),
    *("\u00a0", "\u200b", "\ufeff", "\u2028", "\x00", "1", "23", "4567", "3.14", "½", "٣", "é", "e\u0301", "ß", "ﬁ"),
    *(
        "\U0001d518",
        "\U0010ffff",
        "\ufffd",
        "😀",
        "👨‍👩‍👧",
        "🇩🇪",
        "中文",
        "日本語",
        "한국어",
        "العربية",
        "हिन्दी",
        "ไทย",
    ),
    *("▁", "Ġ", "Ċ", "<0x0A>", "<0xff>", "<unk>", "<pad>", "<mask>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused3>"),
    *("[multimodal]", "<table>", "</td>", "<|im_start", "<<bos>>"),
]


@cache
def sample_texts() -> list[str]:
    """Return some of this project's files, random sequences of fragments, and random characters."""
    root = Path(__file__).parents[2]
    files = [p for pattern in ("src/**/*.py", "tests/**/*.py", "*.toml", "docs/**/*.md") for p in root.glob(pattern)]
    rng = random.Random(0)
    mixed = ["".join(rng.choices(TEXT_FRAGMENTS, k=rng.randint(0, 25))) for _ in range(800)]
    spans = ((0x20, 0x7E), (0, 0x2FF), (0, 0xD7FF), (0xE000, 0x10FFFF))
    characters = ["".join(chr(rng.randint(*rng.choice(spans))) for _ in range(rng.randint(0, 25))) for _ in range(500)]
    return [p.read_text(encoding="utf-8") for p in sorted(files)[::4]] + mixed + characters


# The bundled models


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_tokenizers_equal_transformers(name: str, tmp_path: Path) -> None:
    """For ids, text and chats; and for the folder that transformers saves them to."""
    ours, theirs = open_tokenizer(name), load_transformers_tokenizer(resolve_model(name))
    assert ours.vocab_size == len(theirs)
    for text in sample_texts():
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text[:200]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text[:200]
    theirs.save_pretrained(tmp_path)
    saved = Tokenizer.open(tmp_path)
    for text in sample_texts()[::20]:
        assert saved.encode(text) == ours.encode(text)
    assert saved.stop_token_ids == ours.stop_token_ids
    if ours.chat_template is None:
        with pytest.raises(ValueError, match="no chat template"):
            ours.apply_chat_template(CONVERSATION)
        return
    assert saved.apply_chat_template(CONVERSATION) == ours.apply_chat_template(CONVERSATION)
    for messages, add_generation_prompt in ((CONVERSATION, True), (CONVERSATION[1:], False)):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert ours.apply_chat_template(messages, add_generation_prompt) == text
        assert ours.encode_chat(messages, add_generation_prompt) == theirs(text, add_special_tokens=False).input_ids


def test_texts_begin_with_bos_where_the_model_has_one() -> None:
    assert open_tokenizer("gemma3").encode("") == [2]
    assert open_tokenizer("gemma3").encode("", add_special_tokens=False) == open_tokenizer("smollm2").encode("") == []


def test_stop_tokens_of_bundled_models() -> None:
    # <|endoftext|>, <|im_end|>, <repo_name>, <reponame>, <file_sep>
    assert open_tokenizer("smollm2").stop_token_ids == {0, 2, 3, 4, 5}
    assert open_tokenizer("gemma3").stop_token_ids == {1, 106}  # <eos>, <end_of_turn>


def test_bytes_of_single_tokens() -> None:
    smollm2, gemma3 = open_tokenizer("smollm2"), open_tokenizer("gemma3")
    assert [smollm2.token_bytes(i) for i in smollm2.encode(" é<|im_end|>")] == [" é".encode(), b"<|im_end|>"]
    assert b"".join(smollm2.token_bytes(i) for i in smollm2.encode("🦤 dodo")) == "🦤 dodo".encode()
    expected = [b"<bos>", b"<end_of_turn>", b"\n\n", b"  ", b"\n"]
    assert [gemma3.token_bytes(i) for i in (2, 106, 108, 138, 248)] == expected
    for unknown in (-1, 262_144, 1 << 40):
        assert gemma3.token_bytes(unknown) == b"" and gemma3.decode([unknown]) == ""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        open_tokenizer("smollm2").encode("a\ud800")


def test_sample_texts_cover_the_categories_of_unicode() -> None:
    seen = {unicodedata.category(c) for text in sample_texts() for c in text}
    letters = {"Lu", "Ll", "Lt", "Lm", "Lo"}
    others = {"Mn", "Mc", "Nd", "Nl", "No", "Pd", "Ps", "Sm", "So", "Zs", "Cc", "Cf", "Co"}
    assert seen >= letters | others


# Small vocabularies


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_VOCABULARIES)
def test_small_tokenizers_equal_transformers(tmp_path: Path, name: str) -> None:
    """SentencePiece puts a space before a text, and removes it in decoding."""
    path = write_tokenizer_file(tmp_path, SMALL_VOCABULARIES[name])
    ours, theirs = Tokenizer.open(path), load_transformers_tokenizer(path)
    words = ["the", " cat", " sat", "  ", "x", "é", "\n", "中", "hello", " world", "<tag>", "</s>", "<|a|>", ",."]
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choices(words, k=rng.randint(0, 8)))
        ids = ours.encode(text)
        if name != "unspaced":  # transformers does not read that option
            assert ids == theirs(text).input_ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        keeps_spaces = not text.startswith(" ") and "<tag>" not in text
        if name != "bytes" and "</s>" not in text and (keeps_spaces or name == "unspaced"):
            assert ours.decode(ids) == text


@pytest.mark.parametrize("name", [*SMALL_VOCABULARIES, *FOLDER_TOKENIZERS])
def test_a_text_that_continues_another_gets_no_space(name: str) -> None:
    k = open_tokenizer(name)
    for text in ("the cat", " the cat", "cat sat", "the"):
        ids = k.encode_continuation(text)
        assert b"".join(map(k.token_bytes, ids)) == text.encode()
        assert k.decode([*k.encode("the"), *ids]) == f"the{text}"


EXPECTED_WORDS = {
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", "\n\n", "  ", " x", "?!\n"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "?!\n"],
    "gpt-2": ["I", "'", "LL", " pay", " 12345", "\n\n  ", " x", "?!", "\n"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "?!\n"],
    "refact": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n  ", " x", "?!", "\n"],
    "seed-coder": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "\n\n", "  ", " x", "?!", "\n"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", "\n\n", "  ", " x", "?!\n"],
    "glm4": ["I", "'LL", " pay", " ", "123", "45", "\n\n", "  ", " x", "?!\n"],
    "deepseek-v3": ["I", "'LL", " pay", " ", "123", "45", "中文", "\n\n", "  ", " x", "?!\n"],
    "joyai-llm": ["I", "'LL", " pay", " ", "123", "45", "中文", "\n\n", "  ", " x", "?!\n"],
    "deepseek-llm": ["I", "'", "LL", " ", "12345", "中文", "Ωä", "\n", "\n", "  ", " x", "?!", "\n", "a", "\u0561"],
    "deepseek-coder": ["I", "'", "LL", " ", "1", "2", "中文", "Ωä", "\n", "\n", "  ", " x", "?!", "\n", "a\u0561"],
    "kimi-k2": ["I'LL", " pay", " ", "123", "45", "中文", "Ωä", "日", "\n\n", "  ", " x", "?!\n", "/"],
    "youtu": ["I'LL", " pay", " ", "1", "2", "中文", "Ωä", "日", "\uff01\uff1a", "\n\n", "  ", " x", "?!\n/"],
    "tiny_aya": ["I'LL", " pay", " ", "12", "345", "\n\n", "  ", " x", "?!\n/"],
    "viking": ["I'LL", " pay", " ", "1", "2", "中文Ωä日", "\n\n  ", " x", "?!\n", "a", "।", "b"],
    "gigachat": ["I", "'", "LL", " pay", " 12345", "\n\n  ", " x", "?!", "\n"],
    "solar-open": ["I", "'LL", " pay", " ", "1", "2", "\n\n", "  ", " x", "?!\n"],
}


@pytest.mark.parametrize("pre", EXPECTED_WORDS)
def test_text_is_split_into_words_by_the_rule_of_pre(tmp_path: Path, pre: str) -> None:
    path = write_tokenizer_file(tmp_path, BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.pre": pre})
    core = Tokenizer.open(path)._core
    text = "".join(EXPECTED_WORDS[pre])
    assert [text[a:b] for _, (a, b) in core.pre_tokenizer.pre_tokenize_str(text)] == EXPECTED_WORDS[pre]


def test_each_rule_of_words_has_its_names_once_and_patterns_that_compile() -> None:
    rules = tomllib.loads(PRE_TOKENIZERS.read_text(encoding="utf-8"))["rules"]
    names = [name for rule in rules for name in rule["names"]]
    assert len(names) == len(set(names)) == len(read_pre_tokenizers())
    for rule in read_pre_tokenizers().values():
        assert rule.patterns
        for pattern in rule.patterns:
            Regex(pattern)


def read_rules_of_transformers() -> dict[str, pre_tokenizers.PreTokenizer]:
    """Return how transformers splits text, by `pre`: its table for GGUF files, and its tokenizers of two models."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.models.cohere.tokenization_cohere import CohereTokenizer
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

    rules = {pre: pre_tokenizers.Split(Regex(regex), "isolated") for pre, regex in GGUF_PRE_TOKENIZER_SPLITS.items()}
    for pre, kind in (("command-r", CohereTokenizer), ("gpt-2", GPT2Tokenizer)):
        rules[pre] = kind(vocab={"a": 0, "b": 1}, merges=[]).backend_tokenizer.pre_tokenizer
    return rules


def test_words_equal_those_of_transformers() -> None:
    rules, rng = read_rules_of_transformers(), random.Random(0)
    shared = [pre for pre in rules if pre in read_pre_tokenizers()]
    assert len(shared) > 20 and {"command-r", "gpt-2", "gpt-4o", "qwen35", "dbrx", "tekken"} <= set(shared)
    splitters = {}
    for pre in shared:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in read_pre_tokenizers()[pre].patterns]
        splitters[pre] = pre_tokenizers.Sequence(splits)
    for _ in range(300):
        text = "".join(rng.choices(TEXT_FRAGMENTS, k=8))
        for pre in shared:
            ours, theirs = ([span for _, span in x.pre_tokenize_str(text)] for x in (splitters[pre], rules[pre]))
            assert ours == theirs, (pre, text)


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", 2), ("tekken", 2), ("gpt-2", 3), ("dbrx", 3), ("glm4", 3), ("qwen2", 3)]
)
def test_some_rules_keep_words_that_are_tokens_and_add_bos(tmp_path: Path, pre: str, ids: int) -> None:
    tokens = list(BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"])
    tokens[-4] = "cat"  # no merge leads to it
    vocabulary = BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": pre}
    path = write_tokenizer_file(tmp_path, vocabulary, extra={"tokenizer.ggml.merges": []})
    assert len(Tokenizer.open(path).encode("cat")) == ids


def test_phi3_puts_a_space_before_every_part_and_its_tokens_swallow_white_space(tmp_path: Path) -> None:
    """As its tokenizer.json: a normalizer writes the space, and most added tokens have `rstrip`."""
    tokens = [*SENTENCEPIECE_VOCABULARY["tokenizer.ggml.tokens"], "<|user|>", "<|endoftext|>"]
    lists = {
        f"tokenizer.ggml.{k}": list(SENTENCEPIECE_VOCABULARY[f"tokenizer.ggml.{k}"]) for k in ("scores", "token_type")
    }
    lists["tokenizer.ggml.scores"] += [-1000.0] * 2
    lists["tokenizer.ggml.token_type"] += [3, 3]
    vocabulary = {**SENTENCEPIECE_VOCABULARY, **lists, "tokenizer.ggml.tokens": tokens}
    expected = {
        "phi3": "▁▁the▁cat<|user|>▁the▁cat<|endoftext|>▁▁sat",
        "llama": "▁the▁cat<|user|><0x0A>▁▁the▁cat<|endoftext|>▁sat",
    }
    for arch, words in expected.items():
        extra = {"general.architecture": arch, "tokenizer.ggml.add_bos_token": False}
        k = Tokenizer.open(write_tokenizer_file(tmp_path, vocabulary, extra))
        ids = k.encode(" the cat<|user|>\n  the cat<|endoftext|> sat")
        assert "".join(tokens[i] for i in ids) == words
        assert k.decode(k.encode("the cat")) == "the cat"
        assert b"".join(map(k.token_bytes, k.encode_continuation("the cat"))) == b"the cat"


GEMMA4_MERGES = [("a", "b"), ("▁", "a"), ("a", "t"), ("\n", "\n"), ("▁", "▁"), ("ab", "t"), ("▁▁", "ab")]
GEMMA4_TOKENS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"),
    *(f"<0x{b:02X}>" for b in range(256)),
    *("<|tool>", *"▁abt\né"),
]


def merge_by_rank(text: str, rank: dict[str, int]) -> list[str]:
    """Merge by SentencePiece's rule: the neighbours whose union ranks first, the leftmost of equals."""
    parts = list(text)
    while pairs := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@pytest.mark.slow
@settings(max_examples=100, derandomize=True)
@given(st.lists(st.text("abc", min_size=2, max_size=6), min_size=1, max_size=40, unique=True), st.data())
def test_one_merge_for_each_token_gives_sentencepieces_result(words: list[str], data: st.DataObject) -> None:
    tokens = ["a", "b", "c", *words]
    scores = data.draw(st.permutations(range(len(words))))
    metadata = {"tokenizer.ggml.scores": np.array([0, 0, 0, *scores]), "tokenizer.ggml.add_space_prefix": False}
    core = _build_sentencepiece(metadata, tokens)
    rank = {word: -score for word, score in zip(words, scores, strict=True)}
    for text in data.draw(st.lists(st.text("abc", max_size=30), min_size=3, max_size=3)):
        assert core.encode(text).tokens == merge_by_rank(text, rank)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*"abt▁ \n", "\n\n", "  ", "é", "中", "😀", "<turn|>", "<|tool>"]), max_size=20),
    st.sampled_from(["gemma4", "llama"]),
)
def test_gemma4_merges_in_the_order_of_the_file_as_transformers_does(fragments: list[str], model: str) -> None:
    """The scores say nothing: `ab` ranks before `at` by its place in the list. Early files deny bos."""
    from transformers import GemmaTokenizer

    tokens = [*GEMMA4_TOKENS, *(a + b for a, b in GEMMA4_MERGES)]
    types = [3] * 5 + [6] * 256 + [4] + [1] * (len(tokens) - 262)
    vocabulary = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(i) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in GEMMA4_MERGES],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    theirs = GemmaTokenizer({token: i for i, token in enumerate(tokens)}, GEMMA4_MERGES)
    theirs.add_tokens([AddedToken("<|tool>", normalized=False), AddedToken("<turn|>", normalized=False, special=True)])
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RETAIN_CACHE", folder)
        ours = Tokenizer.open(write_tokenizer_file(Path(folder), vocabulary))
    text = "".join(fragments)
    assert ours.encode(text) == [2, *theirs(text, add_special_tokens=False).input_ids]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


def test_llama3_adds_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    vocabulary = BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.pre": "llama-bpe"}
    assert Tokenizer.open(write_tokenizer_file(tmp_path, vocabulary)).encode("a")[0] == 125
    vocabulary |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    ids = Tokenizer.open(write_tokenizer_file(tmp_path, vocabulary)).encode("a")
    assert ids == [BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"].index("a"), 126]


# The cache


def test_built_tokenizer_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "cache"))
    path = write_tokenizer_file(tmp_path, SENTENCEPIECE_VOCABULARY)
    ids = Tokenizer.open(path).encode("the cat sat")
    (cached,) = (tmp_path / "cache/tokenizers").iterdir()
    intact = cached.read_bytes()
    with monkeypatch.context() as m:
        name = "retain.processing.gguf_tokenizer._build_sentencepiece"
        m.setattr(name, lambda *args: pytest.fail("built again"))
        assert Tokenizer.open(path).encode("the cat sat") == ids
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    for damaged in (b"", intact[:31], intact[:-1], bytes(flipped)):
        cached.write_bytes(damaged)
        assert Tokenizer.open(path).encode("the cat sat") == ids
        assert cached.read_bytes() == intact
    tokens = SENTENCEPIECE_VOCABULARY["tokenizer.ggml.tokens"]
    changed = SENTENCEPIECE_VOCABULARY | {"tokenizer.ggml.tokens": [*tokens[:-1], "ö"]}
    assert Tokenizer.open(write_tokenizer_file(tmp_path, changed)).encode("ö")[-1] == len(tokens) - 1


def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(stat.S_IRUSR)
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "file/cache"))
    path = write_tokenizer_file(tmp_path, SENTENCEPIECE_VOCABULARY)
    assert Tokenizer.open(path).decode(Tokenizer.open(path).encode("the cat")) == "the cat"


# Invalid files


@pytest.mark.parametrize(
    ("base", "extra", "message"),
    [
        (BYTE_LEVEL_VOCABULARY, {"tokenizer.ggml.tokens": None}, "the file has no tokenizer"),
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
def test_invalid_metadata_is_refused(tmp_path: Path, base: dict[str, Any], extra: dict[str, Any], message: str) -> None:
    path = write_tokenizer_file(tmp_path, base, extra)
    with pytest.raises(ValueError) as e:
        Tokenizer.open(path)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value) and message in str(e.value)


def test_token_id_of_all_ones_means_no_token(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF, "tokenizer.ggml.add_bos_token": True}
    assert len(Tokenizer.open(write_tokenizer_file(tmp_path, BYTE_LEVEL_VOCABULARY, extra)).encode("a")) == 1


def test_rust_panics_become_value_errors(tmp_path: Path) -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ValueError, match=r"damaged tokenizer: out of bounds$"), wrap_errors(tmp_path):
        raise panic("out of bounds\nat line 3")
    with pytest.raises(KeyboardInterrupt), wrap_errors(tmp_path):
        raise KeyboardInterrupt
