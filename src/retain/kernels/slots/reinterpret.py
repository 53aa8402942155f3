"""The memory of a pool as pages of one kind of slots: each page of K, and of V, is a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.slots.pool_dtypes import INT4, key_bytes, tensor_dtypes, value_bytes

PAGE_ALIGNMENT = 64  # bytes, of pages that slots of several kinds share
SKETCH_GROUP = 16  # slots whose values have one mean


@dataclass(frozen=True)
class PageFormat:
    """How a page is divided into slots: their number, the dtype of the pool, and the numbers of a key and of a value.

    Masses have C = `score_columns`. With `has_sketches` a page has sketches, too: see "Looks" in kernels/api.py.
    """

    page_size: int
    dtype: torch.dtype
    k_dim: int
    v_dim: int
    score_columns: int = 1
    has_sketches: bool = False

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes of a page of K, and of V."""
        return self.page_size * key_bytes(self.k_dim, self.dtype), self.page_size * value_bytes(self.v_dim, self.dtype)

    @property
    def slot_state_bytes(self) -> int:
        """The bytes of a page's positions, masses and sketches, which lie elsewhere."""
        return self.page_size * (4 + 4 * self.score_columns) + self.sketch_bytes

    @property
    def sketch_bytes(self) -> int:
        """The bytes of a page's sketches: keys in 4 bits, means of values, and how far values are from them."""
        if not self.has_sketches:
            return 0
        copies = 0 if self.dtype == INT4 else self.page_size * key_bytes(self.k_dim, INT4)
        return copies + 2 * (self.page_size // SKETCH_GROUP * self.v_dim + self.page_size)


def shared_page_bytes(formats: list[PageFormat]) -> tuple[int, int]:
    """Return the bytes of K and of V that a page needs to hold slots of any of these formats."""
    if len(formats) == 1:
        return formats[0].bytes
    k, v = (max(sizes) for sizes in zip(*(f.bytes for f in formats), strict=True))
    return -(-k // PAGE_ALIGNMENT) * PAGE_ALIGNMENT, -(-v // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def view_pages(memory: tuple[Tensor, Tensor], format: PageFormat) -> tuple[Tensor, Tensor]:
    """Return the first bytes of each page of K and V, as many as the format needs: views [P, numbers] of its dtypes.

    `memory` are tensors [P, ...] of K and of V. A page reaches to the next one, whatever its slots take. Raises
    ValueError if a page is too short.
    """
    flat = [x.as_strided((len(x), x.stride(0)), (x.stride(0), 1)).view(torch.uint8) for x in memory]
    if any(x.shape[1] < size for x, size in zip(flat, format.bytes, strict=True)):
        found = " and ".join(str(x.shape[1]) for x in flat)
        raise ValueError(f"a page of {found} bytes cannot hold {format.page_size} slots in {format.dtype}")
    k, v = (
        x[:, :size].view(dtype) for x, size, dtype in zip(flat, format.bytes, tensor_dtypes(format.dtype), strict=True)
    )
    return k, v
