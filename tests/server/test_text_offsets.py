"""Echo and `text_offset`: an echo is the prompt as it was sent, and an offset is where a token's part of it begins."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.engine.request import FinishReason, Logprob
from retain.processing.stop_strings import StopStrings
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.choice_builders import CompletionChoiceBuilder, EchoedPrompt, echo_text, echo_tokens
from retain.server.request_group import OutputDelta
from tests.helpers.marks import slow
from tests.helpers.tokenizers import open_tokenizer

KINDS = ["sentencepiece", "llama-folder", "smollm2", "bytes", "unspaced", "unigram", *slow("gemma3")]
FRAGMENTS = (
    *("日本語 🙂 done", " the cat sat", "<|im_start|>user\nHello<|im_end|>\n", "<s>", "</s>", "  x", "é", "e\u0301"),
    *("hello world", "\n\n", "▁", " ", "<|a|>", "<unk>", "<tag>", "👨‍👩‍👧", "cat"),
)
texts = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=5).map("".join)


def shown_lengths(k: Tokenizer, tokens: Sequence[int], hidden: Sequence[bool]) -> tuple[str, list[int]]:
    """Return the text of some tokens, and how much of it the tokens before each one show, and all."""
    data, lengths = b"", [0]
    for token, is_hidden in zip(tokens, hidden, strict=True):
        data += b"" if is_hidden else k.token_bytes(token)
        complete = codecs.getincrementaldecoder("utf-8")(k._token_bytes.errors).decode(data)
        lengths.append(len(complete) - (k._token_bytes.strip_space and complete.startswith(" ")))
    return k._token_bytes.decode(data), lengths


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, derandomize=True)
@given(text=texts)
def test_the_parts_of_a_prompt_are_what_its_tokens_show(kind: str, text: str) -> None:
    k = open_tokenizer(kind)
    ids, offsets = k.encode(text), k.find_offsets(text)
    assert len(ids) == len(offsets) and [0, *offsets, len(text)] == sorted([0, *offsets, len(text)])
    num_added = len(ids) - len(k.encode(text, add_special_tokens=False))  # bos
    shown, lengths = shown_lengths(k, ids, [i < num_added for i in range(len(ids))])
    if shown == text:  # no unknown character, and nothing normalized
        assert offsets == lengths[:-1]


def test_offsets_of_normalized_and_unknown_characters_are_of_the_prompt() -> None:
    """The tokens would show another text; a part that an unknown token stands for is its own."""
    k, text = open_tokenizer("unigram"), "the 中 cat"
    parts = [text[a:b] for a, b in pairwise([*k.find_offsets(text), len(text)])]
    assert parts[0] == "" and "中" in parts and "".join(parts) == text


def build(builder: CompletionChoiceBuilder, deltas: Sequence[OutputDelta], stream: bool) -> dict[str, Any]:
    """Return the text and the offsets of a full or a streamed answer."""
    if stream:
        choices = [chunk for delta in deltas for chunk in builder.build_chunks(delta)]
    else:
        for delta in deltas:
            builder.update(delta)
        choices = [builder.build()]
    offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
    return {"text": "".join(c["text"] for c in choices), "offsets": offsets}


def make_deltas(k: Tokenizer, prompt: Sequence[int], answer: Sequence[int], stop: Sequence[str], size: int) -> Any:
    """Yield what the engine sends for an answer, `size` tokens at a time. Returns the tokens up to the stop string."""
    detokenizer = k.create_detokenizer(StopStrings(stop), prompt)
    tokens, deltas, pending = [], [], ""
    first = [Logprob(t, -1.0) for t in prompt[1:]]
    for token in answer:
        tokens.append(token)
        pending += detokenizer.add_token(token)
        if detokenizer.stopped:
            break
        if len(tokens) % size == 0 and len(tokens) < len(answer):
            new = tokens[-size:]
            logprobs = [Logprob(t, -1.0) for t in new]
            deltas.append(OutputDelta(0, pending, new, logprobs, prompt_logprobs=() if deltas else first))
            pending = ""
    new = tokens[size * len(deltas) :]
    logprobs, pending = [Logprob(t, -1.0) for t in new], pending + detokenizer.flush()
    last = OutputDelta(0, pending, new, logprobs, FinishReason.STOP, () if deltas else first)
    return tokens, [*deltas, last]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_offsets_are_where_tokens_begin_in_streams_too(kind: str, data: st.DataObject) -> None:
    """text[offset[i] : offset[i + 1]] is what token i shows, however a stop string cuts the text."""
    k, text = open_tokenizer(kind), data.draw(texts)
    prompt, answer = k.encode(text), k.encode(data.draw(texts), add_special_tokens=False) or [3]
    whole = k.decode([*prompt, *answer])[len(k.decode(prompt)) :]
    begin = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = [s for s in [whole[begin : begin + data.draw(st.integers(0, 4))]] if s]
    tokens, deltas = make_deltas(k, prompt, answer, stop, data.draw(st.integers(1, 3)))
    echo: EchoedPrompt | None = None
    if data.draw(st.booleans()) and prompt:
        sent_as_text = data.draw(st.booleans())
        echo = echo_text(k, text, prompt) if sent_as_text else echo_tokens(k, prompt, is_whole_text=False)
        assert echo.text == (text if sent_as_text else k.decode(prompt))
    full, streamed = (
        build(CompletionChoiceBuilder(k, 0, True, prompt, echo), deltas, stream) for stream in (False, True)
    )
    assert full == streamed
    num_echoed, start = (len(prompt), len(echo.text)) if echo else (0, 0)
    assert full["text"][:start] == (echo.text if echo else "") and len(full["offsets"]) == num_echoed + len(tokens)
    every = [*prompt, *tokens]
    _, lengths = shown_lengths(k, every, [t in k.special_token_ids for t in every])
    length = len(full["text"])
    assert full["offsets"][num_echoed:] == [
        min(start + n - lengths[len(prompt)], length) for n in lengths[len(prompt) : -1]
    ]


def test_a_prompt_without_an_answer_shows_its_broken_character() -> None:
    k = open_tokenizer("smollm2")
    ids = k.encode("a 🦤")[:-1]
    assert echo_tokens(k, ids, is_whole_text=True).text == k.decode(ids) == "a \ufffd"
    assert echo_tokens(k, ids, is_whole_text=False).text == "a "
