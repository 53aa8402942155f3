"""Tiers below the cache: what left it is served again, with the same answers; storing alone helps nobody."""

from __future__ import annotations

import re

from cachecheck.http_client import RefusedError
from cachecheck.probe import Probe

NUM_TEXTS = 4
NUM_WORDS = 180
FILLER = 240  # words of a text that fills the cache
# What counts as stored, in servers that are known: a sample's name, and what its labels have.
KNOWN = (
    ("retain_tier_transferred_bytes_total", 'direction="written"'),
    ("vllm:kv_offload_total_bytes_total", 'transfer_type="GPU_to_CPU"'),
    ("lmcache:num_remote_write_bytes_total", ""),
    ("lmcache:local_storage_usage", ""),
)
SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")


def run(probe: Probe) -> None:
    """Texts have their first answers after many others; where bytes were stored for them, some tokens are found."""
    probe.skip_unless(probe.config.pressure, "no --pressure: how many words fill the cache")
    texts = [probe.texts.prompt(NUM_WORDS + 7 * i) for i in range(NUM_TEXTS)]
    stored_before = read_stored(probe)
    first = [probe.ask(text) for text in texts]
    for _ in range(-(-probe.config.pressure // FILLER)):
        probe.ask(probe.texts.prompt(FILLER), max_tokens=1)
    stored = read_stored(probe)
    again = [probe.ask(text) for text in texts]
    for i, answer in enumerate(again):
        probe.equal(first[i], answer, f"text {i} after the pressure")
    if not probe.capabilities.counts_cached or stored is None or stored_before is None:
        probe.unsure("what is stored", "usage counts no cached tokens, or no metric counts what is stored")
        return
    num_found = sum(answer.num_cached > probe.capabilities.allowance for answer in again)
    detail = f"{stored - stored_before:.0f} were stored by {NUM_TEXTS} texts and others, and none of the texts is found"
    probe.judge(num_found > 0 or stored <= stored_before, "what is stored is served", detail)


def read_stored(probe: Probe) -> float | None:
    """Return what the server's metrics count as stored below the cache; None where they count nothing of it."""
    wanted = ((probe.config.stored_metric, ""),) if probe.config.stored_metric else KNOWN
    try:
        lines = probe.server.clients[0].read_metrics().splitlines()
    except RefusedError:
        return None
    samples = [match for line in lines if (match := SAMPLE.match(line))]
    found = [
        float(s["value"])
        for s in samples
        if any(s["name"] == name and part in (s["labels"] or "") for name, part in wanted)
    ]
    return sum(found) if found else None
