"""Write Hugging Face folders: tiny models, and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint
from tests.helpers.tokenizers import open_tokenizer

HARMONY_TOKENS = {
    "<repo_name>": "<|start|>",
    "<reponame>": "<|channel|>",
    "<file_sep>": "<|constrain|>",
    "<filename>": "<|message|>",
    "<gh_stars>": "<|end|>",
    "<issue_start>": "<|call|>",
    "<issue_comment>": "<|return|>",
}


def save_model_folder(
    folder: Path, checkpoint: TinyCheckpoint, shards: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a folder as `save_pretrained` does."""
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    read = ((n, checkpoint.read(n)) for n in sorted(checkpoint.names()))
    tensors = {n: (x.to(dtype) if x.is_floating_point() else x).contiguous() for n, x in read}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard = dict(list(tensors.items())[i::shards])
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_tokenizer_folder(path: Path) -> Path:
    """Write a byte-level tokenizer whose files say that it adds bos."""
    tokens = BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in BYTE_LEVEL_VOCABULARY["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[-3:])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|a|> $A", special_tokens=[("<|a|>", 125)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<|a|>"},
        "eos_token": "<|b|>",
        "chat_template": "{{ bos_token }}{{ eos_token }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def save_tiny_smollm2(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a tiny model of a family with the tokenizer and the chat template of SmolLM2; `changes` are of its config.

    For tests that need its tokens and not its knowledge: a token takes a tenth of the time or less.
    """
    tokenizer = open_tokenizer("smollm2")
    tokenizer._core.save(str(folder / "tokenizer.json"))
    config = {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    checkpoint = tiny_checkpoint(
        family,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=8192,
        eos_token_id=sorted(tokenizer.stop_token_ids),
        **changes,
    )
    return save_model_folder(folder, checkpoint)


def save_tiny_harmony(folder: Path) -> Path:
    """Write the same model with gpt-oss's markers in place of special tokens that no chat needs, and its template."""
    save_tiny_smollm2(folder)
    text = (folder / "tokenizer.json").read_text()
    for name, marker in HARMONY_TOKENS.items():
        assert json.dumps(name) in text
        text = text.replace(json.dumps(name), json.dumps(marker))
    (folder / "tokenizer.json").write_text(text)
    template = (Path(__file__).parent / "chat_templates/gpt_oss.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>", "chat_template": template}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return folder
