"""Which tokens end an answer.

A file names one or two of them, but its model has more: a chat model that completes text ends a document, and a model
that fills in the middle of a file ends with a token of its own. Without the others an answer runs on into the next
document. So the names of all are listed here, as llama.cpp does. They count only for added tokens (control tokens and
user-defined ones): ordinary vocabulary may spell such a name too.
"""

from __future__ import annotations

from collections.abc import Mapping

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<\uff5cend▁of▁sentence\uff5c>")
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "<|EOT|>",
    "<|return|>",
)
TOOL_CALL_ENDS = ("<|eom_id|>", "<|call|>", "<|tool_response>")
# A middle that is filled in, and the beginning of the next file or repository.
FILL_IN_ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<EOT>",
    "▁<EOT>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "<|fim_repo|>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
)
# Names that mean something else beside another token: the ends of parts of an answer, and a tag of HTML.
EXCEPTIONS = {"<|end|>": "<|return|>", "</s>": "<eos>"}
# GGUF's metadata keys of such tokens, without `tokenizer.ggml.` and `_token_id`.
GGUF_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def find_end_tokens(added_tokens: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of the added tokens whose names say that they end an answer."""
    return frozenset(
        added_tokens[name]
        for name in (*DOCUMENT_ENDS, *TURN_ENDS, *TOOL_CALL_ENDS, *FILL_IN_ENDS)
        if name in added_tokens and EXCEPTIONS.get(name) not in added_tokens
    )
