"""Fill in the middle: prompts of a text before and a text behind what the model writes (arXiv 2207.14255)."""

from __future__ import annotations

from retain.processing.fill_in_formats import FILL_IN_FORMATS
from retain.processing.tokenizer import Tokenizer


def encode_infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the token ids of a prompt whose answer is the middle. Raises ValueError for other tokenizers.

    Names of markers in the texts are text: code may be about them.
    """
    for names in FILL_IN_FORMATS:
        markers = [list(tokenizer.find_tokens([name])) for name in names]
        if all(markers):
            before, behind, middle = markers
            texts = [tokenizer.encode_quoted_continuation(text) if text else [] for text in (prefix, suffix)]
            return [*tokenizer.encode(""), *before, *texts[0], *behind, *texts[1], *middle]
    raise ValueError("suffix: the tokenizer of this model has no tokens to fill in the middle")
