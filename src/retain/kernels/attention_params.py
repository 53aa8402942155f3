"""What the attention of a layer needs beside queries, tables and slots.

One record goes from a family to the kernels: the spec of a model has it, a layer may have its own, programs and runners
hand it on, and a backend converts it for its kernels. So a new field is added here, in the definition
(reference/softmax.py) and in the kernels that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """The constants of a layer's attention. Tensors are float32, of H query heads or G kv heads of D numbers.

    A score is x = c(scale * q.k) + alibi_slopes[h] * (position of the slot - position of the query). With a softcap
    c(y) = softcap * tanh(y / softcap), as in Gemma 2 (arXiv 2408.00118); without one c(y) = y.

    The softmax is over a query's scores and its head's sink logit, as in gpt-oss. A sink logit has no value and gets no
    mass. Where a mass comes from scores with noise, a sink logit has the mean of the noise: constants change nothing.
    """

    scale: float
    alibi_slopes: Tensor | None = None  # [H]
    key_offset: Tensor | None = None  # [G, D], subtracted from keys before they are written
    softcap: float | None = None  # positive
    sink_logits: Tensor | None = None  # [H]
    first_head: int = 0  # the number of the first of these kv heads among those of all ranks: noise depends on it

    def __eq__(self, other: object) -> bool:
        """Compare tensors by their numbers."""
        if not isinstance(other, AttentionParams):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    @property
    def is_shift_invariant(self) -> bool:
        """Whether weights stay the same if all scores of a query change by the same number, as by a key offset."""
        return self.softcap is None and self.sink_logits is None

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> AttentionParams:
        """Return the record with each of its tensors converted."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        converted: dict[str, Any] = {name: convert(x) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **converted)

    def check(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError unless tensors fit H query heads and G kv heads of D numbers, and numbers make sense."""
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"attention: softcap must be positive, not {self.softcap}")
        if self.key_offset is not None and not self.is_shift_invariant:
            raise ValueError("attention: a key_offset changes weights where there is a softcap, or sink_logits")
        shapes = {
            "alibi_slopes": (num_heads,),
            "key_offset": (num_kv_heads, head_dim),
            "sink_logits": (num_heads,),
        }
        for name, shape in shapes.items():
            x: Tensor | None = getattr(self, name)
            if x is not None and (x.shape != shape or x.dtype != torch.float32):
                raise ValueError(f"attention: {name} must be float32 {list(shape)}, not {x.dtype} {list(x.shape)}")


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
