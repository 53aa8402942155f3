"""The evicted state of a row as bytes, without what is in its pages: safetensors, read without trust.

Pages are numbered from 0 on in the order of `page_runs`, so that any pages of a pool may take their places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evicted_state import DemoterState, EvictedState, EvictorState, used_pages
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints

FORMAT_VERSION = 1
MAX_PAGES = 2**26  # of a state

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class StateShape:
    """What a state must fit: of each group that evicts, its number, layers, kv heads and slots of a page.

    `windowed_groups` are the groups of the sliding layers, one after another. Tensors go to `device`.
    """

    groups: Sequence[tuple[int, int, int, int]]
    windowed_groups: tuple[int, ...]
    num_kv_heads: Sequence[int]  # of every group
    device: torch.device


def page_runs(state: EvictedState, shape: StateShape) -> Iterator[tuple[int, bool, Ints]]:
    """Yield the pages of a state, layer after layer: their group, whether their slots are demoted, and pages [n]."""
    for (g, *_), part in zip(shape.groups, state.evictors, strict=True):
        for pages, counts in zip(part.pages, part.counts, strict=True):
            yield g, False, used_pages(pages, counts)
        if part.demoter:
            for pages, counts in zip(part.demoter.pages, part.demoter.counts, strict=True):
                yield g, True, used_pages(pages, counts)
    if state.windows:
        for g, pages in zip(state.windows.groups, state.windows.pages, strict=True):
            yield g, False, pages.ravel()


def with_pages(state: EvictedState, pages: Ints) -> EvictedState:
    """Return a decoded state in which `pages` [n] take the places of the numbers 0 to n - 1."""

    def place(part: EvictorState) -> EvictorState:
        demoter = part.demoter and replace(part.demoter, pages=_take(pages, part.demoter.pages))
        return replace(part, pages=_take(pages, part.pages), demoter=demoter)

    windows = state.windows and replace(state.windows, pages=tuple(_take(pages, p) for p in state.windows.pages))
    return replace(state, evictors=tuple(place(part) for part in state.evictors), windows=windows)


def _take(pages: Ints, numbers: Ints) -> Ints:
    found: Ints = pages[numbers] if len(pages) else numbers
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode_state(state: EvictedState) -> bytes:
    """Return all of a state but its pages. The host waits for the device."""
    windows = state.windows
    header = {
        "version": FORMAT_VERSION,
        "position": state.position,
        "policy": policies.to_spec(state.policy),
        "prompt_len": state.policy.prompt_len,
        "in_prompt": state.in_prompt,
        "is_dense": [part.is_dense for part in state.evictors],
        "next_eviction": [part.next_eviction for part in state.evictors],
        "windows": windows
        and {
            "first_pages": windows.first_pages,
            "num_pages": [p.shape[1] for p in windows.pages],
            "min_resume_position": windows.min_resume_position,
        },
    }
    arrays: dict[str, NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for i, part in enumerate(state.evictors):
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


def decode_state(data: bytes, policy: BudgetPolicy, shape: StateShape) -> EvictedState:
    """Return a state whose pages are numbers, see `page_runs`. Raises ValueError where it does not fit.

    `policy` is one under which a row goes on from it: what the state's own has beside its options is that policy's.
    """
    try:
        arrays = load(data)
        header = json.loads(arrays["header"].tobytes())
        _check(header["version"] == FORMAT_VERSION, "another version")
        return _Decoder(arrays, header, shape).decode(policy)
    except (SafetensorError, KeyError, TypeError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"an evicted state makes no sense: {error!r}") from None


class _Decoder:
    """Reads the arrays of one state, and numbers its pages."""

    def __init__(self, arrays: Arrays, header: Mapping[str, Any], shape: StateShape):
        self.arrays = arrays
        self.header = header
        self.shape = shape
        self.position = _number(header["position"], 1)
        self.num_pages = 0  # numbered so far

    def decode(self, policy: BudgetPolicy) -> EvictedState:
        """Return the state. Raises ValueError, and what a damaged header leads to."""
        evictors = tuple(self._evictor(i, *sizes) for i, (_, *sizes) in enumerate(self.shape.groups))
        in_prompt = self.header["in_prompt"]
        _check(isinstance(in_prompt, bool), "in_prompt")
        return EvictedState(self.position, self._policy(policy), evictors, self._windows(), in_prompt)

    def _policy(self, policy: BudgetPolicy) -> BudgetPolicy:
        """Return the policy of the state: another one of the same name, for another prompt."""
        own = policies.parse(self.header["policy"])
        if type(own) is not type(policy) or not isinstance(own, BudgetPolicy):
            raise ValueError("an evicted state does not fit: another policy")
        found = policy.with_options(**{f.name: getattr(own, f.name) for f in fields(own) if f.init})
        object.__setattr__(found, "prompt_len", _number(self.header["prompt_len"], 0))
        return found

    def _evictor(self, i: int, num_layers: int, num_heads: int, page_size: int) -> EvictorState:
        heads = (num_layers, num_heads)
        counts = self._array(f"{i}.counts", np.int32, heads)
        num_tokens = self._array(f"{i}.num_tokens", np.int32, heads)
        places = self._array(f"{i}.hole_places", np.int64, (*heads, None))
        is_dense = self.header["is_dense"][i]
        _check(isinstance(is_dense, bool), "is_dense")
        num_slots = counts.astype(np.int64) * page_size
        _check(bool((num_tokens <= num_slots).all()), "tokens without slots")
        _check(bool((places < num_slots[..., None]).all()), "holes beyond the tables")
        has_scores = self.arrays[f"{i}.scores"].ndim > 1
        scores = self._array(f"{i}.scores", np.float32, (*heads, None) if has_scores else (0,))
        return EvictorState(
            pages=self._tables(counts),
            counts=counts,
            num_tokens=num_tokens,
            head_budgets=self._array(f"{i}.head_budgets", np.int32, heads),
            is_dense=is_dense,
            next_eviction=_number(self.header["next_eviction"][i], self.position),
            hole_places=self._tensor(places),
            scores=(self._tensor(scores), self._tensor(self._array(f"{i}.scored_pos", np.int32, scores.shape, -1))),
            demoter=self._demoter(f"{i}.demoted", heads) if f"{i}.demoted.counts" in self.arrays else None,
        )

    def _demoter(self, name: str, heads: tuple[int, int]) -> DemoterState:
        counts = self._array(f"{name}.counts", np.int32, heads)
        scores = None
        if f"{name}.scores" in self.arrays:
            scores = self._tensor(self._array(f"{name}.scores", np.float32, (*heads, None)))
        return DemoterState(
            pages=self._tables(counts),
            counts=counts,
            capacities=torch.from_numpy(self._array(f"{name}.capacities", np.int64, heads)),
            head_budgets=torch.from_numpy(self._array(f"{name}.head_budgets", np.int64, heads)),
            num_left=torch.from_numpy(self._array(f"{name}.num_left", np.int64, heads)),
            scores=scores,
        )

    def _windows(self) -> SlidingWindows | None:
        groups = self.shape.windowed_groups
        found = self.header["windows"]
        _check((found is not None) == bool(groups), "sliding layers")
        if found is None:
            return None
        first_pages = tuple(_number(n, 0) for n in found["first_pages"])
        sizes = [_number(n, 0) for n in found["num_pages"]]
        _check(len(first_pages) == len(sizes) == len(groups), "the number of sliding layers")
        pages = []
        for g, n in zip(groups, sizes, strict=True):
            num_heads = self.shape.num_kv_heads[g]
            pages.append(self._take_numbers(n * num_heads).reshape(num_heads, n))
        least = _number(found["min_resume_position"], 0)
        return SlidingWindows(first_pages, tuple(pages), least, groups)

    def _tables(self, counts: Ints) -> Ints:
        """Return tables [M, G, n] of the next numbers, where heads have `counts` [M, G] pages."""
        width = int(counts.max(initial=0))
        numbers = self._take_numbers(int(counts.sum(dtype=np.int64)))
        pages = np.zeros((*counts.shape, width), np.int32)
        pages[np.arange(width) < counts[..., None]] = numbers
        return pages

    def _take_numbers(self, n: int) -> Ints:
        _check(self.num_pages + n <= MAX_PAGES, "too many pages")
        self.num_pages += n
        return np.arange(self.num_pages - n, self.num_pages, dtype=np.int32)

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
    """Return an integer. Raises ValueError unless it is one, and not below `least`."""
    _check(isinstance(value, int) and not isinstance(value, bool) and value >= least, f"{value!r} is no number here")
    return int(value)


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(f"an evicted state does not fit: {problem}")
