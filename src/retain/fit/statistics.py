"""What a gate sees of a prompt's tokens, and what it should find: columns and targets, for each layer and kv head.

A target is what a token gave, as weights of attention times the norm of its value, summed over queries:

* reread: the queries of each message of the prompt when it is read again behind a request to repeat it, and those of
  the request (after KVzip, arXiv 2505.23416; `reread:ask=repeat`);
* answers: the larger of the same for the queries of the true answer, and of how much the answer's likelihood would
  change without the token: the root of the squared products of the gradient at a head's output with the token's own
  part of that output, weight (v - output).

Each map is scaled to the mean 1 over a prompt before the larger one is taken, and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.fit.dense import DenseModel, LayerAttention
from retain.kernels.slots.quantized_slots import dequantize, quantize, rotate
from retain.kv.eviction.gate_weights import changing_logs, fixed_logs
from retain.kv.eviction.query_scored import sum_squared_weights
from retain.kv.eviction.view import BlockQueries, CacheView
from retain.processing.examples import Example

TARGET_FLOOR = 0.02  # added to a target, whose mean is 1, before its logarithm is fitted


@dataclass(frozen=True)
class Statistics:
    """Of the n tokens of a prompt, in M unwindowed layers and G kv heads."""

    columns: Tensor  # float32 [M, G, n, D + V + 5]: key before rotation, value, logarithms as in GateWeights.logs
    target: Tensor  # float32 [M, G, n], mean 1
    mass: Tensor  # float32 [M, G, n]: attention received from the prompt, which h2o goes by
    replayed: Tensor  # float32 [M, G, n]: what the prompt's queries give from behind it, which gate_replay goes by


class Collector:
    """Collect statistics of examples. `rereads` gives what follows a prompt to read it again, pass by pass."""

    def __init__(self, model: DenseModel, target: str, rereads: Callable[[list[int]], list[Sequence[int]]]):
        self.model = model
        self.target = target
        self.rereads = rereads

    def collect(self, example: Example) -> Statistics:
        """Compute the example once with its answer, and once more for its second reading."""
        prompt_len = len(example.prompt)
        first = FirstReading(self.model, prompt_len)
        maps: list[Tensor] = []
        if self.target == "reread":
            self.model.forward(example.prompt, first)
        else:
            maps += first.read_answer(example)
        columns = torch.stack(first.columns)
        mass = torch.stack(first.masses)
        replayed = torch.stack(first.replayed)
        if self.target != "answers":
            norms = torch.stack([v.norm(dim=-1) for v in first.values])
            maps.insert(0, sum_rereads(self.model, example.prompt, self.rereads(example.prompt)) * norms)
        target = maps[0] / maps[0].mean()
        for other in maps[1:]:
            target = torch.maximum(target, other / other.mean())
            target = target / target.mean()
        return Statistics(columns, target, mass, replayed)


def sum_rereads(model: DenseModel, prompt: list[int], rereads: Sequence[Sequence[int]]) -> Tensor:
    """Return the attention that a prompt gets when these tokens follow it, each list by itself, [M, G, n]."""
    n = len(prompt)
    sums = torch.zeros(())

    for tokens in rereads:
        masses: list[Tensor] = []

        def add_mass(found: LayerAttention, masses: list[Tensor] = masses) -> None:
            if model.spec.kv_cache.windows[found.layer] is None:
                masses.append(found.weights[:, :, n:, :n].sum((1, 2)))

        model.forward([*prompt, *tokens], add_mass)
        sums = sums + torch.stack(masses)
    return sums


def round_keys(k: Tensor) -> Tensor:
    """Return keys as slots of 8 bits hold them. A gate then learns what rounding leaves of them, at any precision."""
    return rotate(round_8bit(rotate(k)))


def round_8bit(x: Tensor) -> Tensor:
    """Return numbers [..., D] as slots of 8 bits hold them."""
    return dequantize(*quantize(x))


class FirstReading:
    """Record the columns of a prompt's tokens, and what its answer takes of them, layer by layer."""

    def __init__(self, model: DenseModel, prompt_len: int):
        self.model = model
        self.prompt_len = prompt_len
        self.columns: list[Tensor] = []
        self.masses: list[Tensor] = []
        self.replayed: list[Tensor] = []
        self.values: list[Tensor] = []
        self.answers: list[LayerAttention] = []

    def __call__(self, found: LayerAttention) -> None:
        """Record the columns of the prompt and the attention of one layer that has no sliding window."""
        if self.model.spec.kv_cache.windows[found.layer] is not None:
            return
        n = self.prompt_len
        k = round_keys(found.keys[:, :n].detach())
        v = round_8bit(found.values[:, :n].detach())
        self.replayed.append(self._replay(found, k, v))
        pos = torch.arange(n)
        if (factors := self.model.decoder.key_factors.get(found.layer)) is not None:
            k = k / factors[:, None]  # as a policy sees keys
        mass = found.weights[:, :, :n, :n].detach().sum((1, 2))  # [G, n]
        if ropes := self.model.decoder.ropes:
            unrotated = ropes[0].shift(k.flatten(0, 1), -pos.repeat(len(k))).view_as(k)
        else:
            unrotated = k
        logs = fixed_logs(k, v, pos.expand(len(k), -1)), changing_logs(mass, pos.expand(len(k), -1), n - 1)
        self.columns.append(torch.cat((unrotated, v, *logs), -1))
        self.masses.append(mass)
        self.values.append(v)
        self.answers.append(found)

    def _replay(self, found: LayerAttention, k: Tensor, v: Tensor) -> Tensor:
        """Return the squared weights of the prompt's queries from behind it, summed, [G, n]."""
        n = self.prompt_len
        op = self.model.decoder.attention[found.layer]
        queries = BlockQueries(found.queries[:, :, :n].detach(), torch.arange(n), op.params, op.rope)
        pos = torch.arange(n, dtype=torch.int32).expand(1, len(k), n)
        view = CacheView(pos, torch.zeros(1, len(k), 1, n), n - 1, lambda: (k[None], v[None]), queries=queries)
        return sum_squared_weights(view, *view.queries_behind).sum(1)

    def read_answer(self, example: Example) -> list[Tensor]:
        """Compute prompt and answer. Returns what the answer attends to, and what its likelihood needs, [M, G, n]."""
        n = self.prompt_len
        # The first token of the answer is predicted from the whole prompt, so it does not count.
        answer = slice(n, -1)
        log_probs, _ = self.model.forward(example.prompt + example.answer, self, needs_grad=True, predicting=answer)
        log_probs.gather(1, torch.tensor(example.answer[1:])[:, None]).sum().backward()  # type: ignore[no-untyped-call]
        attended = []
        needed = []
        for found, v in zip(self.answers, self.values, strict=True):
            weights = found.weights[:, :, n:, :n].detach()
            output = found.output[:, :, n:].detach()
            assert found.output.grad is not None
            grad = found.output.grad[:, :, n:]
            change = weights * (grad @ v[:, None].transpose(-1, -2) - (grad * output).sum(-1, keepdim=True))
            attended.append(weights.sum((1, 2)) * v.norm(dim=-1))
            needed.append(change.sum(1).square().sum(1).sqrt())
        self.answers.clear()  # the graph of the whole forward pass
        return [torch.stack(attended), torch.stack(needed)]
