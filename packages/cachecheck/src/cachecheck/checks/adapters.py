"""Adapters (LoRA): what one has computed, neither another one of its name nor the model finds."""

from __future__ import annotations

from cachecheck.comparison import compare
from cachecheck.probe import Probe

NUM_TEXTS = 4
NUM_WORDS = 140
NAME = "cachecheck"


def run(probe: Probe) -> None:
    """Texts of the model are new to an adapter, and its texts are new to the next adapter of its name."""
    probe.skip_unless(probe.config.adapters, "no --adapters")
    texts = [probe.texts.prompt(NUM_WORDS + 3 * i) for i in range(NUM_TEXTS)]
    found = {"the model": [probe.ask(text) for text in texts]}
    for which, folder in zip(("one adapter", "the other adapter"), probe.config.adapters, strict=True):
        probe.send("/load_lora_adapter", lora_name=NAME, lora_path=folder)
        try:
            found[which] = [probe.ask(text, model=NAME) for text in texts]
        finally:
            probe.send("/unload_lora_adapter", lora_name=NAME)
        for i, answer in enumerate(found[which]):
            probe.not_cached(answer, f"text {i} of {which}")
    alike = zip(found["one adapter"], found["the other adapter"], strict=True)
    if all(compare(a, b, probe.server.tolerance) is None for a, b in alike):
        probe.unsure("answers of adapters", "they are alike: are these two adapters?")
    for i, text in enumerate(texts):
        probe.equal(found["the model"][i], probe.ask(text), f"text {i}, the model's answer after the adapters")
