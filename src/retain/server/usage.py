"""Token counts and statistics of a finished request group."""

from __future__ import annotations

from typing import Any, NamedTuple

from retain.engine.request import Request
from retain.processing.output import OutputProcessor
from retain.server.request_group import RequestGroup

Json = dict[str, Any]


class GroupUsage(NamedTuple):
    """Tokens of all prompts, those of them that were cached or pinned, and tokens of all answers."""

    prompt: int
    cached: int
    pinned: int | None  # None where nothing was to be pinned
    output: int


def count_tokens(group: RequestGroup) -> GroupUsage:
    """Count the tokens of a group. Choices of the same prompt count its tokens once."""
    requests_by_prompt: dict[int, list[Request]] = {}
    for request in group.requests:
        requests_by_prompt.setdefault(id(request.prompt), []).append(request)
    prompts = requests_by_prompt.values()
    return GroupUsage(
        prompt=sum(len(requests[0].prompt) for requests in prompts),
        cached=sum(max(r.stats.num_cached_tokens for r in requests) for requests in prompts),
        pinned=group.num_pinned_tokens,
        output=sum(r.num_output_tokens for r in group.requests),
    )


def build_request_stats(output_processor: OutputProcessor, group: RequestGroup) -> list[Json]:
    """Build the KV cache and speculation statistics of each choice of a finished group."""
    stats = []
    for state in group.request_states:
        output = output_processor.to_output(state)
        kv = {k: v for k, v in output.kv.items() if k != "groups"}
        choice = {"kv": kv, "speculate": output.speculate, "num_preemptions": output.num_preemptions}
        stats.append(choice | {"prefix": output.prefix} if output.prefix else choice)
    return stats
