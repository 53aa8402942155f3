"""The cpu backend packs blocks to the bytes of their definition, for every type, kind and instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import cpu
from retain.kernels.weights.ggml_blocks import stored_kind
from retain.kernels.weights.quantized import IQ4, Int4, Int5, Int6, Int8, Kind
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import StackedWeight, Weight, concat_rows, dequantize, parts_of, row_energies, unpack

pytestmark = [
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())),
    pytest.mark.usefixtures("isa"),
]

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"]
KINDS: list[Kind] = [Int4, Int8, torch.bfloat16, torch.float32]
STORED_KINDS = {name: stored_kind(GGMLQuantizationType[name]) for name in TYPES}
CASES = [(name, kind) for name in TYPES for kind in KINDS]
CASES += [(name, kind) for name, kind in STORED_KINDS.items() if kind not in KINDS]
CASES += [(name, Int5) for name in ("Q4_0", "Q4_1", "Q4_K")]
HALVES = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208]}  # where the float16 lie in a block; elsewhere at its start


def make_rows(name: str, rows: int, seed: int, largest: float = 4.0, columns: int = 512) -> StoredWeight:
    """Draw random bits under scales of every size up to `largest`, subnormal ones and zero too."""
    ggml_type = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    scales = (largest * rng.uniform(-1, 1, raw.shape[:2]) * rng.choice([1, 1e-2, 1e-6, 0], raw.shape[:2])).astype("<f2")
    if name == "NVFP4":  # scales of all sizes are drawn already
        return from_raw(name, raw.reshape(rows, -1), columns)
    if name == "MXFP4":  # scales are powers of two
        size = np.where(np.isfinite(scales), np.log2(np.abs(scales.astype(np.float64)) + 1e-9), 127)
        raw[:, :, 0] = 128 + size.astype(int)
        return from_raw(name, raw.reshape(rows, -1), columns)
    for at in HALVES.get(name, [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]):
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return from_raw(name, raw.reshape(rows, -1), columns)


def from_raw(name: str, raw: NDArray[np.uint8], columns: int) -> StoredWeight:
    ggml_type = GGMLQuantizationType[name]
    return StoredWeight.from_blocks(name, (len(raw), columns), ggml_type, lambda a, b: raw[a:b], raw.shape[1])


def pack(weight: Weight) -> Tensor:
    from retain.kernels.cpu.memory import Arena
    from retain.kernels.cpu.packing import pack_weight

    arena = Arena()
    arena.allocate(2**22).fill_(255)  # what packing leaves out shows
    arena._remaining = arena._remaining[:0]
    return pack_weight(weight, arena).data


@pytest.mark.parametrize(("name", "kind"), CASES, ids=str)
def test_packed_blocks_equal_the_definition(name: str, kind: Kind) -> None:
    odd = 1024 + GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]  # not in whole parts of a tile
    for rows, columns, seed in ((16, 512, 0), (3, odd, 1), (37, 512, 2)):
        weight = replace(make_rows(name, rows, seed, columns=columns), kind=kind)
        assert torch.equal(pack(weight), pack(weight.unpack()))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stacked_blocks_share_tiles(kind: Kind) -> None:
    parts = [make_rows(name, rows, rows) for rows, name in ((5, "Q4_K"), (1, "Q6_K"), (26, "Q8_0"), (17, "Q4_0"))]
    weight = StackedWeight(tuple(replace(part, kind=kind) for part in parts))
    assert weight.shape == (49, 512)
    assert torch.equal(pack(weight), pack(unpack(weight)))


@pytest.mark.parametrize("name", TYPES)
def test_energies_of_blocks_equal_the_definition(name: str) -> None:
    from retain.kernels.cpu.packing import block_row_energies

    factors = torch.rand(512, generator=torch.Generator().manual_seed(0))
    parts = [make_rows(name, rows, rows) for rows in (16, 37)]
    dense = torch.ones(3, 512, dtype=torch.bfloat16)
    for weight in (*parts, concat_rows(parts), StackedWeight((parts[1], dense))):
        torch.testing.assert_close(
            block_row_energies(weight, factors), row_energies(weight, factors), rtol=1e-5, atol=0
        )


def test_stacked_kinds_become_the_widest() -> None:
    four, five, six, eight = (make_rows(name, 4, 0) for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"))
    assert (four.kind, five.kind, six.kind, eight.kind) == (Int4, Int5, Int6, Int8)
    codebook = make_rows("IQ4_XS", 4, 0)
    cases = [
        ([four, four], Int4),
        ([four, eight], Int8),
        ([four, five], Int5),
        ([six, six], Int6),
        ([four, six], Int8),
        ([five, six, five], Int8),
        ([eight], Int8),
        ([codebook] * 2, IQ4),
        ([codebook, four], Int8),
    ]
    for parts, kind in cases:
        stacked = concat_rows(parts)
        assert {part.kind for part in parts_of(stacked) if isinstance(part, StoredWeight)} == {kind}
        assert torch.equal(pack(stacked), pack(unpack(stacked)))
        if kind is not Int8:
            assert torch.equal(dequantize(stacked), torch.cat([dequantize(part) for part in parts]))
    narrow = from_raw("Q8_0", np.zeros((2, 34), np.uint8), 32)
    with pytest.raises(ValueError, match=r"\(4, 512\), \(2, 32\) cannot be stacked"):
        concat_rows([four, narrow])
    dense = torch.ones(2, 512)
    assert isinstance(concat_rows([four, dense]), Tensor)


@pytest.mark.parametrize("name", [name for name in TYPES if name != "NVFP4"])  # its scales have no infinity
def test_scales_that_are_not_finite_are_refused_alike(name: str) -> None:
    """Overflow, infinity and NaN, in every fourth block of random ones."""
    refused = 0
    for seed, largest in enumerate((60000, np.inf, np.nan, 600) * 4):
        with np.errstate(all="ignore"):
            weight = make_rows(name, 2, seed, largest)
        try:
            expected = pack(weight.unpack())
        except ValueError as e:
            refused += 1
            with pytest.raises(ValueError, match="not finite") as ours:
                pack(weight)
            assert str(ours.value) == str(e)
        else:
            assert torch.equal(pack(weight), expected)
    assert 8 <= refused < 16


def test_selected_rows_are_packed_in_their_order() -> None:
    weight, index = make_rows("Q4_K", 20, 3), torch.arange(19, -1, -2)
    assert torch.equal(dequantize(weight[index]), dequantize(weight)[index])
    assert torch.equal(pack(weight[index]), pack(weight[index].unpack()))


@pytest.mark.parametrize("name", TYPES)
def test_columns_are_put_in_order_in_whole_groups(name: str) -> None:
    """Groups of 32 columns move with their scales, also inside of blocks of 256; smaller pieces cannot."""
    weight = make_rows(name, 20, 3)
    index = torch.arange(512).view(8, 2, 32).transpose(0, 1).flatten()
    ordered = weight.select_columns(index)
    assert ordered is not None and ordered.shape == weight.shape
    assert torch.equal(dequantize(ordered), dequantize(weight)[:, index])
    rows = torch.arange(19, -1, -2)
    assert torch.equal(dequantize(ordered[rows]), dequantize(weight)[rows][:, index])
    assert torch.equal(pack(ordered), pack(ordered.unpack()))
    assert not torch.equal(pack(ordered), pack(weight))
    exact, ordered_exact = (dequantize(replace(w, kind=torch.float32)) for w in (weight, ordered))
    assert torch.equal(ordered_exact, exact[:, index])
    for size in (16, 24):
        assert weight.select_columns(torch.arange(480).view(-1, 2, size).transpose(0, 1).flatten()) is None
    assert weight.select_columns(torch.arange(512).roll(8)) is None


def test_memory_of_the_file_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from retain.kernels.cpu import packing

    released: list[tuple[int, int]] = []
    rows = make_rows("Q8_0", 70, 5)
    monkeypatch.setattr(packing, "RELEASE_BYTES", 32 * rows.row_bytes)
    part = replace(rows, release=lambda begin, end: released.append((begin, end)))
    chunked = pack(part)
    assert released == [(0, 32), (32, 64), (64, 70)]
    assert torch.equal(chunked, pack(rows.unpack()))
