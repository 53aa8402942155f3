"""Fit a gate for a model, and report what it explains and how well its tokens answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from retain.fit.config import FitConfig
from retain.fit.dense import DenseModel
from retain.fit.evaluation import BUDGETS, HeldOut, hold_out, kl_divergence
from retain.fit.ridge import MASS_COLUMN, Moments, replayed_logs
from retain.fit.statistics import Collector, Statistics, sum_rereads
from retain.gates.loader import model_fingerprint
from retain.kv.eviction.gate_weights import NUM_LOGS, Gate, GateShape, GateWeights, save_gate
from retain.kv.eviction.policies import reread
from retain.models.weights import open_weights
from retain.plugins import Amount
from retain.processing.examples import Example, load_examples
from retain.processing.tokenizer import Tokenizer

HELD_OUT_EVERY = 7
RECENT = {"gate": 0.15, "gate_replay": 0.15, "reread": 0.3, "h2o": 0.3}  # the policies' own defaults


@dataclass(frozen=True)
class FitReport:
    """What a fit found. `kl` is by policy and budget, over the prompts held out; empty without answers.

    `best`: the policy of the gate that had the lower one. A gate for `gate_replay` is left out where that is `gate`.
    """

    num_fitted: int
    num_held_out: int
    num_weights: int
    r2: float
    r2_by_layer: list[float]
    kl: dict[str, list[float]]
    best: str


def fit_gate(path: Path, config: FitConfig) -> FitReport:
    """Fit a gate for the model at `path`, write it to `config.out`. Raises ValueError or OSError."""
    tokenizer = Tokenizer.open(path)
    examples = _load_examples(tokenizer, config)
    model = DenseModel(open_weights(path, torch.float32, progress=True))
    if not model.full_layers:
        raise ValueError(f"{path.name}: all layers see a window, which needs no policy")
    if model.spec.kv_cache.has_states:
        raise ValueError(f"{path.name}: some layers cache states, with which no gate can be fitted")
    if model.spec.kv_cache.has_shared_caches:
        raise ValueError(f"{path.name}: some layers share a cache, for which no gate can be fitted")
    collector = Collector(model, config.target, _rereads(tokenizer))
    k_dim = model.spec.kv_cache.full_attention_group.k_dim
    moments = Moments(k_dim)
    held_moments = Moments(k_dim)
    held: list[tuple[HeldOut, Statistics]] = []
    for i, example in enumerate(tqdm(examples, desc="reading", unit="prompt")):
        found = collector.collect(example)
        is_held_out = i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        (held_moments if is_held_out else moments).add(found)
        if is_held_out and example.answer:
            held.append((hold_out(model, example), found))
    gate = Gate(moments.solve(), moments.solve_replayed())
    by_layer, r2 = held_moments.r2(gate.attention)
    num_held_out = len(examples) // HELD_OUT_EVERY
    kl = _compare(model, gate, held) if held else {}
    if not kl or sum(kl["gate"]) < sum(kl["gate_replay"]):
        gate = Gate(gate.attention)
    save_gate(config.out, gate, _shape(model, path), _notes(config, len(examples), r2))
    num_weights = sum(x.numel() for x in vars(gate.attention).values()) * (2 if gate.replayed else 1)
    best = "gate_replay" if gate.replayed else "gate"
    return FitReport(len(examples) - num_held_out, num_held_out, num_weights, r2, by_layer.tolist(), kl, best)


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


def _rereads(tokenizer: Tokenizer) -> Callable[[list[int]], list[Sequence[int]]]:
    """Return what follows a prompt to read it again. Without a chat template no request is made: see `retain.gates`."""
    if tokenizer.chat_template is None:
        return lambda prompt: [prompt]
    policy = reread.Policy(budget=Amount(tokens=1), ask="repeat")
    policy = policy.with_instruction(tokenizer.encode_next_turn(reread.Policy.REPEAT), tokenizer.special_token_ids)
    return lambda prompt: [p.tokens for p in policy.scoring_passes(prompt, max_chunk=2**30)]


def score_columns(gate: GateWeights, columns: Tensor) -> Tensor:
    """Return the scores of the columns of `Statistics`, [M, G, n]: what `GateWeights` computes from a cache."""
    weights = torch.cat((gate.key, gate.value, gate.logs), -1)[..., None]  # [M, G, D + V + 5, 1]
    assert columns.shape[-1] == weights.shape[-2]
    return (columns @ weights)[..., 0] + gate.bias[..., None]


def score_replayed(gate: GateWeights, found: Statistics) -> Tensor:
    """Return the scores of the policy `gate_replay` at the end of the prompt, [M, G, n]."""
    columns = found.columns.clone()
    columns[..., MASS_COLUMN] = replayed_logs(found)
    return score_columns(gate, columns)


def _compare(model: DenseModel, gate: Gate, held: list[tuple[HeldOut, Statistics]]) -> dict[str, list[float]]:
    """Return the mean KL divergence of both gates, of reread (share=all, value=norm) and of h2o, at each budget."""
    assert gate.replayed
    attention = gate.attention
    replayed = gate.replayed

    k_dim = model.spec.kv_cache.full_attention_group.k_dim

    def reread_norms(example: Example, found: Statistics) -> Tensor:
        values = found.columns[..., k_dim:-NUM_LOGS]
        return sum_rereads(model, example.prompt, [example.prompt]) * values.norm(dim=-1)

    scorers: dict[str, tuple[str, Callable[[Example, Statistics], Tensor]]] = {
        "gate": ("all", lambda example, found: score_columns(attention, found.columns)),
        "gate_replay": ("all", lambda example, found: score_replayed(replayed, found)),
        "reread": ("all", reread_norms),
        "h2o": ("none", lambda example, found: found.mass),
    }
    sums = {name: [0.0] * len(BUDGETS) for name in scorers}
    for item, found in tqdm(held, desc="comparing", unit="prompt"):
        for name, (share, scorer) in scorers.items():
            scores = scorer(item.example, found)
            for i, budget in enumerate(BUDGETS):
                sums[name][i] += kl_divergence(model, item, scores, budget, RECENT[name], share) / len(held)
    return sums


def _shape(model: DenseModel, path: Path) -> GateShape:
    group = model.spec.kv_cache.full_attention_group
    return GateShape(len(group.caches), group.num_kv_heads, group.k_dim, group.v_dim, model_fingerprint(path))


def _notes(config: FitConfig, num_examples: int, r2: float) -> dict[str, str]:
    return {"target": config.target, "data": config.data.name, "examples": str(num_examples), "r2": f"{r2:.3f}"}
