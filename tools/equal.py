"""Compare greedy float32 answers of `retain run` with those of transformers on real prompts, token for token.

    python tools/equal.py --model smollm2 --data-dir DIR [--prompt-lens 20,50,...] [--output-len 64]

DIR holds cnn_dailymail.jsonl, paul_graham_essays.jsonl and books.jsonl (one JSON record a line). Prompt i is the
beginning of a text, cut to the i-th length in tokens. Where answers differ, the two deciding logits of transformers
are printed.
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
from retain.processing.tokenizer import Tokenizer

PROMPT_LENS = "20,30,40,60,80,100,150,200,250,300,400,500,600,800,1000,1250,1500,2000,2500,3000"


def load_texts(data: Path) -> list[str]:
    """Return articles, essays and novels, in turn."""
    texts_by_name = {}
    for name, key in (("cnn_dailymail", "article"), ("paul_graham_essays", "text"), ("books", "text")):
        with open(data / f"{name}.jsonl", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        texts_by_name[name] = [
            str(r.get(key) or max((v for v in r.values() if isinstance(v, str)), key=len)) for r in records
        ]
    return [text for i in range(40) for texts in texts_by_name.values() for text in texts[i : i + 1]]


def take_prompt(tokenizer: Tokenizer, candidates: list[str], num_tokens: int) -> str:
    """Return about `num_tokens` tokens of the first candidate that is long enough, and remove that candidate."""
    for i, text in enumerate(candidates):
        if len(text) > 8 * num_tokens:
            del candidates[i]
            return tokenizer.decode(tokenizer.encode(text[: 8 * num_tokens])[:num_tokens])
    raise ValueError(f"no text is long enough for {num_tokens} tokens")


def run_retain(text: str, model: str, max_tokens: int) -> dict:
    """Return the JSON object of `retain run`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [sys.executable, "-m", "retain.cli", "run", "-f", file.name, "--model", model, "--dtype", "float32"]
        command += ["--max-tokens", str(max_tokens), "--temperature", "0", "--json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Return exit code 1 when an answer differs by more than a tie."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--prompt-lens", default=PROMPT_LENS)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = resolve_model(args.model)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    reference = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    reference_tokenizer, tokenizer = AutoTokenizer.from_pretrained(**source), Tokenizer.open(path)
    candidates, num_different = load_texts(args.data_dir), 0
    for length in map(int, args.prompt_lens.split(",")):
        text = take_prompt(tokenizer, candidates, length)
        ids = reference_tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            ends = sorted(tokenizer.stop_token_ids)  # the file names fewer of them to transformers
            output = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.output_len,
                do_sample=False,
                eos_token_id=ends,
            )
        expected = output[0, ids.shape[1] :].tolist()
        answer = run_retain(text, args.model, args.output_len)
        equal = answer["token_ids"] == expected and answer["usage"]["prompt_tokens"] == ids.shape[1]
        print(f"{ids.shape[1]:5} tokens  {'same' if equal else 'DIFFERS'}  {answer['text'][:60]!r}", flush=True)
        if not equal:
            num_different += not is_tie(reference, ids, expected, answer["token_ids"])
    print(f"{num_different} differ by more than a tie" if num_different else "all the same, but for ties shown above")
    return int(num_different > 0)


def is_tie(reference_model, ids: torch.Tensor, expected: list[int], actual: list[int]) -> bool:
    """Print the first difference and its logits. Return whether the logits are equal up to float32 rounding."""
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
