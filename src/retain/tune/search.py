"""Find the candidate with the least memory that holds a bound, by successive halving (Jamieson, Talwalkar, 2016).

Every round measures the candidates that are left on twice as many prompts, and drops half of them. A candidate that
was dropped comes back at the end where none that was kept holds the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retain.tune.bound import Interval
from retain.tune.candidates import Candidate

FIRST_ROUND = 4  # prompts

Measure = Callable[[Sequence[Candidate], int], None]  # on so many of the first prompts
Estimate = Callable[[Candidate, int], Interval]  # of the excess over so many of the first prompts


def find_smallest(
    candidates: Sequence[Candidate], num_items: int, limit: float, measure: Measure, estimate: Estimate
) -> Candidate | None:
    """Return the candidate with the least memory whose whole interval holds the limit, or None.

    `candidates` ascend by memory. The winner is measured on all items.
    """
    active = list(candidates)
    n = min(FIRST_ROUND, num_items)
    num_measured: dict[Candidate, int] = {}
    while True:
        measure(active, n)
        num_measured |= dict.fromkeys(active, n)
        if n == num_items:
            break
        active = halve(active, limit, lambda c, n=n: estimate(c, n).mean)  # type: ignore[misc]
        n = min(2 * n, num_items)
    for candidate in candidates:
        n = num_measured[candidate]
        if n < num_items and estimate(candidate, n).mean <= limit:
            measure([candidate], num_items)
            num_measured[candidate] = n = num_items
        if n == num_items and estimate(candidate, n).high <= limit:
            return candidate
    return None


def halve(candidates: Sequence[Candidate], limit: float, mean: Callable[[Candidate], float]) -> list[Candidate]:
    """Return half of the candidates: those that seem to hold by memory, then the others by how nearly they hold."""
    rank = {c: (0.0, c.kv_bytes) if mean(c) <= limit else (mean(c), c.kv_bytes) for c in candidates}
    kept = sorted(candidates, key=lambda c: rank[c])[: -(-len(candidates) // 2)]
    return sorted(kept, key=lambda c: c.kv_bytes)


def count_measurements(num_candidates: int, num_items: int) -> int:
    """Return about how many pairs of candidate and prompt a search measures."""
    n = min(FIRST_ROUND, num_items)
    done = 0
    total = 0
    while True:
        total += num_candidates * (n - done)
        if n == num_items:
            return total
        num_candidates = -(-num_candidates // 2)
        done = n
        n = min(2 * n, num_items)
