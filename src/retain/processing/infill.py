"""Fill in the middle: prompts of a text before and a text behind what the model writes (arXiv 2207.14255)."""

from __future__ import annotations

from retain.processing.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix, and before the middle, by model.
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
    ),  # DeepSeek
)


def encode_infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the token ids of a prompt whose answer is the middle. Raises ValueError for other tokenizers."""
    for names in FORMATS:
        markers = [list(tokenizer.find_tokens([name])) for name in names]
        if all(markers):
            before, behind, middle = markers
            texts = [tokenizer.encode_continuation(text) if text else [] for text in (prefix, suffix)]
            return [*tokenizer.encode(""), *before, *texts[0], *behind, *texts[1], *middle]
    raise ValueError("suffix: the tokenizer of this model has no tokens to fill in the middle")
