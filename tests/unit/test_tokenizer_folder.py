"""Tokenizers of Hugging Face folders: every file that describes them, older formats, and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retain.processing.tokenizer import Tokenizer
from tests.helpers.folders import write_tokenizer_folder
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY


def test_folder_is_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_tokenizer_folder(tmp_path))
    assert tokenizer.encode("hello world<|c|>")[0] == 125
    assert tokenizer.decode(tokenizer.encode("hello world, in the end<|c|>")) == "hello world, in the end"
    assert tokenizer.stop_token_ids == {126}
    assert tokenizer.apply_chat_template([]) == "<|a|><|b|>" and tokenizer.encode_chat([]) == [125, 126]


def test_stop_tokens_and_templates_are_read_from_every_file(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [127, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.open(tmp_path).stop_token_ids == {126, 127, 5, 7}
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.open(tmp_path).apply_chat_template([]) == "default"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.open(tmp_path).chat_templates.sources == {"default": "from a file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("rag")
    assert Tokenizer.open(tmp_path).chat_templates.sources == {"default": "from a file", "rag": "rag"}
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.open(tmp_path).chat_templates.sources == {"default": "default", "rag": "rag"}


@pytest.mark.slow
def test_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    """transformers converts vocab.json and merges.txt."""
    tokens = BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*tokens, "<|endoftext|>"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(BYTE_LEVEL_VOCABULARY["tokenizer.ggml.merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hello world") == [tokens.index("hello"), tokens.index("Ġworld")]
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def open_error(path: Path) -> str:
    with pytest.raises(ValueError) as e:
        Tokenizer.open(path)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)
    return str(e.value)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    intact = (write_tokenizer_folder(tmp_path) / "tokenizer.json").read_bytes()
    for damaged in (b"", b"{}", b"\xff", intact[: len(intact) // 2], intact.replace(b"ByteLevel", b"NoLevel")):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        open_error(tmp_path)
    unknown = json.loads(intact) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unknown))
    assert "decoders of type WordPiece" in open_error(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(intact)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json: damaged" in open_error(tmp_path)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    open_error(tmp_path)
