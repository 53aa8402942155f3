"""The parts of a prompt that a scoring pass reads, each behind an instruction.

An instruction is computed again for every part. So short messages are read together, and a text that is too long for
one part is divided into equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise

SHORTEST_MESSAGE = 8  # tokens between two special ones; fewer are the name of a role
SHORTEST_TEXT = 64  # tokens that are read behind an instruction: shorter messages are joined


def divide_prompt(
    prompt: Sequence[int], special_ids: Set[int], instruction_len: int, max_length: int
) -> Iterator[Sequence[int]]:
    """Yield the parts of a prompt, of at most `max_length` tokens: its messages, without special tokens."""
    messages = [t for t in split_messages(prompt, special_ids) if len(t) >= SHORTEST_MESSAGE]
    for text in join_short_texts(messages, max(SHORTEST_TEXT, instruction_len)) or [prompt]:
        num_parts = -(-len(text) // max_length)
        length = -(-len(text) // num_parts)
        yield from (text[i : i + length] for i in range(0, len(text), length))


def split_messages(prompt: Sequence[int], special_ids: Set[int]) -> list[Sequence[int]]:
    """Return the parts of a prompt between its special tokens, some of them empty."""
    ends = [i for i, token in enumerate(prompt) if token in special_ids]
    return [prompt[begin + 1 : end] for begin, end in pairwise((-1, *ends, len(prompt)))]


def join_short_texts(texts: Sequence[Sequence[int]], min_length: int) -> list[Sequence[int]]:
    """Join texts with those that follow until each has `min_length` tokens; the last one may have fewer if alone."""
    joined: list[Sequence[int]] = []
    for text in texts:
        if joined and len(joined[-1]) < min_length:
            joined[-1] = (*joined[-1], *text)
        else:
            joined.append(text)
    if len(joined) > 1 and len(joined[-1]) < min_length:
        *joined, before, last = joined
        joined.append((*before, *last))
    return joined
