"""Damaged model files: bytes flipped, numbers made huge, files cut. Each is read, or it is a ValueError."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from retain.formats.gguf.reader import GGUFReader
from retain.models.weights import open_checkpoint
from retain.processing import Tokenizer
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint

EXTREME_INTEGERS = [
    0,
    1,
    0x7F,
    0xFF,
    0xFFFF,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]


def damage(data: bytes, rng: random.Random, header_size: int) -> bytes:
    """One of the ways in which files go bad; mostly in the first `head` bytes, which say what the others are."""
    out = bytearray(data)
    kind = rng.random()
    if kind < 0.2:
        return bytes(out[: rng.randrange(len(out))])
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(min(header_size, len(out)) if rng.random() < 0.9 else len(out))
        if kind < 0.6:
            out[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            out[at] = rng.randrange(256)
        else:
            width, form = rng.choice(((4, "<I"), (8, "<Q")))
            out[at : at + width] = struct.pack(form, rng.choice(EXTREME_INTEGERS) % (1 << 8 * width))
    return bytes(out[: len(data)])


def fuzz(use: Callable[[], None], path: Path, header_size: int, cases: int, seed: int = 0) -> float:
    """Damage the file at `path` again and again and use it. Returns the part of the cases that were refused."""
    whole, draw, refused = path.read_bytes(), random.Random(seed), 0
    for case in range(cases):
        path.write_bytes(damage(whole, draw, header_size))
        start = time.perf_counter()
        try:
            use()
        except ValueError as e:
            refused += 1
            assert "\n" not in str(e) and str(path.parent) in str(e), f"case {case}: {e}"
        except BaseException as e:
            raise AssertionError(f"case {case}: {type(e).__name__}: {e}") from e
        assert time.perf_counter() - start < 5, f"case {case} takes too long"
    path.write_bytes(whole)
    use()
    return refused / cases


def read_everything(path: Path) -> None:
    """Open a model, read all of it, and make its tokenizer work."""
    source = open_checkpoint(path)
    for name in source.names():
        source.read(name)
        source.read_quantized(name)
    use_tokenizer(path)


def use_tokenizer(path: Path) -> None:
    k = Tokenizer.open(path)
    k.decode(k.encode("hello world, the <tag> é<|a|>"))
    stream = k.create_detokenizer(["x"])
    for i in range(0, 300, 7):
        stream.add_token(i)


@pytest.fixture
def without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "file/none"))


@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("model_type", "kind", "vocabulary"),
    [
        ("llama", "Q4_1", BYTE_LEVEL_VOCABULARY),
        ("gemma3_text", "Q8_0", SENTENCEPIECE_VOCABULARY),
        ("gpt_neox", "Q5_0", BYTE_LEVEL_VOCABULARY),
        ("llama", "BF16", SENTENCEPIECE_VOCABULARY),
        ("qwen3", "Q4_0", BYTE_LEVEL_VOCABULARY),
        ("llama", "Q5_1", BYTE_LEVEL_VOCABULARY),
    ],
)
def test_gguf(tmp_path: Path, model_type: str, kind: str, vocabulary: dict[str, Any]) -> None:
    source = tiny_checkpoint(model_type, num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", source, kind, vocabulary | {"tokenizer.chat_template": "{{ messages }}"})
    head = min(stored.start for stored in GGUFReader(path).tensors.values())
    refused = fuzz(lambda: read_everything(path), path, head, cases=1200)
    assert 0.2 < refused < 0.95  # so some were read to the end, and the others were not


@pytest.mark.usefixtures("without_cache")
def test_gguf_cut_anywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama", num_hidden_layers=1), "Q8_0", BYTE_LEVEL_VOCABULARY)
    whole = path.read_bytes()
    for length in [*range(0, 3000, 7), *range(3000, len(whole), 501), len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"GGUF"):
            read_everything(path)


def test_a_folder(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    save_file({n: source.read(n) for n in source.names()}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(source.names(), "model-1.safetensors")}))

    def use() -> None:
        ours = open_checkpoint(tmp_path)
        for name in ours.names():
            ours.read(name)
            ours.read_quantized(name)

    for file, head in (("config.json", 300), ("model-1.safetensors", 1200), (index.name, 600)):
        assert fuzz(use, tmp_path / file, head, cases=400) > 0.2


def test_a_folders_tokenizer(tmp_path: Path) -> None:
    from tests.unit.test_tokenizer import write_tokenizer_folder

    write_tokenizer_folder(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        size = (tmp_path / file).stat().st_size
        assert fuzz(lambda: use_tokenizer(tmp_path), tmp_path / file, size, cases=600) > 0.1


@pytest.mark.usefixtures("without_cache")
def test_the_fuzzer_finds_what_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama", num_hidden_layers=1), "Q4_1", BYTE_LEVEL_VOCABULARY)
    monkeypatch.setattr(GGUFReader, "wrap_errors", lambda self: nullcontext())
    with pytest.raises(AssertionError, match=r"case \d+"):
        fuzz(lambda: read_everything(path), path, 2000, cases=1000)
