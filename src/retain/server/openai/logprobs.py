"""Log-probabilities of tokens as JSON, in the form of chat completions and responses."""

from __future__ import annotations

from retain.engine.request import Logprob
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.protocol import Json


def to_token_logprob(tokenizer: Tokenizer, p: Logprob) -> Json:
    """Return the log-probability of a token and of its most likely alternatives."""
    top = [_to_json(tokenizer, token_id, logprob) for token_id, logprob in p.top_logprobs]
    return {**_to_json(tokenizer, p.token_id, p.logprob), "top_logprobs": top}


def _to_json(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
