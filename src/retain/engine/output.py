"""Processing of sampled tokens, the last part of a step: the answer grows, and may end.

`OutputProcessor` here knows tokens only; `retain.processing.output` extends it by text.
"""

from __future__ import annotations

from torch import Tensor

from retain.engine.request import FinishReason, Request, SampledTokens


class OutputProcessor:
    """Append sampled tokens to requests, and decide which of them is the last."""

    def process_tokens(self, request: Request, tokens: SampledTokens) -> FinishReason | None:
        """Append tokens up to the last one of the answer. Returns why the request ends, or None."""
        for token, logprob in tokens:
            if not request.append_token(token, logprob):
                return FinishReason.FAILED
            if token in request.input.stop_ids or self.matches_stop_string(request, token):
                return FinishReason.STOP
            if reason := request.check_stop():
                return reason
        return None

    def matches_stop_string(self, request: Request, token: int) -> bool:
        """Add the text of a token, and return whether a stop string ends the answer with it."""
        return False

    def process_logits(self, request: Request, logits: Tensor) -> None:
        """Read logits [n, V] before the next tokens of the text, where the request needs them; good until returning."""
