"""What ends an answer: the tokens that a file names, and added tokens by their names, in both file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retain import LLM, SamplingParams
from retain.processing.tokenizer import Tokenizer
from tests.helpers.folders import save_model_folder, write_tokenizer_folder
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, tiny_for_gguf, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.tokenizers import write_tokenizer_file

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
QWEN_CODER = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim_prefix|>", "<|fim_middle|>"]
QWEN_CODER += ["<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
QWEN_ENDS = {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
STARCODER = ["<|endoftext|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eom_id|>", "<|eot_id|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
HARMONY = ["<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]
# The tokens that a family's file adds to a vocabulary, which of them its metadata name, and which end an answer.
VARIANTS: dict[str, tuple[dict[str, int], dict[str, str], set[str]]] = {
    "llama 2": (dict.fromkeys(["<unk>", "<s>", "</s>"], CONTROL), {"eos": "</s>"}, {"</s>"}),
    "llama 3 instruct": (
        dict.fromkeys(LLAMA3, CONTROL),
        {"eos": "<|eot_id|>"},
        {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"},
    ),
    "mistral with chatml": (
        dict.fromkeys(["<s>", "</s>", "<|im_start|>", "<|im_end|>"], CONTROL),
        {"eos": "<|im_end|>"},
        {"</s>", "<|im_end|>"},
    ),
    "code llama": (
        dict.fromkeys(["<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], CONTROL),
        {"eos": "</s>"},
        {"</s>", "▁<EOT>"},
    ),
    "qwen2.5 coder": (dict.fromkeys(QWEN_CODER, CONTROL), {"eos": "<|im_end|>"}, QWEN_ENDS),
    "qwen2.5 coder, base": (dict.fromkeys(QWEN_CODER, CONTROL), {"eos": "<|endoftext|>"}, QWEN_ENDS),
    "qwen2.5 coder, user-defined": (
        dict.fromkeys(QWEN_CODER[:3], CONTROL) | dict.fromkeys(QWEN_CODER[3:], USER_DEFINED),
        {"eos": "<|im_end|>"},
        QWEN_ENDS,
    ),
    "qwen3": (dict.fromkeys(QWEN_CODER[:4], CONTROL), {"eos": "<|im_end|>"}, {"<|endoftext|>", "<|im_end|>"}),
    "gemma3, where </s> is a tag": (
        dict.fromkeys(GEMMA, CONTROL) | {"</s>": USER_DEFINED},
        {"eos": "<eos>"},
        {"<eos>", "<end_of_turn>"},
    ),
    "codegemma": (
        dict.fromkeys([*GEMMA, "<|fim_prefix|>", "<|fim_middle|>", "<|file_separator|>"], CONTROL),
        {"eos": "<eos>"},
        {"<eos>", "<end_of_turn>", "<|file_separator|>"},
    ),
    "gpt2": ({"<|endoftext|>": CONTROL}, {"eos": "<|endoftext|>"}, {"<|endoftext|>"}),
    "smollm2": (
        dict.fromkeys([*STARCODER, "<|im_start|>", "<|im_end|>"], CONTROL),
        {"eos": "<|im_end|>"},
        {"<|endoftext|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>"},
    ),
    "mpt chat": (
        dict.fromkeys(["<|endoftext|>", "<|padding|>", "<|im_start|>", "<|im_end|>"], CONTROL),
        {"eos": "<|endoftext|>"},
        {"<|endoftext|>", "<|im_end|>"},
    ),
    "pythia": (dict.fromkeys(["<|endoftext|>", "<|padding|>"], CONTROL), {}, {"<|endoftext|>"}),
    "phi": (
        dict.fromkeys(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"], CONTROL),
        {"eos": "<|endoftext|>"},
        {"<|endoftext|>", "<|end|>"},
    ),
    "harmony, where <|end|> ends a part": (
        dict.fromkeys(HARMONY, CONTROL),
        {"eos": "<|return|>"},
        {"<|endoftext|>", "<|return|>", "<|call|>"},
    ),
    "names of its own, in every key": (
        dict.fromkeys(["<a>", "<b>", "<c>", "<d>", "<e>", "<f>", "<g>"], CONTROL),
        {"eos": "<a>", "eot": "<b>", "eom": "<c>", "fim_pad": "<d>", "fim_rep": "<e>", "fim_sep": "<f>", "bos": "<g>"},
        {"<a>", "<b>", "<c>", "<d>", "<e>", "<f>"},
    ),
    "ordinary words that look so": (dict.fromkeys(QWEN_CODER, NORMAL), {}, set()),
}
VOCABULARIES = {"gpt2": BYTE_LEVEL_VOCABULARY, "llama": SENTENCEPIECE_VOCABULARY}


def extend_vocabulary(base: dict[str, Any], added: dict[str, int], named: dict[str, str]) -> dict[str, Any]:
    """Return a vocabulary with these tokens at its end, and no other control tokens. Its metadata name `named`."""
    tokens = [*(t for t in base["tokenizer.ggml.tokens"] if t not in added and t not in ("<s>", "</s>")), *added]
    types = [2 if t == "<unk>" else NORMAL for t in tokens[: -len(added)]] + list(added.values())
    changed = {k: v for k, v in base.items() if not k.endswith("_token_id") and "scores" not in k}
    ids = {f"tokenizer.ggml.{key}_token_id": tokens.index(name) for key, name in named.items()}
    return changed | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | ids


def end_names(tokenizer: Tokenizer) -> set[str | None]:
    return {tokenizer._core.id_to_token(i) for i in tokenizer.stop_token_ids}


@pytest.mark.parametrize("model", VOCABULARIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ends_of_gguf_files(tmp_path: Path, variant: str, model: str) -> None:
    added, named, ends = VARIANTS[variant]
    tokenizer = Tokenizer.open(write_tokenizer_file(tmp_path, extend_vocabulary(VOCABULARIES[model], added, named)))
    assert end_names(tokenizer) == ends
    assert tokenizer.stop_token_ids <= tokenizer.special_token_ids or variant.startswith("ordinary")
    shown = sorted(set(added) - ends - {name for name, kind in added.items() if kind == CONTROL})
    assert all(tokenizer.decode([tokenizer._core.token_to_id(name)]) for name in shown)


FOLDERS: dict[str, tuple[dict[str, dict[str, Any]], set[str]]] = {
    "a number": ({"generation_config.json": {"eos_token_id": 5}}, {"<|b|>", "token 5"}),
    "a list": ({"generation_config.json": {"eos_token_id": [5, 7]}}, {"<|b|>", "token 5", "token 7"}),
    "config.json": ({"config.json": {"eos_token_id": [5]}}, {"<|b|>", "token 5"}),
    "text_config": ({"config.json": {"text_config": {"eos_token_id": 5}}}, {"<|b|>", "token 5"}),
    "none": ({"config.json": {"eos_token_id": None, "text_config": None}}, {"<|b|>"}),
    "eos_token as an object": ({"tokenizer_config.json": {"eos_token": {"content": "<|a|>"}}}, {"<|a|>"}),
    "special_tokens_map.json": (
        {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<|c|>"}},
        {"<|c|>"},
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_ends_of_folders_are_named_in_many_places(tmp_path: Path, case: str) -> None:
    files, ends = FOLDERS[case]
    write_tokenizer_folder(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokens = BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"]
    expected = {tokens[int(name[6:])] if name.startswith("token ") else name for name in ends}
    assert end_names(Tokenizer.open(tmp_path)) == expected


def rename_token(folder: Path, old: str, new: str, special: bool) -> None:
    """Give an added token of a folder another name."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace(old, new))
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] &= special or token["content"] != new
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_of_folders_end_by_name(tmp_path: Path, special: bool) -> None:
    """Qwen's tokenizer.json has its tokens of fill-in-the-middle as added ones that are not special."""
    rename_token(write_tokenizer_folder(tmp_path), "<|c|>", "<|fim_pad|>", special)
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.stop_token_ids == {126, 127}
    assert tokenizer.decode([127]) == ""


@pytest.mark.parametrize("format", ["folder", "gguf"])
def test_an_end_by_name_stops_an_answer_and_is_not_shown(tmp_path: Path, format: str) -> None:
    if format == "folder":
        save_model_folder(tmp_path, tiny_checkpoint("llama"))
        rename_token(write_tokenizer_folder(tmp_path), "<|c|>", "<|fim_pad|>", special=False)
        path = tmp_path
    else:
        tokens = [*BYTE_LEVEL_VOCABULARY["tokenizer.ggml.tokens"][:-1], "<|fim_pad|>"]
        vocabulary = BYTE_LEVEL_VOCABULARY | {"tokenizer.ggml.tokens": tokens}
        path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), vocabulary=vocabulary)
    llm = LLM(str(path), dtype="float32", kv_memory="4MiB", max_running_requests=4)
    forced = SamplingParams(max_tokens=3, temperature=0, logit_bias=((127, 1e4),))
    (ended,) = llm.generate("hello", forced)
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([127], "stop", "")
    goes_on = SamplingParams(max_tokens=3, temperature=0, logit_bias=((127, 1e4),), ignore_eos=True)
    (longer,) = llm.generate("hello", goes_on)
    assert (longer.token_ids, longer.finish_reason) == ([127] * 3, "length")
    named = SamplingParams(
        max_tokens=3, temperature=0, logit_bias=((127, 1e4),), ignore_eos=True, stop_token_ids=(127,)
    )
    assert llm.generate("hello", named)[0].finish_reason == "stop"
