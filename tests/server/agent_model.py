"""Tiny models that play a coding agent: a chat template with tools and reasoning, and answers that a test dictates."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from retain.processing.grammar import grammar_from_lark
from retain.processing.lark import write_text
from retain.server.launch import GracefulServer
from tests.helpers.folders import save_model_folder
from tests.helpers.tiny_models import tiny_checkpoint

# It renders what an assistant said exactly as the model wrote it, except for the end of the turn.
AGENT_TEMPLATE = """{%- if tools %}Tools:
{% for t in tools %}{{ t | tojson }}
{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"""


def save_agent_model(folder: Path, family: str, special_tokens: Sequence[str] = ()) -> Path:
    """Write a tiny model of a family with a tokenizer of bytes and of special tokens, and a long context."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = len(alphabet) + len(special_tokens)
    return save_model_folder(folder, tiny_checkpoint(family, vocab_size=size, max_position_embeddings=16384))


@contextmanager
def dictated_answers(server: GracefulServer, answers: Iterable[str]) -> Iterator[None]:
    """Let the model write these answers, one a request: each is the only text of a grammar."""
    service, remaining = server.service, iter(answers)
    special = service.dialect.special_tokens
    prepare = service.prepare_chat_request

    def prepare_dictated(*arguments):
        prepared = prepare(*arguments)
        answer = next(remaining, None)
        assert answer is not None, "more answers were asked for than are dictated"
        return prepared._replace(
            request=replace(prepared.request, grammar=grammar_from_lark(f"start: {write_text(answer, special)}"))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "prepare_chat_request", prepare_dictated)
        yield
    assert next(remaining, None) is None, "not every answer was asked for"
