"""Reorders the tokens of spans by importance, and makes the metadata of spans.

In each layer of a reordered span the tokens with the most attention come first. Tokens that are important to the
next text are then contiguous and can be read alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV, Backend
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.selective import importance
from retain.kv.stores.selective.importance import SpanMetadata
from retain.kv.stores.span import CorruptionError, Span, alloc_aligned
from retain.kv.stores.store import Store
from retain.kv.stores.transfer import PageTransfer
from retain.kv.stores.warning_log import WarningLog
from retain.threads import reset_cpu_affinity
from retain.types import Bytes, Floats, Ints

REPACK_AFTER = 16  # loads between two reorderings of a span, and the memory of its running averages


@dataclass(frozen=True)
class ProbeConfig:
    """How important tokens are chosen: a share `ratio` of them, by attention scores with factor `scale`."""

    ratio: float
    scale: float
    kv_heads: int
    backend: Backend  # of the kernels that read the pool's pages
    kv: KV

    @property
    def num_probe_heads(self) -> int:
        """The number of heads whose attention tells which tokens are important."""
        return min(importance.NUM_PROBE_HEADS, self.kv_heads)

    def parse_metadata(self, span: Span, data: Bytes) -> SpanMetadata:
        """Return the metadata of a span from its bytes."""
        return importance.parse_metadata(
            data, len(span.num_blocks), len(span.keys), self.num_probe_heads, self.kv.page_size
        )

    def initial_metadata(self, layer_pages: Sequence[Ints]) -> Bytes:
        """Return the bytes of metadata for pages [n, G] of each layer in text order, with no attention measured yet."""
        kv = self.kv
        S = kv.page_size
        M = len(layer_pages)
        n = len(layer_pages[0])
        pages = kv.to_index(np.stack([p[:, : self.num_probe_heads] for p in layer_pages]))  # [M, n, P]
        k, _ = self.backend.read_slots(kv, pages[..., None] * S + torch.arange(S, device=kv.device))
        order = np.broadcast_to(np.arange(n * S, dtype=np.uint16), (M, n * S))
        sketches = importance.sketch_keys(k.cpu())
        return SpanMetadata(sketches, order, np.zeros((M, n * S), np.float32)).serialized

    def metadata_size(self, num_layers: int, num_blocks: int) -> int:
        """Return the size of a span's metadata in bytes."""
        return importance.metadata_size(num_layers, num_blocks, self.num_probe_heads, self.kv.page_size, self.kv.k_dim)


class Repacker:
    """Averages the attention on spans, and reorders them by it in the background."""

    def __init__(self, probe_config: ProbeConfig, warnings: WarningLog):
        self.probe_config = probe_config
        self.warnings = warnings
        # For each span that still exists, a running average [M, n S] and the number of loads in it.
        self.average_mass: MutableMapping[Span, tuple[Floats, int]] = WeakKeyDictionary()
        self.executor = ThreadPoolExecutor(1, "retain-pack", reset_cpu_affinity)
        self.in_progress: set[Span] = set()

    def record_attention(self, store: Store, span: Span, initial_mass: Floats, mass: Floats) -> None:
        """Update the running average of the attention mass of a span's tokens, [layers, tokens] in text order.

        The first average of a span starts from `initial_mass`, which its metadata hold.
        """
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
                new, data = reorder_span(self.probe_config, span, reader, mass)
                store.put(new, data, replaces=span)
        except OSError as error:
            self.warnings.warn(f"tier {store.name}: a span could not be read to be reordered and is dropped", error)
            store.delete(span, is_corrupted=isinstance(error, CorruptionError))
        except Exception as error:  # the span stays as it is; it is not tried again
            self.warnings.warn(f"tier {store.name}: a span could not be reordered", error)
            return
        self.in_progress.discard(span)

    def sync(self) -> None:
        """Wait until all submitted spans are reordered."""
        self.executor.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the submitted spans and stop."""
        self.executor.shutdown()


def reorder_span(probe_config: ProbeConfig, span: Span, reader: SpanReader, mass: Floats) -> tuple[Span, Bytes]:
    """Return a copy of a span and its bytes, with each layer's tokens ordered by mass [M, n S], the largest first."""
    kv = probe_config.kv
    S = kv.page_size
    n = len(span.keys)
    G = probe_config.kv_heads
    backend = probe_config.backend
    P = probe_config.num_probe_heads
    metadata = probe_config.parse_metadata(span, reader.read_metadata())
    order = np.argsort(-mass, axis=1, kind="stable").astype(np.uint16)
    new = replace(span, is_reordered=True, data_offset=0)
    data = alloc_aligned(new.size)
    # Pages in the old order, then in the new.
    pool = backend.allocate(1 + 2 * n * G, S, kv.k_dim, kv.dtype, 1, v_dim=kv.v_dim).with_sketches(kv.sketch_bytes)
    transfer = PageTransfer(pool)
    old_pages, new_pages = (np.arange(n * G).reshape(n, G) + 1 + i * n * G for i in (0, 1))
    sketches = []
    for m in range(len(span.num_blocks)):
        transfer.upload(old_pages.astype(np.int32), reader.read_blocks(m, 0, n).reshape(n, G, -1))
        pool.pos[:] = 0
        old_place = np.empty(n * S, np.int64)  # of each token
        old_place[metadata.token_order[m]] = np.arange(n * S)
        src = _slot_indices(old_pages, old_place[order[m]], S)
        backend.move(pool, src, _slot_indices(new_pages, np.arange(n * S), S))
        transfer.download(new_pages.astype(np.int32), new.view_layer(data, m).reshape(n, G, -1))
        k, _ = backend.read_slots(pool, torch.from_numpy(new_pages[:, :P, None] * S + np.arange(S)))
        sketches.append(importance.sketch_keys(k))
    new.view_metadata(data)[:] = SpanMetadata(np.stack(sketches), order, mass.astype(np.float32)).serialized
    return new, data


def _slot_indices(pages: NDArray[np.int64], offsets: NDArray[np.int64], page_size: int) -> Tensor:
    """Return the slots at these offsets into each head's pages [n, G]: [G, n S], int32."""
    return torch.from_numpy((pages.T[:, offsets // page_size] * page_size + offsets % page_size).astype(np.int32))
