"""Streamed answers: the text, its end and its counts are those of whole answers."""

from __future__ import annotations

from dataclasses import replace

from cachecheck.probe import Probe

LENGTHS = (14, 40, 75)  # words


def run(probe: Probe) -> None:
    """A text has one answer: streamed or whole, computed or from the cache."""
    for endpoint in probe.capabilities.endpoints:
        for num_words in LENGTHS:
            name = f"{endpoint} of {num_words} words"
            text = replace(probe.texts.prompt(num_words), endpoint=endpoint)
            whole = [probe.ask(text) for _ in range(2)][-1]
            streamed = probe.stream(text)
            probe.equal(whole, streamed, f"{name}, streamed from the cache")
            counts = (whole.prompt_tokens, streamed.prompt_tokens)
            if probe.capabilities.streams_usage and None not in counts:
                detail = f"{counts[1]} prompt tokens in the stream, {counts[0]} in the whole answer"
                probe.judge(counts[0] == counts[1], f"{name}, its count", detail)
            text = replace(probe.texts.prompt(num_words), endpoint=endpoint)
            streamed = probe.stream(text)
            probe.equal(streamed, probe.ask(text), f"{name}, streamed first")
