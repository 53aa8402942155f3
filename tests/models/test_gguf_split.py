"""GGUF models in several files: any part opens the whole model, and what does not fit together is one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from retain.formats.checkpoint import list_model_files, open_checkpoint
from retain.formats.gguf.reader import GGUFReader
from retain.kernels.weights.weight import dequantize
from retain.processing.tokenizer import Tokenizer
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, tiny_for_gguf, write_gguf


def write_parts(folder: Path, model_type: str = "llama", split_max_tensors: int = 8) -> list[Path]:
    """Write a model in parts; returns their paths."""
    write_gguf(
        folder / "m.gguf",
        tiny_for_gguf(model_type),
        "Q8_0",
        BYTE_LEVEL_VOCABULARY,
        split_max_tensors=split_max_tensors,
    )
    return sorted(folder.glob("m-*.gguf"))


def error_of(path: Path) -> str:
    """Return the error of a model that cannot be opened."""
    with pytest.raises(ValueError) as e:
        open_checkpoint(path)
    assert "\n" not in str(e.value) and str(e.value).startswith(str(path.parent))
    return str(e.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_any_part_opens_the_whole_model(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "whole").mkdir()
    whole_path = write_gguf(tmp_path / "whole/m.gguf", tiny_for_gguf(model_type), "Q8_0", BYTE_LEVEL_VOCABULARY)
    whole = open_checkpoint(whole_path)
    parts = write_parts(tmp_path, model_type)
    assert len(parts) > 2
    for path in (parts[0], parts[-1]):
        ours = open_checkpoint(path)
        assert ours.config == whole.config and ours.names() == whole.names()
        for name in whole.names():
            assert torch.equal(ours.read(name), whole.read(name))
            blocks, expected = ours.read_stored(name), whole.read_stored(name)
            assert (blocks is None) == (expected is None)
            assert blocks is None or expected is None or torch.equal(dequantize(blocks), dequantize(expected))
        assert Tokenizer.open(path).encode("hello world") == Tokenizer.open(whole_path).encode("hello world")
        assert list_model_files(path) == parts


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].unlink()
    assert error_of(parts[0]).endswith(f"one of {len(parts)} parts, beside which are missing: {parts[1].name}")
    assert parts[1].name in error_of(parts[2])
    parts[0].unlink()
    assert f"{parts[0].name}, {parts[1].name}" in error_of(parts[2])


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    intact = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    assert "split.no is 2 and split.count" in error_of(parts[0])
    name = next(iter(GGUFReader(parts[0]).tensors))
    write_other_part(parts[1], 1, len(parts), name)
    assert f"the tensor {name!r} is in another part, too" in error_of(parts[0])
    write_other_part(parts[1], 1, len(parts), "x.weight")
    assert f"{parts[0]}: damaged GGUF file: its parts have" in error_of(parts[0])
    parts[1].write_bytes(intact[:-40])
    assert error_of(parts[0]).startswith(f"{parts[1]}: damaged GGUF file")
    parts[1].write_bytes(intact)
    open_checkpoint(parts[0])
    shutil.copy(parts[0], tmp_path / "renamed.gguf")
    assert "name each as name-00001-of-" in error_of(tmp_path / "renamed.gguf")


def write_other_part(path: Path, number: int, count: int, name: str) -> None:
    """Write a part that has one tensor."""
    w = GGUFWriter(path, "llama")
    w.add_uint16("split.no", number)
    w.add_uint16("split.count", count)
    w.add_tensor(name, np.ones(64, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
