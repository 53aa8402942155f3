"""Task `ruler_ask_later`: the documents of `ruler`, evicted to their budget before each question is asked."""

from retain.bench.documents import measure_later as measure
from retain.bench.tasks.ruler import METRICS, REQUESTS_PER_ITEM, load_items

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]
