"""Damaged model files: flipped bytes, huge numbers, truncation. Each is read or raises ValueError."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from retain.formats.checkpoint import open_checkpoint
from retain.formats.gguf.reader import GGUFReader
from retain.processing.stop_strings import StopStrings
from retain.processing.tokenizer import Tokenizer
from tests.helpers import counted_work
from tests.helpers.folders import write_tokenizer_folder
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, tiny_for_gguf, write_gguf
from tests.helpers.gguf_hybrids import STORABLE
from tests.helpers.tiny_models import tiny_checkpoint

EXTREME_INTEGERS = [
    0,
    1,
    0x7F,
    0xFF,
    0xFFFF,
    *(1 << n for n in (31, 40, 60, 63)),
    *((1 << n) - 1 for n in (32, 63, 64)),
]


def damage(data: bytes, rng: random.Random, header_size: int) -> bytes:
    """Truncate a file or overwrite some of it; mostly in its first `header_size` bytes."""
    damaged = bytearray(data)
    kind = rng.random()
    if kind < 0.2:
        return bytes(damaged[: rng.randrange(len(damaged))])
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(min(header_size, len(damaged)) if rng.random() < 0.9 else len(damaged))
        if kind < 0.6:
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            damaged[at] = rng.randrange(256)
        else:
            width, code = rng.choice(((4, "<I"), (8, "<Q")))
            damaged[at : at + width] = struct.pack(code, rng.choice(EXTREME_INTEGERS) % (1 << 8 * width))
    return bytes(damaged[: len(data)])


def fuzz(use: Callable[[], None], path: Path, header_size: int, cases: int, seed: int = 0) -> float:
    """Damage the file at `path` in `cases` ways, and use it each time. Returns the fraction that was refused."""
    intact, rng, refused = path.read_bytes(), random.Random(seed), 0
    for case in range(cases):
        path.write_bytes(damage(intact, rng, header_size))
        try:
            with counted_work.at_most(500_000):
                use()
        except ValueError as e:
            refused += 1
            assert "\n" not in str(e) and str(path.parent) in str(e), f"case {case}: {e}"
        except BaseException as e:
            raise AssertionError(f"case {case}: {type(e).__name__}: {e}") from e
    path.write_bytes(intact)
    use()
    return refused / cases


def read_everything(path: Path) -> None:
    """Open a model, read all its tensors, and use its tokenizer."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.read(name)
        if (blocks := checkpoint.read_stored(name)) is not None:
            blocks.unpack()
    use_tokenizer(path)


def use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.open(path)
    tokenizer.decode(tokenizer.encode("hello world, the <tag> é<|a|>"))
    detokenizer = tokenizer.create_detokenizer(StopStrings(["x"]))
    for token in range(0, 300, 7):
        detokenizer.add_token(token)


@pytest.fixture
def without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "file/none"))


@pytest.mark.slow
@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("model_type", "ggml_type", "vocabulary"),
    [
        ("llama", "Q4_1", BYTE_LEVEL_VOCABULARY),
        ("gemma3_text", "Q8_0", SENTENCEPIECE_VOCABULARY),
        ("gpt_neox", "Q5_0", BYTE_LEVEL_VOCABULARY),
        ("llama", "BF16", SENTENCEPIECE_VOCABULARY),
        ("qwen3", "Q4_0", BYTE_LEVEL_VOCABULARY),
        ("llama", "Q5_1", BYTE_LEVEL_VOCABULARY),
        ("gemma4_text", "Q8_0", SENTENCEPIECE_VOCABULARY | {"tokenizer.ggml.model": "gemma4"}),
        ("qwen3_5_moe_text", "Q4_0", BYTE_LEVEL_VOCABULARY),
        ("lfm2_moe", "Q8_0", BYTE_LEVEL_VOCABULARY),
    ],
)
def test_damaged_gguf_files_are_read_or_refused(
    tmp_path: Path, model_type: str, ggml_type: str, vocabulary: dict[str, Any]
) -> None:
    is_hybrid = model_type in STORABLE
    checkpoint = tiny_for_gguf(model_type) if is_hybrid else tiny_checkpoint(model_type, num_hidden_layers=1)
    metadata = vocabulary | {"tokenizer.chat_template": "{{ messages }}"}
    path = write_gguf(tmp_path / "m.gguf", checkpoint, ggml_type, metadata)
    header_size = min(info.start for info in GGUFReader(path).tensors.values())
    refused = fuzz(lambda: read_everything(path), path, header_size, cases=500)
    assert 0.2 < refused < 0.95  # some cases are read to the end, others are refused


@pytest.mark.usefixtures("without_cache")
def test_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama", num_hidden_layers=1), "Q8_0", BYTE_LEVEL_VOCABULARY)
    intact = path.read_bytes()
    for length in [*range(0, 3000, 7), *range(3000, len(intact), 501), len(intact) - 33]:
        path.write_bytes(intact[:length])
        with pytest.raises(ValueError, match=r"GGUF"):
            read_everything(path)


def test_damaged_folders_are_read_or_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    save_file({n: checkpoint.read(n) for n in checkpoint.names()}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(checkpoint.names(), "model-1.safetensors")}))

    def use() -> None:
        ours = open_checkpoint(tmp_path)
        for name in ours.names():
            ours.read(name)

    for file, header_size in (("config.json", 300), ("model-1.safetensors", 1200), (index.name, 600)):
        assert fuzz(use, tmp_path / file, header_size, cases=400) > 0.2


def test_damaged_tokenizer_files_are_read_or_refused(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        size = (tmp_path / file).stat().st_size
        assert fuzz(lambda: use_tokenizer(tmp_path), tmp_path / file, size, cases=600) > 0.1


@pytest.mark.usefixtures("without_cache")
def test_fuzzing_finds_unchecked_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama", num_hidden_layers=1), "Q4_1", BYTE_LEVEL_VOCABULARY)
    monkeypatch.setattr(GGUFReader, "wrap_errors", lambda self: nullcontext())
    with pytest.raises(AssertionError, match=r"case \d+"):
        fuzz(lambda: read_everything(path), path, 2000, cases=1000)
