"""Prompt sharing: equal prompts that are added together are computed once.

One request, the leader, computes the prompt; its followers fork the leader's row when the prompt is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from retain.engine.request import Request


class PromptSharing:
    """The followers of every leader whose prompt is not complete."""

    def __init__(self) -> None:
        self._followers: dict[Request, list[Request]] = {}

    def group(self, requests: Sequence[Request]) -> list[Request]:
        """Group equal prompts. Returns the leaders and all requests that share nothing, to be enqueued."""
        leaders: dict[tuple[object, ...], list[Request]] = {}  # by keys of the text, and prompt
        for request in sorted(requests, key=lambda r: not score_key(r)):  # requests without masses can follow any
            text = request.text
            alike = leaders.setdefault((text.salt, text.extra, text.extra_from, *request.prompt), [])
            leader = next((r for r in alike if can_share_prompt(request, r)), None)
            if leader:
                self._followers.setdefault(leader, []).append(request)
            else:
                alike.append(request)
        return [r for alike in leaders.values() for r in alike]

    def followers(self, request: Request) -> list[Request]:
        """Return the requests that wait for this one's prompt."""
        return self._followers.get(request, [])

    def completing(self, request: Request, num_tokens: int) -> list[Request]:
        """Return the request; and its followers, if `num_tokens` more complete its prompt for the first time."""
        followers = self.followers(request)
        if not followers or request.num_computed_tokens + num_tokens != len(request.prompt) or request.scoring:
            return [request]
        return [request, *(f for f in followers if not f.num_computed_tokens)]

    def release(self, request: Request) -> list[Request]:
        """End the sharing of a leader. Returns its followers that have not ended."""
        return [f for f in self._followers.pop(request, []) if f.finish_reason is None]


def can_share_prompt(request: Request, leader: Request) -> bool:
    """Return whether the leader's prompt, computed under its policy, equals one computed under the request's own."""
    a = request.policy
    b = leader.policy
    if request.prompt != leader.prompt or a.ring_window is not None or b.ring_window is not None:
        return False
    if request.input.needs_prompt_logits or leader.input.needs_prompt_logits:
        return False  # only the leader's logits would be there
    if a.plan.is_streamed or b.plan.is_streamed:
        return False
    if request.reads_first_logits and not leader.reads_first_logits:
        return False  # the step that completes the prompt would compute none
    return not score_key(request) or score_key(request) == score_key(leader)


def score_key(request: Request) -> tuple[object, ...]:
    """Return all that masses at the end of the prompt depend on, but for the prompt; () if there are none."""
    key = request.policy.score_key
    return (*key, request.noise_seed) if request.policy.uses_noise else key
