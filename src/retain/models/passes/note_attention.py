"""A pass that notes how layers attend to their caches, for policies that compute attention themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kernels.ops import Attend, Operation


def note_attention(operations: Iterable[Operation], found: dict[int, Attend]) -> Iterator[Operation]:
    """Return the operations as they are. The one that writes into a cache is noted in `found`, by cache."""
    for op in operations:
        if isinstance(op, Attend) and op.has_kv:
            found[op.cache] = op
        yield op
