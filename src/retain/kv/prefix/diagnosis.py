"""The diagnosis of a prompt: the nearest text, where they part, and why the cache had no more of it.

It knows tokens and no text. It looks only below first links of the query's own salt, and counts as no use of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

from retain.kernels.api import NO_WINDOW
from retain.kv.checkpoints import Key, checkpoint_name
from retain.kv.eviction import policies
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.history import PrefixHistory, SeenText
from retain.kv.prefix.start import NO_TOKENS, MissReason, PrefixDiagnosis, Start
from retain.kv.text import Text


def _max_skipped(start: Start) -> int:
    """Return the first tokens that cached pages may supply; fewer than asked for where the policy needs queries."""
    skippable = start.demand.policy.max_skippable_tokens
    return start.demand.max_length if skippable is None else min(start.demand.max_length, skippable)


def explain_prefix(cache: PrefixCache, start: Start, num_cached_tokens: int, own: SeenText | None) -> PrefixDiagnosis:
    """Diagnose a prompt whose row has just begun with `num_cached_tokens` cached tokens; `own` is its own text."""
    begun = PrefixDiagnosis(start.text.tokens.copy(), num_cached_tokens)
    if not cache.enabled:
        return replace(begun, reason=MissReason.OFF)
    if num_cached_tokens >= start.demand.max_length:
        return replace(begun, common_length=num_cached_tokens, known_length=num_cached_tokens)
    windows = cache.planner.windows(start.demand.policy)
    slides = bool((windows < NO_WINDOW).any())
    link = cache.first_link(start.text, start.demand.policy)
    history = cache.keep_history()
    nearest, common = cache.tree.nearest_text(link, start.text) or (NO_TOKENS, 0)
    usable = min(common, start.demand.max_length)
    begun = replace(begun, nearest=nearest, common_length=common, known_length=common)
    if num_cached_tokens <= _max_skipped(start) < usable:
        return replace(begun, reason=MissReason.OWN_POLICY, detail=policies.to_spec(start.demand.policy))
    # Tiers have whole blocks, and rows that still run keep checkpoints at the ends of whole blocks.
    B = cache.layout.block_size
    in_blocks = slides or cache.offloader is not None
    next_place = (num_cached_tokens // B + 1) * B if in_blocks else num_cached_tokens + 1
    state_text = _nearest_state_text(cache, start, begun)
    if state_text and state_text.common_length > common:
        begun = state_text
        usable = min(begun.common_length, start.demand.max_length)
    elif usable >= next_place:
        return replace(begun, reason=MissReason.NO_SNAPSHOT if slides else MissReason.NO_PAGES)
    ends_block = num_cached_tokens > 0 and num_cached_tokens % B == 0
    least = max(usable, next_place - 1 if ends_block else num_cached_tokens)
    found = _find_elsewhere(cache, history, start, begun, own)
    further = [d for d in found if min(d.known_length, start.demand.max_length) > least]
    if further:  # the first of those that know as much, to a page
        longest = max(d.known_length for d in further)
        first = next(d for d in further if d.known_length > longest - B)
        is_short = first.reason is MissReason.EVICTED and cache.offloader and first.known_length < next_place
        return replace(first, detail=_tiers_keep(B)) if is_short else first
    if begun is state_text and usable > num_cached_tokens:
        return replace(begun, reason=MissReason.NO_STATE)
    if num_cached_tokens > begun.common_length:  # it is in a tier
        near = history.nearest_text(start.text, begun.prompt, [own] if own else ())
        if near:
            begun = replace(begun, nearest=near[0].tokens, common_length=near[1], known_length=near[1])
    return _explain_end(cache, start, begun)


def _explain_end(cache: PrefixCache, start: Start, begun: PrefixDiagnosis) -> PrefixDiagnosis:
    """Say what a prompt goes on with that began with all that it could."""
    B = cache.layout.block_size
    num_cached = begun.num_cached_tokens
    usable = min(begun.common_length, start.demand.max_length)
    missing = usable - num_cached
    detail = f"{missing} more tokens are known, inside a block of {B}" if missing > 0 else ""
    if usable >= start.demand.max_length:
        return replace(begun, reason=MissReason.WHOLE_BLOCKS, detail=detail)
    if len(begun.nearest):
        is_new = begun.common_length == len(begun.nearest)
        return replace(begun, reason=MissReason.NEW_TEXT if is_new else MissReason.DIVERGED, detail=detail)
    reason = MissReason.NEW_TEXT if num_cached else MissReason.FIRST_TEXT
    if num_cached and num_cached == start.demand.max_length // B * B:
        reason = MissReason.WHOLE_BLOCKS
    return replace(begun, reason=reason, detail=_tiers_keep(B) if cache.offloader else "")


def _tiers_keep(block_size: int) -> str:
    return f"tiers keep whole blocks of {block_size} tokens"


def _standing_keys(cache: PrefixCache, start: Start) -> list[Key]:
    """Return the keys of the checkpoints that would stand in for pages."""
    return [key for kind in cache.kinds.values() if not kind.needs_pages for key in kind.keys(start.demand)]


def _nearest_state_text(cache: PrefixCache, start: Start, begun: PrefixDiagnosis) -> PrefixDiagnosis | None:
    """Return the nearest of the texts that requests with this budget have left checkpoints of, if there are any."""
    link = cache.first_link(start.text, start.demand.policy)
    keys = _standing_keys(cache, start)
    found = [near for key in keys if (near := cache.tree.nearest_text(link, start.text, key.name))]
    nearest, common = max(found, key=lambda near: near[1], default=(NO_TOKENS, 0))
    return replace(begun, nearest=nearest, common_length=common, known_length=common) if common else None


def _find_states(
    cache: PrefixCache, history: PrefixHistory, start: Start, begun: PrefixDiagnosis
) -> Iterator[PrefixDiagnosis]:
    """Yield where a later checkpoint of the prompt's budget is, or was."""
    further = start.further
    if further and further.position > begun.num_cached_tokens and not further.blocks.size:
        for _, _, place in further.stored:
            yield replace(begun, reason=MissReason.NOT_LOADED, known_length=further.position, detail=place.store.name)
    evicted = history.evicted_hashes()
    link = cache.first_link(start.text, start.demand.policy)
    B = cache.layout.block_size
    for key in _standing_keys(cache, start):
        last = min(key.last, start.demand.max_length)
        ends = (x for n in range(last // B, 0, -1) for x in start.text.iter_end_hashes(link, B, n, last))
        names = ((end, checkpoint_name(h, key.name)) for end, h in ends)
        if last_evicted := next(((end, evicted[name]) for end, name in names if name in evicted), None):
            end, time = last_evicted
            yield replace(begun, reason=MissReason.EVICTED, known_length=end, age=monotonic() - time)


def _find_elsewhere(
    cache: PrefixCache, history: PrefixHistory, start: Start, begun: PrefixDiagnosis, own: SeenText | None
) -> Iterator[PrefixDiagnosis]:
    """Yield where more of the prompt is, or was, than in the tree under the query's own first link."""
    B = cache.layout.block_size
    prompt = begun.prompt
    link = cache.first_link(start.text, start.demand.policy)
    keys = start.text.block_hashes(link, B)
    first = begun.common_length // B
    yield from _find_states(cache, history, start, begun)
    if cache.offloader and (ranges := cache.offloader.find_spans(keys[first:])):
        num_blocks = first + sum(r.end - r.begin for r in ranges)
        yield replace(begun, reason=MissReason.NOT_LOADED, known_length=num_blocks * B, detail=ranges[0].store.name)
    times = []
    for key in keys[first:]:
        if (time := history.evicted_at(key)) is None:
            break
        times.append(time)
    if times:
        length = (first + len(times)) * B
        yield replace(begun, reason=MissReason.EVICTED, known_length=length, age=monotonic() - max(times))
    if near := history.nearest_text(start.text, prompt, besides=[own] if own else ()):
        text, known = near
        seen = _explain_seen(replace(begun, known_length=known), text, link, start.demand.policy)
        if seen.reason is MissReason.EVICTED:
            seen = replace(seen, age=_evicted_age(cache, history, text))
        elif seen.reason is MissReason.NOT_STORED and _keeps_prompts(cache) and not text.policy.has_budget:
            seen = replace(seen, detail="keep=prompt")
        yield seen
    yield from _find_under_other_policies(cache, history, start, begun)
    if cache.offloader:
        for model, page_size, detail in cache.offloader.other_formats():
            other = cache.first_link(start.text, start.demand.policy, model)
            ranges = cache.offloader.find_spans(start.text.block_hashes(other, page_size, len(prompt)))
            length = sum(r.end - r.begin for r in ranges) * page_size
            yield replace(begun, reason=MissReason.OTHER_FORMAT, known_length=length, detail=detail)


def _keeps_prompts(cache: PrefixCache) -> bool:
    return cache.config is not None and cache.config.keep == "prompt"


def _find_under_other_policies(
    cache: PrefixCache, history: PrefixHistory, start: Start, begun: PrefixDiagnosis
) -> Iterator[PrefixDiagnosis]:
    """Yield what the tree has of the prompt under the windows of other policies."""
    seen = {policies.to_spec(t.policy): t.policy for t in history.of_group(start.text.group)}
    for spec, policy in ({"full": policies.parse("full")} | seen).items():
        link = cache.first_link(start.text, policy)
        if link != cache.first_link(start.text, start.demand.policy):
            _, known = cache.tree.nearest_text(link, start.text) or (NO_TOKENS, 0)
            yield replace(begun, reason=MissReason.OTHER_POLICY, known_length=known, detail=spec)


def _explain_seen(begun: PrefixDiagnosis, text: SeenText, link: bytes, policy: EvictionPolicy) -> PrefixDiagnosis:
    """Say why a text that shares `known_length` tokens with the prompt of this policy is of no use to it."""
    spec = policies.to_spec(text.policy)
    will_leave_state = text.policy.resume_key == policy.resume_key != "" and text.link == link
    left_too_little = text.policy.has_budget and text.num_stored_tokens < begun.known_length
    if left_too_little and not (text.is_running and will_leave_state):
        return replace(begun, reason=MissReason.NOT_STORED, detail=spec)
    if text.link != link:
        return replace(begun, reason=MissReason.OTHER_POLICY, detail=spec)
    if text.is_running:
        return replace(begun, reason=MissReason.IN_PROGRESS)
    if text.num_stored_tokens < begun.known_length:
        return replace(begun, reason=MissReason.NOT_STORED)
    return replace(begun, reason=MissReason.EVICTED)


def _evicted_age(cache: PrefixCache, history: PrefixHistory, text: SeenText) -> float | None:
    """Return how many seconds ago the last page of a text was evicted; None where that is not known."""
    B = cache.layout.block_size
    n = text.num_stored_tokens
    seen = Text(text.tokens[:n].tolist(), "", *text.keying)
    hashes = seen.block_hashes(text.link, B)
    if n % B:
        hashes = [*hashes, seen.end_hash(text.link, B, n)]
    times = [time for h in hashes[-2:] if (time := history.evicted_at(h)) is not None]
    return monotonic() - max(times) if times else None
