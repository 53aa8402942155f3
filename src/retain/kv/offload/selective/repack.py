"""Notes of spans (kv/importance.py): made when a span is born, and anew when its tokens are packed by importance.

A packed span has in every layer the tokens first that were looked at most, so that what is important to the next text
lies side by side, and is read alone. What is not known here: who looks, where spans lie.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV
from retain.kv.offload.selective import importance
from retain.kv.offload.selective.importance import SpanMetadata
from retain.kv.offload.span import CorruptionError, Span, SpanReader, Store, alloc_aligned
from retain.threads import reset_cpu_affinity
from retain.types import Bytes, Ints

REPACK_AFTER = 16  # wakings of a span after which it is packed anew, and that its running averages remember


@dataclass(frozen=True)
class ProbeConfig:
    """Who says what is loaded, a `ratio` of the tokens. `scale`: of attention scores; `heads`: kv heads; all of them
    pages of `backend`.
    """

    ratio: float
    scale: float
    kv_heads: int
    backend: ModuleType

    @property
    def num_probe_heads(self) -> int:
        """Heads that are asked."""
        return min(importance.NUM_PROBE_HEADS, self.kv_heads)

    def parse_metadata(self, span: Span, data: Bytes, kv: KV) -> SpanMetadata:
        """A span's, from their bytes."""
        M, n = len(span.num_blocks), len(span.keys)
        return importance.parse_metadata(data, M, n, self.num_probe_heads, kv.page_size, kv.head_dim)

    def initial_metadata(self, kv: KV, layer_pages: Sequence[Ints]) -> SpanMetadata:
        """Of pages [n, G] of each layer, as they were computed."""
        S, M, n = kv.page_size, len(layer_pages), len(layer_pages[0])
        pages = kv.to_index(np.stack([r[:, : self.num_probe_heads] for r in layer_pages]))  # [M, n, P]
        k, _ = self.backend.read(kv, pages.flatten())
        order = np.broadcast_to(np.arange(n * S, dtype=np.uint16), (M, n * S))
        found = importance.sketch_keys(k.reshape(*pages.shape, S, -1).cpu())
        return SpanMetadata(found, order, np.zeros((M, n * S), np.float32))

    def metadata_size(self, num_layers: int, num_blocks: int, kv: KV) -> int:
        """Of notes, in bytes."""
        return importance.metadata_size(num_layers, num_blocks, self.num_probe_heads, kv.page_size, kv.head_dim)


class Repacker:
    """What queries looked at in spans; and spans that are packed anew by it, in the background."""

    def __init__(self, probe_config: ProbeConfig, kv: KV):
        self.probe_config, self.kv = probe_config, kv
        # Running averages [M, n S], of how many. Spans that are nowhere any more are forgotten.
        self.average_mass: MutableMapping[Span, tuple[NDArray[np.float32], int]] = WeakKeyDictionary()
        self.executor = ThreadPoolExecutor(1, "retain-pack", reset_cpu_affinity)
        self.in_progress: set[Span] = set()

    def record_attention(
        self, store: Store, span: Span, initial_mass: NDArray[np.float32], mass: NDArray[np.float32]
    ) -> None:
        """Some queries left this mass on the tokens of a span [M, n S]; `before`: what its notes say."""
        average, n = self.average_mass.get(span, (initial_mass, REPACK_AFTER if span.is_reordered else 0))
        weight = 1 / min(n + 1, REPACK_AFTER)
        n = n + 1
        self.average_mass[span] = (1 - weight) * average + weight * mass, n
        if span not in self.in_progress and (not span.is_reordered or n >= 2 * REPACK_AFTER):
            self.in_progress.add(span)
            self.executor.submit(self._repack, store, span)

    def _repack(self, store: Store, span: Span) -> None:
        mass, _ = self.average_mass.pop(span, (np.zeros(0, np.float32), 0))
        try:
            with closing(store.open(span)) as reader:
                new, data = reorder_span(self.probe_config, self.kv, span, reader, mass)
                store.put(new, data, replaces=span)
        except OSError as error:
            store.delete(span, is_corrupted=isinstance(error, CorruptionError))
        self.in_progress.discard(span)

    def sync(self) -> None:
        """Wait until what was to be packed is."""
        self.executor.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what was begun."""
        self.executor.shutdown()


def reorder_span(
    probe_config: ProbeConfig, kv: KV, span: Span, reader: SpanReader, mass: NDArray[np.float32]
) -> tuple[Span, Bytes]:
    """A span with the tokens of every layer in the order of their masses [M, n S], the largest first; and its bytes."""
    S, M, n, G = kv.page_size, len(span.num_blocks), len(span.keys), probe_config.kv_heads
    notes = probe_config.parse_metadata(span, reader.read_metadata(), kv)
    order = np.argsort(-mass, axis=1, kind="stable").astype(np.uint16)
    new = Span(
        span.keys,
        span.num_blocks,
        span.block_bytes,
        span.start_page,
        hits=span.hits,
        last_used_at=span.last_used_at,
        metadata_bytes=span.metadata_bytes,
        is_reordered=True,
    )
    data = alloc_aligned(new.size)
    two = probe_config.backend.allocate(
        1 + 2 * n * G, S, kv.head_dim, kv.dtype, 1
    )  # pages as they are, and as they will be
    raw = [x.flatten(1).view(torch.uint8).numpy() for x in (two.k, two.v)]
    before, after = (np.arange(n * G).reshape(n, G) + 1 + i * n * G for i in (0, 1))
    sketches = []
    for m in range(M):
        given = reader.read_blocks(m, 0, n).reshape(n, G, 2, -1)
        for i, x in enumerate(raw):
            x[before] = given[:, :, i]
        two.pos[:] = 0
        place = np.empty(n * S, np.int64)
        place[notes.token_order[m]] = np.arange(n * S)  # of each token, where it lies
        src, dst = (_slot_indices(x, at, S) for x, at in ((before, place[order[m]]), (after, np.arange(n * S))))
        probe_config.backend.move(two, src, dst)
        out = new.view_layer(data, m).reshape(n, G, 2, -1)
        for i, x in enumerate(raw):
            out[:, :, i] = x[after]
        k, _ = probe_config.backend.read(two, torch.from_numpy(after[:, : probe_config.num_probe_heads]).flatten())
        sketches.append(importance.sketch_keys(k.reshape(n, probe_config.num_probe_heads, S, -1)))
    told = SpanMetadata(np.stack(sketches), order, mass.astype(np.float32)).serialized
    data[new.offsets[-2] : new.offsets[-2] + len(told)] = told
    return new, data


def _slot_indices(pages: NDArray[np.int64], offsets: NDArray[np.int64], page_size: int) -> Tensor:
    """Of places in the heads' tables, pages [n, G]: [G, n S], int32."""
    return torch.from_numpy((pages.T[:, offsets // page_size] * page_size + offsets % page_size).astype(np.int32))
