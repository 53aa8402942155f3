"""Texts whose lengths are at block ends, repeated and continued."""

from __future__ import annotations

from collections.abc import Iterable

from cachecheck.capabilities import Capabilities
from cachecheck.probe import Probe

BLOCK_SIZES = (16, 32, 64, 128)
LARGEST_BLOCK = 1024  # that usage may reveal
LEAST_WORDS = 6
CONTINUATION = 5  # words


def run(probe: Probe) -> None:
    """A text asked again, and continued in two ways, has the answers that it has without a cache."""
    for length in block_end_lengths(probe.capabilities, BLOCK_SIZES):
        check_length(probe, length)
    block_size = probe.server.block_size
    if block_size not in BLOCK_SIZES and CONTINUATION < block_size <= LARGEST_BLOCK:
        for length in block_end_lengths(probe.capabilities, [block_size, 2 * block_size]):
            check_length(probe, length)


def block_end_lengths(capabilities: Capabilities, block_sizes: Iterable[int]) -> list[int]:
    """Return for each size three lengths in tokens: a whole number of blocks, one token less and one more."""
    least = capabilities.overhead + LEAST_WORDS * capabilities.tokens_per_word
    ends = {(int(least) // size + 1) * size for size in block_sizes}
    return sorted({end + i for end in ends for i in (-1, 0, 1)})


def check_length(probe: Probe, length: int) -> None:
    """Ask a text of so many tokens, as far as words give that."""
    num_words = max(1, round((length - probe.capabilities.overhead) / probe.capabilities.tokens_per_word))
    text = probe.texts.of(probe.texts.quoting(num_words))
    first = probe.ask(text)
    probe.equal(first, probe.ask(text), f"{length} tokens, again")
    one, other = (text.extended(probe.texts.quoting(CONTINUATION)) for _ in range(2))
    continued = probe.ask(one)
    probe.equal_cold(one, continued, f"{length} tokens, continued")
    probe.equal_cold(other, probe.ask(other), f"{length} tokens, continued in another way")
    probe.equal(continued, probe.ask(one), f"{length} tokens, continued as before")
