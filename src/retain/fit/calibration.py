"""Read calibration texts with a dense model, for `retain fit`: what answers need of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from retain.fit.config import FitConfig
from retain.fit.dense import DenseModel
from retain.fit.statistics import Collector, Statistics
from retain.gates.loader import GateLoader
from retain.kv.eviction.policies import reread
from retain.models.weights import open_weights
from retain.plugins import Amount
from retain.processing.examples import Example, load_examples
from retain.processing.tokenizer import Tokenizer

HELD_OUT_EVERY = 7


class Calibration:
    """The calibration texts of `config`, which the model at `path` reads once each. Raises ValueError or OSError."""

    def __init__(self, path: Path, config: FitConfig):
        tokenizer = Tokenizer.open(path)
        self.examples = _load_examples(tokenizer, config)
        self.model = DenseModel(open_weights(path, torch.float32, progress=True))
        caches = self.model.spec.kv_cache
        if not self.model.full_layers:
            raise ValueError(f"{path.name}: all layers see a window, which needs no policy")
        if caches.has_states:
            raise ValueError(f"{path.name}: some layers cache states, with which no gate can be fitted")
        if caches.has_shared_caches:
            raise ValueError(f"{path.name}: some layers share a cache, for which no gate can be fitted")
        self.shape = GateLoader(path, caches).shape
        self.notes = {"target": config.target, "data": config.data.name, "examples": str(len(self.examples))}
        self.collector = Collector(self.model, config.target, make_rereads(tokenizer))

    @property
    def num_held_out(self) -> int:
        """The number of texts that test what the others fit."""
        return len(self.examples) // HELD_OUT_EVERY

    def __iter__(self) -> Iterator[tuple[Example, Statistics, bool]]:
        """Yield each text, what was found, and whether it tests what the others fit."""
        for i, example in enumerate(tqdm(self.examples, desc="reading", unit="prompt")):
            yield example, self.collector.collect(example), i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _load_examples(tokenizer: Tokenizer, config: FitConfig) -> list[Example]:
    found = list(load_examples(tokenizer, config.data, config.first, config.num_items, config.max_prompt_len))
    for example in found:
        if config.target != "reread" and len(example.answer) < 2:
            place = f"{config.data}:{example.line}"
            raise ValueError(f"{place}: target={config.target} needs an answer: give --target reread")
    if len(found) < HELD_OUT_EVERY:
        count = f"{len(found)} prompts of at most {config.max_prompt_len} tokens, {HELD_OUT_EVERY} are needed"
        raise ValueError(f"{config.data}: {count}")
    return found


def make_rereads(tokenizer: Tokenizer) -> Callable[[list[int]], list[Sequence[int]]]:
    """Return what follows a prompt to read it again. Without a chat template no request is made: see `retain.gates`."""
    if tokenizer.chat_template is None:
        return lambda prompt: [prompt]
    policy = reread.Policy(budget=Amount(tokens=1), ask="repeat")
    policy = policy.with_instruction(tokenizer.encode_next_turn(reread.Policy.REPEAT), tokenizer.special_token_ids)
    return lambda prompt: [p.tokens for p in policy.scoring_passes(prompt, max_chunk=2**30)]
