"""Compare ways to round keys and values to four and eight bits, before a kernel is written for one of them.

    python -m tools.rounding --model smollm2 --data ../shared/data

Attention is written out in torch, and every query of a text sees rounded keys and values. Prints the KL divergence
from exact ones, in nats a token, and the change of the perplexity: over reference summaries behind their articles, and
over texts of books.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from retain.bench.tasks import load_records
from retain.fit.dense import DenseModel, LayerAttention
from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.quantized_slots import (
    dequantize,
    dequantize_4bit,
    quantize,
    quantize_4bit,
    quantize_fp8,
    rotate,
)
from retain.models.resolve import resolve_model
from retain.models.weights import Weights, open_weights
from retain.processing.tokenizer import Tokenizer

SUMMARY_TOKENS, NUM_CALIBRATION_TOKENS, FIRST_PREDICTED = 64, 1024, 16

Transform = Callable[[Tensor, Tensor], Tensor]  # (moments of keys, of queries), each [G, D, D] -> [G, D, D]


@dataclass(frozen=True)
class Rounding:
    """A way to round. `recent` tokens before each query, and the `first` of a text, are exact."""

    keys: str = "int4"  # as a pool of this dtype has them
    values: str = "int4"
    centered: bool = False  # keys less their mean over other tokens
    transform: Transform | None = None  # of centered keys, before they are rotated
    unrotated: bool = False  # keys as they are, without a Hadamard transform
    unbalanced: bool = False  # keys without the factors that the engine gives them (models/qk_balance.py)
    recent: int = 0
    first: int = 0


@dataclass(frozen=True)
class Moments:
    """What one layer's keys and queries are like on other tokens."""

    key_mean: Tensor  # [G, D]
    keys: Tensor  # mean outer product, [G, D, D]
    queries: Tensor  # [G, D, D]


def balance_pairs(keys: Tensor, queries: Tensor) -> Tensor:
    """Return factors that make each rotary pair of keys as large as that of queries, as diagonal matrices."""
    pairs = [x.diagonal(0, 1, 2).unflatten(-1, (2, -1)).mean(1) for x in (keys, queries)]
    return torch.diag_embed(((pairs[1] + 1e-12) / (pairs[0] + 1e-12)).pow(0.25).repeat(1, 2))


def balance_all(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the transform with the least error of scores, if errors of all transformed numbers are alike."""
    dtype, identity = keys.dtype, torch.eye(keys.shape[-1], dtype=torch.float64)
    keys, queries = keys.double() + 1e-6 * keys.double().diagonal(0, 1, 2).mean(-1)[:, None, None] * identity, queries
    root = matrix_power(keys, 0.5)
    inner = matrix_power(root @ queries.double() @ root, 0.5)
    inverse = matrix_power(keys, -0.5)
    return matrix_power(inverse @ inner @ inverse, 0.5).to(dtype)


def matrix_power(x: Tensor, exponent: float) -> Tensor:
    """Return powers of symmetric positive matrices [G, D, D]."""
    values, vectors = torch.linalg.eigh(x)
    values = values.clamp(min=1e-12 * float(values.max()))
    return (vectors * values.pow(exponent)[:, None]) @ vectors.mT


ROUNDINGS = {
    "4 bits": Rounding(),
    "4 bits, unrotated": Rounding(unrotated=True),
    "4 bits, unbalanced": Rounding(unbalanced=True),
    "8 bits": Rounding(keys="int8", values="int8"),
    "8 bits, unbalanced": Rounding(keys="int8", values="int8", unbalanced=True),
    "fp8": Rounding(keys="fp8", values="fp8"),
    "fp8, unrotated": Rounding(keys="fp8", values="fp8", unrotated=True),
    "K 8 bits": Rounding(keys="int8"),
    "V 8 bits": Rounding(values="int8"),
    "centered": Rounding(centered=True),
    "balanced by pairs": Rounding(transform=balance_pairs),
    "balanced": Rounding(transform=balance_all),
    "first 4 exact": Rounding(first=4),
    "newest 64 exact": Rounding(recent=64),
    "first 4, newest 64 exact": Rounding(first=4, recent=64),
    "the same, centered": Rounding(first=4, recent=64, centered=True),
    "the same, K 8 bits": Rounding(first=4, recent=64, keys="int8"),
}


class RoundedModel(DenseModel):
    """A model that rounds keys and values as `rounding` says; exact without one. Keeps the moments of its last text."""

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.rounding: Rounding | None = None
        self.calibrated: dict[int, Moments] = {}
        self.is_calibrating = False

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams
    ) -> LayerAttention:
        if self.is_calibrating:
            self.calibrated[layer] = _moments(q.transpose(0, 1).reshape(len(k), -1, k.shape[-1]), k)
        r = self.rounding
        exact = super()._attend(layer, q, k, v, mask, params)
        if r is None:
            return exact
        rounded_k, rounded_v = self._round_keys(layer, k), _round(v, r.values)
        places, n = torch.arange(k.shape[1]), mask.shape[-2]
        is_exact = (places[-n:, None] - places < r.recent) | (places < r.first)  # [T, n]
        scale, (G, R, T, _) = params.scale, exact.weights.shape
        queries = q.transpose(0, 1).reshape(G, R * T, -1)
        scores, rounded = ((queries @ x.mT * scale).view(G, R, T, -1) for x in (k, rounded_k))
        weights = torch.where(is_exact, scores, rounded).masked_fill(~mask, -torch.inf).softmax(-1)
        output = (weights * is_exact) @ v[:, None] + (weights * ~is_exact) @ rounded_v[:, None]
        return LayerAttention(layer, k, v, weights, output)

    def _round_keys(self, layer: int, k: Tensor) -> Tensor:
        r, m = self.rounding, self.calibrated[layer]
        assert r
        offset = m.key_mean[:, None] if r.centered else torch.zeros(())
        if r.unbalanced and (factors := self.decoder.key_factors.get(layer)) is not None:
            return _round_rotated(k / factors[:, None], r) * factors[:, None]
        if r.transform is None:
            return _round_rotated(k - offset, r) + offset
        matrix = r.transform(m.keys, m.queries)
        return _round_rotated((k - offset) @ matrix.mT, r) @ torch.linalg.inv(matrix).mT + offset


def _moments(queries: Tensor, keys: Tensor) -> Moments:
    keys = keys[:, 4:]  # the first tokens are unlike all others
    outer = [torch.einsum("gnd,gne->gde", x, x) / x.shape[1] for x in (keys, queries)]
    return Moments(keys.mean(1), *outer)


def _round_rotated(x: Tensor, r: Rounding) -> Tensor:
    return _round(x, r.keys) if r.unrotated else rotate(_round(rotate(x), r.keys))


def _round(x: Tensor, dtype: str) -> Tensor:
    if dtype == "int4":
        return dequantize_4bit(*quantize_4bit(x))
    return dequantize(*(quantize(x) if dtype == "int8" else quantize_fp8(x)))


def summaries(tokenizer: Tokenizer, data: Path, num_texts: int, max_len: int) -> Iterator[tuple[list[int], int]]:
    """Yield articles with their summaries, and where the summary begins."""
    for record in load_records(data, "cnn_dailymail"):
        article = list(tokenizer.encode(f"{record['article']}\n\nSummary:\n"))
        if len(article) <= max_len and num_texts:
            num_texts -= 1
            yield article + list(tokenizer.encode(record["highlights"]))[:SUMMARY_TOKENS], len(article)


def books(tokenizer: Tokenizer, data: Path, num_texts: int, max_len: int) -> Iterator[tuple[list[int], int]]:
    """Yield pieces out of the middle of books, and the first token that is predicted."""
    for record in load_records(data, "books", num_texts):
        text = record["text"]
        yield list(tokenizer.encode(text[len(text) // 2 :][: 8 * max_len]))[:max_len], FIRST_PREDICTED


def compare(model: RoundedModel, texts: Sequence[tuple[list[int], int]]) -> None:
    """Print what each way to round costs."""
    total, kl, loss = 0, dict.fromkeys(ROUNDINGS, 0.0), dict.fromkeys(ROUNDINGS, 0.0)
    for tokens, begin in texts:
        model.rounding = None
        exact, labels = _log_probs(model, tokens, begin), torch.tensor(tokens[begin + 1 :])[:, None]
        total += len(labels)
        for name, rounding in ROUNDINGS.items():
            model.rounding = rounding
            found = _log_probs(model, tokens, begin)
            kl[name] += float((exact.exp() * (exact - found)).sum())
            loss[name] += float((exact - found).gather(1, labels).sum())
    for name in ROUNDINGS:
        print(f"{name:28} KL {kl[name] / total:.4f}  perplexity {100 * math.expm1(loss[name] / total):+.2f} %")


def _log_probs(model: RoundedModel, tokens: list[int], begin: int) -> Tensor:
    return model.forward(tokens, predicting=slice(begin, -1))[0]


def main() -> None:
    """Compare all ways on both kinds of texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-texts", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=1024)
    args = parser.parse_args()
    path = resolve_model(args.model)
    tokenizer = Tokenizer.open(path)
    model = RoundedModel(open_weights(path, torch.float32))
    model.is_calibrating = True
    essay = next(iter(load_records(args.data, "paul_graham_essays", 1)))["text"]
    model.forward(list(tokenizer.encode(essay[:12000]))[:NUM_CALIBRATION_TOKENS])
    model.is_calibrating = False
    for load in (summaries, books):
        print(load.__name__)
        compare(model, list(load(tokenizer, args.data, args.num_texts, args.max_len)))


if __name__ == "__main__":
    main()
