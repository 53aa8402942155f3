"""Numbers out of ggml's blocks: the three types that make up most of most files in one pass, all others by `gguf`.

The library knows every type, but works sixteen rows at a time, which takes seconds for the 262144 rows of Gemma's
embedding. Both give the same bits, which a test checks. One thread: torch's would wait for each other wherever the
machine is busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from retain.models.gguf.header import Unsupported

PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml types that torch has too
SIZES = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}  # numbers in a block, bytes in a block
SIMPLE = {  # 32 numbers in a block: a scale d, perhaps a shift m, and quanta q of 8 bits, or of 4 in two halves
    2: np.dtype([("d", "<f2"), ("q", "u1", 16)]),  # Q4_0
    3: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),  # Q4_1
    8: np.dtype([("d", "<f2"), ("q", "i1", 32)]),  # Q8_0
}


def numbers(raw: NDArray[np.uint8], kind: int, shape: tuple[int, ...]) -> Tensor:
    """The bytes of a tensor of a ggml type -> its numbers: float16 and bfloat16 as they are, everything else float32.

    Raises ValueError for a type that cannot be dequantised.
    """
    if kind in PLAIN:
        return torch.from_numpy(raw).view(PLAIN[kind]).view(shape)
    with np.errstate(all="ignore"):  # damaged scales overflow; that is for whoever looks at the numbers
        if kind in SIMPLE:
            return torch.from_numpy(_simple(raw.view(SIMPLE[kind]))).view(shape)
        try:
            return torch.from_numpy(dequantize(raw.reshape(*shape[:-1], -1), GGMLQuantizationType(kind)))
        except NotImplementedError:
            raise Unsupported(f"tensors of type {GGMLQuantizationType(kind).name} are not supported") from None


def _simple(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Blocks [n] -> float32 [n, 32]."""
    d, q = blocks["d"].astype(np.float32)[:, None], blocks["q"]
    if q.dtype == np.int8:
        return q * d
    out = np.empty((len(blocks), 32), np.float32)
    for half, nibbles in ((out[:, :16], q & 15), (out[:, 16:], q >> 4)):
        if "m" in (blocks.dtype.names or ()):
            np.multiply(nibbles, d, out=half)
            half += blocks["m"].astype(np.float32)[:, None]
        else:
            np.multiply(nibbles.view(np.int8) - 8, d, out=half)
    return out
