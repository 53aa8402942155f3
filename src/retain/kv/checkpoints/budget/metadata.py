"""The checkpoint of a budget as bytes, without what is in its pages: safetensors, read without trust.

Pages are numbered from 0 on in the order of its runs, so that any pages of a pool may take their places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from retain.kernels.api import NO_WINDOW
from retain.kernels.ranks import KVHeads
from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.checkpoints.windows_and_states import WindowsAndStates
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import DemoterState, EvictorState
from retain.kv.memory.block_tables import BlockTables
from retain.options import RESOLVED
from retain.types import Ints

FORMAT_VERSION = 1
LARGEST = 2**31 - 1  # number in a header

Arrays = Mapping[str, NDArray[Any]]


class CheckpointShape:
    """What a checkpoint must fit: the tables of each KV cache group, and how far its layers see under a policy."""

    def __init__(self, groups: Sequence[BlockTables], windows: Sequence[Ints], kv_heads: KVHeads):
        self.kv_heads = kv_heads
        self.num_kv_heads = [t.counts.shape[2] for t in groups]
        self.page_sizes = [t.page_size for t in groups]
        self.score_columns = [t.kv.mass.shape[1] for t in groups]
        self.full_layers = [int((own == NO_WINDOW).sum()) for own in windows]  # of each group
        self.sliding = [  # group, number in the model and window of each other layer
            (g, int(layer), int(window))
            for g, (t, own) in enumerate(zip(groups, windows, strict=True))
            for layer, window in zip(t.layers, own, strict=True)
            if window < NO_WINDOW
        ]
        self.device = groups[0].kv.device

    @property
    def evicting_groups(self) -> list[int]:
        """The groups that have layers without a window."""
        return [g for g, n in enumerate(self.full_layers) if n]


def with_pages(checkpoint: BudgetCheckpoint, pages: Ints) -> BudgetCheckpoint:
    """Return a decoded checkpoint in which `pages` [n] take the places of the numbers 0 to n - 1."""

    def place(part: EvictorState) -> EvictorState:
        demoter = part.demoter and replace(part.demoter, pages=_take(pages, part.demoter.pages))
        return replace(part, pages=_take(pages, part.pages), demoter=demoter)

    windows = checkpoint.windows and replace(
        checkpoint.windows, pages=tuple(_take(pages, p) for p in checkpoint.windows.pages)
    )
    return replace(checkpoint, evictors=tuple(place(part) for part in checkpoint.evictors), windows=windows)


def _take(pages: Ints, numbers: Ints) -> Ints:
    found: Ints = pages[numbers] if len(pages) else numbers
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode_metadata(checkpoint: BudgetCheckpoint) -> bytes:
    """Return all of a checkpoint but its pages. The host waits for the device."""
    windows = checkpoint.windows
    header = {
        "version": FORMAT_VERSION,
        "position": checkpoint.position,
        "policy": policies.to_spec(checkpoint.policy),
        "prompt_len": checkpoint.policy.prompt_len,
        "in_prompt": checkpoint.in_prompt,
        "is_dense": [part.is_dense for part in checkpoint.evictors],
        "next_eviction": [part.next_eviction for part in checkpoint.evictors],
        "windows": windows
        and {
            "first_pages": windows.first_pages,
            "resumes_from": windows.resumes_from,
        },
    }
    arrays: dict[str, NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    arrays |= {f"masses.{g}": _on_host(x) for g, x in enumerate(checkpoint.masses)}
    for i, part in enumerate(checkpoint.evictors):
        scores, scored_pos = part.scores
        arrays |= {
            f"{i}.counts": part.counts.astype(np.int32),
            f"{i}.num_tokens": part.num_tokens.astype(np.int32),
            f"{i}.head_budgets": part.head_budgets.astype(np.int32),
            f"{i}.hole_places": _on_host(part.hole_places),
            f"{i}.scores": _on_host(scores),
            f"{i}.scored_pos": _on_host(scored_pos),
        }
        if demoter := part.demoter:
            arrays |= {
                f"{i}.demoted.counts": demoter.counts.astype(np.int32),
                f"{i}.demoted.capacities": _on_host(demoter.capacities),
                f"{i}.demoted.head_budgets": _on_host(demoter.head_budgets),
                f"{i}.demoted.num_left": _on_host(demoter.num_left),
            }
            if demoter.scores is not None:
                arrays[f"{i}.demoted.scores"] = _on_host(demoter.scores)
    return save({name: np.ascontiguousarray(x) for name, x in arrays.items()})


def _on_host(x: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.cpu().numpy()
    return found


# ---- reading ---------------------------------------------------------------------------------------------------------


def decode_metadata(data: bytes, policy: BudgetPolicy, shape: CheckpointShape, num_pages: int) -> BudgetCheckpoint:
    """Return a checkpoint whose `num_pages` pages are numbers, in the order of its runs.

    `policy` is one under which a row goes on from it: what its own has beside its options is that policy's. Raises
    ValueError where it does not fit.
    """
    try:
        arrays = load(data)
        header = json.loads(arrays["header"].tobytes())
        _check(header["version"] == FORMAT_VERSION, "another version")
        return _Decoder(arrays, header, shape, num_pages).decode(policy)
    except (SafetensorError, KeyError, TypeError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"the checkpoint of a budget makes no sense: {error!r}") from None


class _Decoder:
    """Reads the arrays of one checkpoint, and numbers its pages."""

    def __init__(self, arrays: Arrays, header: Mapping[str, Any], shape: CheckpointShape, num_pages: int):
        self.arrays = arrays
        self.header = header
        self.shape = shape
        self.position = _number(header["position"], 1)
        self.num_pages = num_pages
        self.num_named = 0  # pages that are numbered so far

    def decode(self, policy: BudgetPolicy) -> BudgetCheckpoint:
        """Return the checkpoint. Raises ValueError, and what a damaged header leads to."""
        own = self._policy(policy)
        evictors = tuple(self._evictor(i, g, own) for i, g in enumerate(self.shape.evicting_groups))
        in_prompt = self.header["in_prompt"]
        _check(isinstance(in_prompt, bool), "in_prompt")
        windows = self._windows()
        _check(self.num_named == self.num_pages, "the number of pages")
        groups = tuple(self.shape.evicting_groups)
        return BudgetCheckpoint(self.position, own, evictors, groups, windows, in_prompt, self._masses())

    def _masses(self) -> tuple[Tensor, ...]:
        """Return the masses of a checkpoint that has evicted nothing, in all groups, or none."""
        if "masses.0" not in self.arrays:
            return ()
        s = self.shape
        sizes = zip(s.full_layers, s.num_kv_heads, s.page_sizes, s.score_columns, strict=True)
        shapes = [(M, G, -(-self.position // S), C, S) for M, G, S, C in sizes]
        return tuple(self._tensor(self._array(f"masses.{g}", np.float32, x)) for g, x in enumerate(shapes))

    def _policy(self, policy: BudgetPolicy) -> BudgetPolicy:
        """Return the policy of the checkpoint: another one of the same name, for another prompt."""
        own = policies.parse(self.header["policy"])
        if type(own) is not type(policy) or not isinstance(own, BudgetPolicy):
            raise ValueError("the checkpoint of a budget does not fit: another policy")
        options = {f.name: getattr(own, f.name) for f in fields(own) if f.metadata != RESOLVED}
        return replace(policy, **options, prompt_len=_number(self.header["prompt_len"], 0))

    def _evictor(self, i: int, group: int, policy: BudgetPolicy) -> EvictorState:
        shape = self.shape
        heads = (shape.full_layers[group], shape.num_kv_heads[group])
        all_heads = heads[0], shape.kv_heads.num_of_all(heads[1])
        counts = self._array(f"{i}.counts", np.int32, heads)
        num_tokens = self._array(f"{i}.num_tokens", np.int32, all_heads)
        places = self._array(f"{i}.hole_places", np.int64, (*heads, None))
        is_dense = self.header["is_dense"][i]
        _check(isinstance(is_dense, bool), "is_dense")
        num_slots = counts.astype(np.int64) * shape.page_sizes[group]
        largest = shape.kv_heads.largest(num_tokens)
        _check(bool((largest <= np.minimum(num_slots, self.position)).all()), "tokens without slots")
        _check(bool((places < num_slots[..., None]).all()), "holes beyond the tables")
        next_eviction = _number(self.header["next_eviction"][i], self.position)
        num_holes = next_eviction - self.position
        if self.position < policy.prompt_len:  # a longer prompt fills a whole chunk
            num_holes = max(num_holes, policy.plan.chunk)
        _check(places.shape[-1] == (0 if is_dense else num_holes), "the number of holes")
        has_scores = self.arrays[f"{i}.scores"].ndim > 1
        scores = self._array(f"{i}.scores", np.float32, (*heads, None) if has_scores else (0,))
        return EvictorState(
            pages=self._tables(counts),
            counts=counts,
            num_tokens=num_tokens,
            head_budgets=self._array(f"{i}.head_budgets", np.int32, all_heads),
            is_dense=is_dense,
            next_eviction=next_eviction,
            hole_places=self._tensor(places),
            scores=(self._tensor(scores), self._tensor(self._array(f"{i}.scored_pos", np.int32, scores.shape, -1))),
            demoter=self._demoter(f"{i}.demoted", heads, all_heads) if f"{i}.demoted.counts" in self.arrays else None,
        )

    def _demoter(self, name: str, heads: tuple[int, int], all_heads: tuple[int, int]) -> DemoterState:
        counts = self._array(f"{name}.counts", np.int32, heads)
        scores = None
        if f"{name}.scores" in self.arrays:
            scores = self._tensor(self._array(f"{name}.scores", np.float32, (*heads, None)))
        return DemoterState(
            pages=self._tables(counts),
            counts=counts,
            capacities=torch.from_numpy(self._array(f"{name}.capacities", np.int64, all_heads)),
            head_budgets=torch.from_numpy(self._array(f"{name}.head_budgets", np.int64, all_heads)),
            num_left=torch.from_numpy(self._array(f"{name}.num_left", np.int64, all_heads)),
            scores=scores,
        )

    def _windows(self) -> WindowsAndStates | None:
        sliding = self.shape.sliding
        found = self.header["windows"]
        _check((found is not None) == bool(sliding), "sliding layers")
        if found is None:
            return None
        first_pages = [_number(n, 0) for n in found["first_pages"]]
        _check(len(first_pages) == len(sliding), "the number of sliding layers")
        pages = []
        for first, (g, _, window) in zip(first_pages, sliding, strict=True):
            S = self.shape.page_sizes[g]
            num_heads = self.shape.num_kv_heads[g]
            num_pages = -(-self.position // S) - first
            _check(num_pages >= 0 and first <= max(self.position - window + 1, 0) // S, "the pages of a window")
            pages.append(self._take_numbers(num_pages * num_heads).reshape(num_heads, num_pages))
        least = _number(found["resumes_from"], 0)
        _check(least <= self.position, "the windows")
        groups, layers, _ = zip(*sliding, strict=True)
        return WindowsAndStates(self.position, tuple(first_pages), tuple(pages), least, groups, layers)

    def _tables(self, counts: Ints) -> Ints:
        """Return tables [M, G, n] of the next numbers, where heads have `counts` [M, G] pages."""
        width = int(counts.max(initial=0))
        numbers = self._take_numbers(int(counts.sum(dtype=np.int64)))
        pages = np.zeros((*counts.shape, width), np.int32)
        pages[np.arange(width) < counts[..., None]] = numbers
        return pages

    def _take_numbers(self, n: int) -> Ints:
        _check(self.num_named + n <= self.num_pages, "the number of pages")
        self.num_named += n
        return np.arange(self.num_named - n, self.num_named, dtype=np.int32)

    def _array(self, name: str, dtype: type, shape: Sequence[int | None], least: int = 0) -> NDArray[Any]:
        """Return an array of this dtype and shape, in which None is any size; integers are at least `least`."""
        x = self.arrays[name]
        fits = x.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
        _check(x.dtype == dtype and fits, f"{name} is {x.dtype} {x.shape}")
        if np.issubdtype(x.dtype, np.integer):
            _check(bool((x >= least).all()), f"{name} is below {least}")
        return x

    def _tensor(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(self.shape.device)


def _number(value: Any, least: int) -> int:
    """Return an integer. Raises ValueError unless it is one, from `least` to LARGEST."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    _check(is_number and least <= value <= LARGEST, f"{value!r} is no number here")
    return int(value)


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(f"the checkpoint of a budget does not fit: {problem}")
