"""Number codes of the GGUF format: metadata value types, and the block sizes of ggml's tensor types."""

from __future__ import annotations

from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

# Metadata value types: the ones with a fixed width as numpy dtypes, and three with a meaning of their own.
NUMBER_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL = 7
STRING = 8
ARRAY = 9

# Elements and bytes of one block, by ggml type.
GGML_BLOCK_SIZES = {int(ggml_type): sizes for ggml_type, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """The place of one tensor in the file: bytes `start` to `stop`, its ggml type, its shape in torch's order.

    `part` is the number of the file, of a model in several.
    """

    ggml_type: int
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int = 0

    def split(self, parts: int) -> list[TensorInfo]:
        """Return the places of the tensors that this one stacks, each in so many parts of its first dimension.

        Raises ValueError.
        """
        stacked, *shape = self.shape
        if not shape or shape[0] % parts:
            raise ValueError(f"a tensor of the shape {self.shape} is no stack of tensors in {parts} parts")
        n = stacked * parts
        size = (self.stop - self.start) // n
        starts = [self.start + i * size for i in range(n)]
        own = (shape[0] // parts, *shape[1:])
        return [TensorInfo(self.ggml_type, own, start, start + size, self.part) for start in starts]
