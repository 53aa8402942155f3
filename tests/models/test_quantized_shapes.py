"""Matrices of every small number of outputs mean what their tensors say, in every quantized format, by every slice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from retain.formats.quantization import find_quantization
from retain.kernels.weights.weight import dequantize
from tests.helpers.quantized_folders import METHODS, PACKERS, Packer, pack_gptq, pack_int8, pack_words

GPTQ_8 = {"quant_method": "gptq", "bits": 8}
INT8_WORDS = METHODS["ct-int8-packed"] | {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    **{name: (METHODS[name], PACKERS[name]) for name in METHODS},
    "gptq-v2-groups": (METHODS["gptq-v2"], pack_gptq(offset=0)),
    "gptq-8-zeros": (GPTQ_8, pack_gptq(8)),
    "gptq-8-order": (GPTQ_8, pack_gptq(8, shuffled=True)),
    "ct-int4-channel-zeros": (METHODS["ct-int4-zeros"], pack_words(zeros=True, channel=True)),
    "ct-int4-order-zeros": (METHODS["ct-int4-zeros"], pack_words(zeros=True, shuffled=True)),
    "ct-int8-packed": (INT8_WORDS, pack_words(8)),
    "ct-int8-packed-zeros": (INT8_WORDS, pack_words(8, zeros=True)),
    "ct-int8-packed-order-zeros": (INT8_WORDS, pack_words(8, zeros=True, shuffled=True)),
    "ct-int8-zeros": (METHODS["ct-int8"], partial(pack_int8, zeros=True)),
}
WIDTHS = (1, 4, 8, 16, 32, 64, 96)
WORDS_OF_INPUTS = {"gptq": 8}  # a word has adjacent inputs, none of which is padding


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_of_every_size_is_what_its_tensors_mean(name: str) -> None:
    config, packer = CASES[name]
    quantization = find_quantization(config)
    assert quantization is not None
    widths = [width for width in WIDTHS if width % WORDS_OF_INPUTS.get(config["quant_method"], 1) == 0]
    for out in (*range(1, 10), 16, 17):
        for width in widths:
            packed, expected = packer(out, width, out + width)
            [(matrix, parts)] = quantization.find(
                [f"m{ending}" for ending in packed if "input_scale" not in ending]
            ).items()
            assert matrix == "m.weight"
            of_file = {f"m{ending}": x.clone(memory_format=torch.contiguous_format) for ending, x in packed.items()}
            tensors = {part: of_file[stored] for part, stored in parts.items()}
            stored = quantization.read_matrix("m", tensors)
            assert stored.shape == (out, width)
            for begin, end in ((0, out), (out - 1, out), (out // 2, out)):
                found = stored.load(begin, end, torch.float32)
                assert isinstance(found, torch.Tensor)
                assert torch.equal(found, expected[begin:end]), (out, width, begin)
            assert (dequantize(stored) - expected).abs().max() <= 2**-8 * expected.abs().max(), (out, width)
