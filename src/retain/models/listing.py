"""A model as a table, which cli/model.py prints: operations, shapes and bytes of weights, what its layers cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from retain.kernels.ops import Buffer, Operation
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kernels.weights.quantized import QuantizedWeight
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import StackedWeight, Weight, kind_of, parts_of, row_energies

Row = dict[str, Any]
COMPUTED = ("factors", "params.alibi_slopes", "params.key_offset", "rope.freqs")  # tensors that are in no file


class Listing:
    """The part of a `Program` that a model is loaded into: it notes what it would compute."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def load(self, operations: Iterable[Operation]) -> None:
        """Note a line for each operation, and compute none."""
        for op in operations:
            op.check()
            self.rows.append(describe(op))

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Return the sum of factors[i] * w[i]^2 over each row w of a weight, float32 [out]."""
        return row_energies(weight, factors)


def describe(op: Operation) -> Row:
    """Return an operation without its numbers: a weight is a shape, a format and bytes.

    What a checkpoint calls the rows of a product is left out: else no layer would repeat another.
    """
    row: Row = {"op": type(op).__name__, "buffers": {}, "weights": {}, "constants": {}}
    for name, value in vars(op).items():
        if isinstance(value, Buffer):
            row["buffers"][name] = [value.name, value.width]
        elif name in ("cache", "caches"):
            row[name] = value
        elif name != "rows":
            _add(row, name, value)
    return row


def _add(row: Row, name: str, value: object) -> None:
    """Add a field, and the fields of a record that it is, to the weights or the constants."""
    if isinstance(value, Tensor | StoredWeight | StackedWeight | QuantizedWeight):
        shape = list(value.shape)
        row["weights"][name] = {"shape": shape, "format": format_of(value), "bytes": bytes_of(value)}
    elif is_dataclass(value):
        for field in fields(value):
            _add(row, f"{name}.{field.name}", getattr(value, field.name))
    elif value is not None:
        row["constants"][name] = value if _is_finite(value) else str(value)


def _is_finite(value: object) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return all(not isinstance(x, float) or math.isfinite(x) for x in numbers)


def format_of(weight: Weight) -> str:
    """Return the name of a weight's format: of ggml's blocks as there, of others as programs compute them."""
    return " + ".join(dict.fromkeys(map(_name, parts_of(weight))))


def _name(weight: Weight) -> str:
    if isinstance(weight, StoredWeight) and weight.ggml_type is not None:
        return GGMLQuantizationType(weight.ggml_type).name
    kind = kind_of(weight)
    return kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("torch.")


def bytes_of(weight: Weight) -> int:
    """Return the bytes of a weight in that format."""
    if isinstance(weight, StackedWeight):
        return sum(map(bytes_of, weight.parts))
    if isinstance(weight, StoredWeight):
        row = weight.convert(0, 1) if weight.ggml_type is None else torch.from_numpy(weight.read_blocks(0, 1))
        return weight.shape[0] * bytes_of(row)
    if isinstance(weight, Tensor):
        return weight.nbytes
    return weight.q.numel() * weight.BITS // 8 + sum(x.nbytes for name, x in vars(weight).items() if name != "q")


def list_caches(spec: KVCacheSpec) -> Iterator[Row]:
    """Yield what each cache holds: its kind, its sizes, its window, and the cache that it shares."""
    for i in range(len(spec.caches)):
        own = spec.source_cache(i)
        held = spec.caches[own]
        row = {"cache": i, "layer": spec.layer_numbers[i], "kind": type(held).__name__.removesuffix("Spec")}
        sizes = {f.name: getattr(held, f.name) for f in fields(held)}
        yield row | sizes | ({} if own == i else {"shares": own})


def count_parameters(rows: Iterable[Row]) -> int:
    """Return the numbers of all weights. Those that several operations use, as tied embeddings, count each time."""
    return sum(math.prod(w["shape"]) for row in rows for name, w in row["weights"].items() if name not in COMPUTED)


def find_repeats(rows: Sequence[Row], longest: int = 400) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, length, times) for parts of a list that cover it: a part of `length` rows that comes `times` times.

    Rows are equal if they differ in their caches alone.
    """
    keys = [repr({k: v for k, v in row.items() if k not in ("cache", "caches")}) for row in rows]
    begin = 0
    while begin < len(keys):
        best = (1, 1)  # times and length
        for length in range(1, min(longest, (len(keys) - begin) // 2) + 1):
            times = 1
            part = keys[begin : begin + length]
            while keys[begin + times * length : begin + (times + 1) * length] == part:
                times += 1
            if (times - 1) * length > (best[0] - 1) * best[1]:
                best = (times, length)
        times, length = best
        yield begin, length, times
        begin += times * length
