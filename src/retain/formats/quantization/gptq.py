"""GPTQ (arXiv 2210.17323), of 4 and 8 bits: groups of inputs, each with a scale and a zero.

`qweight` is int32 [in / 8, out], a word of eight adjacent inputs; `qzeros` int32 [groups, out / 8], a word of eight
adjacent outputs; `scales` [groups, out]. With 8 bits a word has four. Files of the first version store words of zeros
less 1 in each number, with a borrow from the next one where a zero is 0; files of `checkpoint_format: gptq_v2` store
the zeros. `g_idx` int32 [in] is the group of each input: other than adjacent ones where inputs were sorted by their
activations (`desc_act`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from retain.formats.quantization.groups import (
    Groups,
    check_words,
    find_bits,
    find_input_groups,
    from_groups,
    unpack_words,
)
from retain.kernels.weights.stored_weight import StoredWeight

ONES = {4: 0x11111111, 8: 0x01010101}  # a word of ones, by bits
PARTS = {"qweight": True, "qzeros": True, "scales": True, "g_idx": False}  # whether a matrix must have it


def read_matrix(label: str, tensors: Mapping[str, Tensor], zero_offset: int = 1, bits: int = 4) -> StoredWeight:
    """Return the rows of a matrix. Raises ValueError for shapes and types that do not fit.

    `bits` are those of the config; a module may have others.
    """
    words, zeros, scales = (tensors[part] for part in ("qweight", "qzeros", "scales"))
    if not words.ndim == zeros.ndim == scales.ndim == 2:
        raise ValueError("qweight, qzeros and scales that are no matrices")
    num_groups, out = scales.shape
    bits = find_bits(out, zeros.shape[1], bits)
    check_words(zeros, (num_groups, -(-out * bits // 32)), "qzeros")
    check_words(words, (len(words), out), "qweight")
    width = len(words) * 32 // bits
    zero = unpack_words(zeros + ONES[bits] * zero_offset, bits)[:, :out].T.short()
    groups = Groups(bits, scales.T, zero, find_input_groups(tensors.get("g_idx"), width, num_groups))

    def read(begin: int, end: int) -> Tensor:
        return unpack_words(words[:, begin:end].T, bits)

    return from_groups(label, (out, width), groups, read)
