"""replay: keep the tokens that the prompt's own queries attend to, once all of them are moved behind the prompt.

A query of the prompt is a guess of a later one. Rotated on to the position behind its block, it sees the whole block,
what followed it, too. So it finds what `reread` finds, without a second prefill. The score of a slot is how far
outputs would move without it (`sum_output_changes`). All heads and layers divide one budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from retain.kv.eviction.plan import REFITS, RowModes
from retain.kv.eviction.query_scored import NumQueries, QueryScoredPolicy, divide_into_blocks, sum_output_changes
from retain.kv.eviction.view import CacheView
from retain.options import OPTION_GROUP


@dataclass(frozen=True, kw_only=True)
class Policy(QueryScoredPolicy):
    """Rank by the attention of the prompt's queries from behind it."""

    share: str = "all"
    modes: RowModes = field(default=REFITS, metadata=OPTION_GROUP)
    block: NumQueries = 1024  # tokens of the prompt whose queries are moved together; texts share whole blocks

    @property
    def query_blocks(self) -> Sequence[range]:
        """All positions of the prompt."""
        return divide_into_blocks(self.prompt_len, self.block)

    def score_queries(self, view: CacheView) -> Tensor:
        """Return the squared changes of outputs, of all queries of the block behind it."""
        return sum_output_changes(view, *view.queries_behind)
