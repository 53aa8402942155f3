"""Greedy float32 answers of `retain run` and of transformers on real prompts: are they the same tokens?

    .venv/bin/python tools/equal.py --model smollm2 --data DIR [--lengths 20,50,...] [--new 64]

DIR holds cnn_dailymail.jsonl, paul_graham_essays.jsonl and books.jsonl (one JSON record a line). Prompt i is the
beginning of some text in it, cut to the i-th length in tokens. Where an answer differs, the two logits that decided
are shown, as transformers has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from retain.models.resolve import resolve_model
from retain.processing import Tokenizer

PROMPT_LENS = "20,30,40,60,80,100,150,200,250,300,400,500,600,800,1000,1250,1500,2000,2500,3000"


def load_texts(data: Path) -> list[str]:
    """Articles, essays and novels, in turn."""
    read = {}
    for name, key in (("cnn_dailymail", "article"), ("paul_graham_essays", "text"), ("books", "text")):
        with open(data / f"{name}.jsonl", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        read[name] = [str(r.get(key) or max((v for v in r.values() if isinstance(v, str)), key=len)) for r in records]
    return [t for i in range(40) for ts in read.values() for t in ts[i : i + 1]]


def take_prompt(tokenizer: Tokenizer, candidates: list[str], num_tokens: int) -> str:
    """The beginning of the first text that is long enough, about `length` tokens of it; the text is used up."""
    for i, text in enumerate(candidates):
        if len(text) > 8 * num_tokens:
            del candidates[i]
            return tokenizer.decode(tokenizer.encode(text[: 8 * num_tokens])[:num_tokens])
    raise ValueError(f"no text is long enough for {num_tokens} tokens")


def run_retain(text: str, model: str, max_tokens: int) -> dict:
    """`retain run -f FILE ... --json`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [
            sys.executable,
            "-m",
            "retain.cli.main",
            "run",
            "-f",
            file.name,
            "--model",
            model,
            "--dtype",
            "float32",
        ]
        command += ["--max-tokens", str(max_tokens), "--temperature", "0", "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Exit code 1 when some answer differs by more than a tie."""
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--model", default="smollm2")
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--lengths", default=PROMPT_LENS)
    args.add_argument("--new", type=int, default=64)
    a = args.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = resolve_model(a.model)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    peer = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    peer_tokenizer, tokenizer = AutoTokenizer.from_pretrained(**where), Tokenizer.open(path)
    candidates, wrong = load_texts(a.data), 0
    for length in map(int, a.lengths.split(",")):
        text = take_prompt(tokenizer, candidates, length)
        ids = peer_tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            want = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.new, do_sample=False)
        want = want[0, ids.shape[1] :].tolist()
        got = run_retain(text, a.model, a.new)
        same = got["token_ids"] == want and got["usage"]["prompt_tokens"] == ids.shape[1]
        print(f"{ids.shape[1]:5} tokens  {'same' if same else 'DIFFERS'}  {got['text'][:60]!r}", flush=True)
        if not same:
            wrong += not is_tie(peer, ids, want, got["token_ids"])
    print("all the same, but for ties shown above" if not wrong else f"{wrong} differ by more than a tie")
    return int(wrong > 0)


def is_tie(reference_model, ids: torch.Tensor, expected: list[int], actual: list[int]) -> bool:
    """Print the first difference with the logits that decided it; True when they are within float32 noise."""
    at = next(
        (i for i, (x, y) in enumerate(zip(expected, actual, strict=False)) if x != y), min(len(expected), len(actual))
    )
    with torch.inference_mode():
        logits = reference_model(torch.cat((ids, torch.tensor([expected[:at]], dtype=torch.long)), dim=1)).logits[0, -1]
    x, y = logits[expected[at]].item(), logits[actual[at]].item()
    print(f"      at new token {at}: transformers {expected[at]} ({x:.6f}), retain {actual[at]} ({y:.6f})")
    return abs(x - y) < 1e-3


if __name__ == "__main__":
    sys.exit(main())
