"""Measure presses of kvpress by the tasks of `retain bench quality`: the same weights, token ids, budgets and metrics.

    python3 -m venv kp && kp/bin/pip install -r tools/kvpress_peer.txt
    PYTHONPATH=src kp/bin/python -m tools.kvpress_peer --model MODEL.gguf --data-dir DIR --output-dir OUT

The model is dequantised to OUT/model, and runs in float32 in transformers. Tasks, tokenizer and metrics are the
package's own, so the results have the form of those of `retain bench quality --output-dir`: a file for each task. A
later run adds its presses, or goes on where a run was stopped. `tools/kvpress_table.py` makes a table of both. KL is to
the full cache of transformers.

The presses of a prompt share its prefill: each compresses every layer's whole keys and values, as its own hook would.
Presses evict once, behind the prompt. What follows is kept.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from retain.bench.tasks import ItemMetrics, load_task
from retain.files import atomic_write
from retain.plugins import parse_amount, parse_spec
from retain.processing.input import GenerateRequest
from retain.processing.tokenizer import Tokenizer

FULL = "full"
NAMES = "random keydiff tova snapkv expected observed adakv-snapkv adakv-expected kvzip"


@dataclass
class Kept:
    """What a press kept of a prompt, layer by layer. `masked` are (heads, slots) that attention must not see."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    masked: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def append(self, keys: Tensor, values: Tensor, masked: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Add the next layer, with the indices (batch, heads, slots) that a press left in its module."""
        self.keys.append(keys)
        self.values.append(values)
        self.masked.append(masked and masked[1:])

    @property
    def num_slots(self) -> int:
        """Slots of the first layer; presses with masks keep all."""
        return self.keys[0].shape[2]


@dataclass
class Prompt:
    """A computed prompt: its ids, the logits behind it, and what each press kept."""

    ids: list[int]
    logits: Tensor
    kept: dict[str, Kept]


@dataclass(frozen=True)
class Answer:
    """What the tasks read of an LLM's output."""

    token_ids: list[int]


class PressedModel:
    """A model of transformers as the tasks see an `LLM`. The specs of its policies are `full` and those of presses."""

    def __init__(self, model: Any, tokenizer: Tokenizer, presses: dict[str, Any], make_cache: Callable[[], Any]):
        """Take presses by their specs; `make_cache` makes an empty cache of transformers."""
        self.model = model
        self.tokenizer = tokenizer
        self.presses = presses
        self.make_cache = make_cache
        self.prompt = Prompt([], torch.zeros(0), {})  # the latest
        self.attentions = [layer.self_attn for layer in model.model.layers]
        for attention in self.attentions:
            attention.rotary_emb = model.model.rotary_emb

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.tokenizer.encode(text)

    def score(
        self,
        prompts: Sequence[list[int]],
        continuations: Sequence[list[int]],
        specs: Sequence[str],
        logits_callback: Callable[[int, Tensor], None],
    ) -> list[list[float]]:
        """Score continuations as `LLM.score` does."""
        scores: list[list[float]] = [[] for _ in prompts]
        for i, (prompt, ids, spec) in enumerate(zip(prompts, continuations, specs, strict=True)):
            if scores[i]:
                continue
            computed = self.compute(prompt)
            alike = [
                j
                for j, others in enumerate(zip(prompts, continuations, specs, strict=True))
                if others[:2] == (prompt, ids) and computed.kept[others[2]].num_slots == computed.kept[spec].num_slots
            ]
            logits, _ = self.extend([computed.kept[specs[j]] for j in alike], len(prompt), ids[:-1])
            for j, rows in zip(alike, logits, strict=True):
                rows = torch.cat([computed.logits[None], rows])
                scores[j] = rows.log_softmax(-1)[range(len(ids)), ids].tolist()
                logits_callback(j, rows)
        return scores

    def generate_from_requests(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """Answer greedily behind the forced tokens, as `LLM.generate_from_requests` does."""
        found: dict[int, Answer] = {}
        for i, request in enumerate(requests):
            if i in found:
                continue
            computed = self.compute(list(request.prompt))
            num_slots = computed.kept[str(request.kv_policy)].num_slots
            alike = [
                j
                for j, r in enumerate(requests)
                if (r.prompt, r.forced_tokens) == (request.prompt, request.forced_tokens)
                and computed.kept[str(r.kv_policy)].num_slots == num_slots
            ]
            kept = [computed.kept[str(requests[j].kv_policy)] for j in alike]
            answers = self._continue_greedily(kept, computed, list(request.forced_tokens), request.params.max_tokens)
            for j, ids in zip(alike, answers, strict=True):
                found[j] = Answer(ids)
        return [found[i] for i in range(len(requests))]

    def _continue_greedily(self, kept: list[Kept], prompt: Prompt, forced: list[int], length: int) -> list[list[int]]:
        logits, cache = self.extend(kept, len(prompt.ids), forced)
        answers = [list(forced) for _ in kept]
        while True:
            ids = logits[:, -1].argmax(-1)
            for answer, token in zip(answers, ids.tolist(), strict=True):
                answer.append(token)
            if len(answers[0]) == length:
                return answers
            logits = self._forward(ids[:, None], cache, len(prompt.ids) + len(answers[0]) - 1)

    @torch.inference_mode()
    def compute(self, ids: list[int]) -> Prompt:
        """Return a prompt, computed unless it is the latest."""
        if ids == self.prompt.ids:
            return self.prompt
        kept: dict[str, Kept] = {}
        logits = self._press_layers(ids, {s: p for s, p in self.presses.items() if is_layerwise(p)}, "sdpa", kept)
        if observing := {s: p for s, p in self.presses.items() if needs_weights(p)}:
            self._press_layers(ids, observing, "eager", kept)
            self.model.set_attn_implementation("sdpa")
        for spec, press in self.presses.items():
            if not (is_layerwise(press) or needs_weights(press)):
                kept[spec] = self._press_prompt(ids, press)
        self.prompt = Prompt(ids, logits, kept)
        return self.prompt

    def _press_layers(self, ids: list[int], presses: dict[str, Any], attention: str, kept: dict[str, Kept]) -> Tensor:
        """Compute a prompt in one pass, of which each press keeps what it wants. Returns its last logits."""
        self.model.set_attn_implementation(attention)
        cache = self.make_cache()
        kept |= {spec: Kept() for spec in [*presses, FULL]}

        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer = cache.layers[module.layer_idx]
            for spec, press in presses.items():
                module.masked_key_indices = None
                pressed = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
                kept[spec].append(*pressed, module.masked_key_indices)
            module.masked_key_indices = None
            kept[FULL].append(layer.keys, layer.values, None)

        with ExitStack() as stack:
            for module in self.attentions:
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            logits: Tensor = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
        return logits[0, -1]

    def _press_prompt(self, ids: list[int], press: Any) -> Kept:
        """Let a press that reads the prompt again do all by itself."""
        cache = self.make_cache()
        with press(self.model):
            self.model(input_ids=torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        kept = Kept()
        for module, layer in zip(self.attentions, cache.layers, strict=True):
            kept.append(layer.keys, layer.values, module.masked_key_indices)
            module.masked_key_indices = None
        return kept

    @torch.inference_mode()
    def extend(self, kept: Sequence[Kept], position: int, ids: list[int]) -> tuple[Tensor, Any]:
        """Return the logits [B, n, V] behind ids that continue a prompt of `position` tokens, and the cache."""
        cache = self.make_cache()
        for i, module in enumerate(self.attentions):
            cache.update(torch.cat([k.keys[i] for k in kept]), torch.cat([k.values[i] for k in kept]), i)
            module.masked_key_indices = join_masks([k.masked[i] for k in kept])
        return self._forward(torch.tensor([ids] * len(kept)), cache, position), cache

    @torch.inference_mode()
    def _forward(self, ids: Tensor, cache: Any, position: int) -> Tensor:
        """Compute tokens at their positions in the text: the cache counts slots."""
        positions = torch.arange(position, position + ids.shape[1])[None]
        logits: Tensor = self.model(input_ids=ids, past_key_values=cache, position_ids=positions).logits
        return logits


def join_masks(masks: Sequence[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the indices (batch, heads, slots) of a layer's masks, one for each row of a batch."""
    joined = [(torch.full_like(mask[1], row), *mask) for row, mask in enumerate(masks) if mask]
    if not joined:
        return None
    rows, heads, slots = (torch.cat(parts) for parts in zip(*joined, strict=True))
    return rows, heads, slots


def needs_weights(press: Any) -> bool:
    """Return whether a press scores by attention weights, which only eager attention returns."""
    return type(press).__name__ == "ObservedAttentionPress"


def is_layerwise(press: Any) -> bool:
    """Return whether a press needs one pass, and no weights of it."""
    return not (needs_weights(press) or hasattr(press, "compress_post"))


def make_press(spec: str) -> Any:
    """Return the press of a spec such as `snapkv:budget=25%`, with kvpress's defaults. Raises ValueError."""
    import kvpress

    name, options = parse_spec(spec)
    ratio = compression_ratio(options["budget"])
    makers: dict[str, Callable[[], Any]] = {
        "random": lambda: kvpress.RandomPress(ratio, seed=0),
        "keydiff": lambda: kvpress.KeyDiffPress(ratio),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "snapkv": lambda: kvpress.SnapKVPress(ratio),
        "expected": lambda: kvpress.ExpectedAttentionPress(ratio),
        "observed": lambda: kvpress.ObservedAttentionPress(ratio),
        "adakv-snapkv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "adakv-expected": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio)),
        "kvzip": lambda: kvpress.KVzipPress(ratio),
    }
    if name not in makers:
        raise ValueError(f"unknown press {name!r}: choose from {', '.join(makers)}")
    return makers[name]()


def compression_ratio(budget: str) -> float:
    """Return the share that a press drops, where a budget such as 25% stays. Raises ValueError."""
    fraction = parse_amount(budget).fraction
    if not 0 < fraction < 1:
        raise ValueError(f"a press takes a share below 100%, not {budget}")
    return 1 - fraction


def list_specs(names: Iterable[str], budgets: Iterable[str]) -> list[str]:
    """Return each press at each budget."""
    return [f"{name}:budget={budget}" for name in names for budget in budgets]


def measure_task(llm: Any, task: Any, items: Sequence[Any], specs: Sequence[str]) -> Iterator[dict[str, ItemMetrics]]:
    """Yield the metrics of each item under the full cache, and under each press."""
    for item in tqdm(items, unit="item"):
        full, state = task.measure(llm, [item], [FULL], None)
        rows, _ = task.measure(llm, [item], specs, state)
        yield dict(zip((FULL, *specs), [*full, *rows], strict=True))


class ResultsFile:
    """The results of a task, {column: metrics of each item}. It is written after each item, so a run may be stopped."""

    def __init__(self, path: Path):
        self.path = path
        self.columns: dict[str, list[ItemMetrics]] = json.loads(path.read_text()) if path.exists() else {}

    def count_measured(self, specs: Iterable[str]) -> int:
        """Return how many items the full cache and all of these presses have."""
        return min(len(self.columns.get(spec, ())) for spec in (FULL, *specs))

    def put(self, index: int, item: dict[str, ItemMetrics]) -> None:
        """Write the metrics of an item."""
        for spec, row in item.items():
            self.columns.setdefault(spec, [])[index : index + 1] = [row]
        atomic_write(self.path, lambda f: f.write(json.dumps(self.columns).encode()))


def dequantise(gguf: Path, folder: Path) -> Any:
    """Return the model of a GGUF file in float32, from a folder that is written unless it is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").exists():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        loaded.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def main() -> None:
    """Measure presses, and add them to the files of the tasks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--tasks", default="fidelity,ruler_ask_later")
    parser.add_argument("--presses", default=NAMES)
    parser.add_argument("--budgets", default="50%,25%,12.5%")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-prompt-len", type=int, default=900)
    args = parser.parse_args()
    from transformers import DynamicCache

    specs = list_specs(args.presses.split(), args.budgets.split(","))
    presses = {spec: make_press(spec) for spec in specs}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = dequantise(args.model, args.output_dir / "model")
    llm: Any = PressedModel(model, Tokenizer.open(args.model), presses, DynamicCache)
    for name in args.tasks.split(","):
        task = load_task(name)
        items = task.load_items(llm, args.data_dir, args.num_prompts, args.max_prompt_len)
        results = ResultsFile(args.output_dir / f"{name}.json")
        begin = results.count_measured(specs)
        for i, item in enumerate(measure_task(llm, task, items[begin:], specs), begin):
            results.put(i, item)


if __name__ == "__main__":
    main()
