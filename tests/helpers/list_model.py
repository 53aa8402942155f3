"""An independent implementation of budgets: each head is a list of tokens, in order, and forgets by deleting them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.noise import GUMBEL_MEAN, noise_key, sample_noise
from retain.kernels.slots.quantized_slots import dequantize_4bit, quantize_4bit, rotate
from retain.kernels.slots.scoring import GUMBEL
from retain.kv.eviction.gate_weights import GateWeights
from retain.models.decoder import ModelSpec
from tests.helpers.gates import random_gate
from tests.helpers.tiny_models import tiny_model

HeadId = tuple[int, int]  # layer, kv head


def softmax(x: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of scores x [R, n], to whose sums sink logits [R, 1] add."""
    if sinks is None:
        return x.softmax(-1)
    largest = torch.maximum(x.max(-1, keepdim=True).values, sinks)
    weights = (x - largest).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - largest).exp())


@dataclass(frozen=True)
class ListPolicy:
    """What the spec of a policy says, spelled out."""

    name: str
    budget: int = 40
    recent: int = 12
    sinks: int = 0
    interval: int = 1
    chunk: int = 0  # tokens of a streamed prompt that are computed between two evictions; 0: the prompt is not streamed
    damping: float = 1.0
    heads: str = "kv-sum"
    scope: str = "head"
    share: str = "none"
    norm_values: bool = False
    noise_period: int = 1
    num_queries: int = 0  # of snapkv
    reread_chunk: int = 0
    instruction: tuple[int, ...] = ()  # before each part of a prompt that is read again
    mix_h2o: bool = False
    first: int = 0  # tokens of the answer before anything is evicted
    demote: int = 0  # tokens over the budget that stay in 4 bits

    @property
    def decay(self) -> float:
        """Factor on older masses at each query."""
        return 0.0 if self.name == "tova" else self.damping


@dataclass
class ListHead:
    """The tokens of one kv head, the oldest first; masses are of R query heads."""

    positions: Tensor  # int64 [n]
    keys: Tensor  # [n, D]
    values: Tensor  # [n, D]
    masses: Tensor  # float64 [n, R]
    reread: Tensor  # float64 [n], the mass before the answer; 0 of the answer's tokens
    demoted: Tensor  # bool [n]
    max_demoted: int = 0
    exact: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # k and v of demoted tokens, by position

    def append(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        self.positions = torch.cat((self.positions, positions))
        self.keys, self.values = torch.cat((self.keys, keys)), torch.cat((self.values, values))
        self.masses = torch.cat((self.masses, self.masses.new_zeros(len(keys), self.masses.shape[1])))
        self.reread = torch.cat((self.reread, self.reread.new_zeros(len(keys))))
        self.demoted = torch.cat((self.demoted, self.demoted.new_zeros(len(keys))))

    def keep(self, indices: list[int]) -> None:
        """Delete all other tokens."""
        if len(indices) == len(self):
            return
        kept = torch.tensor(indices, dtype=torch.int64)  # torch converts a list again for each tensor
        self.positions, self.masses = self.positions[kept], self.masses[kept]
        self.keys, self.values = self.keys[kept], self.values[kept]
        self.reread, self.demoted = self.reread[kept], self.demoted[kept]

    def demote(self, indices: list[int]) -> None:
        """Round these tokens to 4 bits."""
        if not indices:
            return
        self.demoted[indices] = True
        self.exact |= {int(self.positions[j]): (self.keys[j].clone(), self.values[j].clone()) for j in indices}
        self.keys[indices] = rotate(dequantize_4bit(*quantize_4bit(rotate(self.keys[indices]))))
        self.values[indices] = dequantize_4bit(*quantize_4bit(self.values[indices]))

    @property
    def since_reread(self) -> Tensor:
        """The mass that each token got from the answer, float64 [n]."""
        return (self.masses.sum(1) - self.reread).clamp(min=0)

    @property
    def position_list(self) -> list[int]:
        return self.positions.tolist()

    def __len__(self) -> int:
        return len(self.positions)


class ListModel:
    """A tiny model whose layers without a window keep the tokens that a policy says."""

    def __init__(self, family: str, policy: ListPolicy):
        self.model = tiny_model(family)
        self.spec: ModelSpec = self.model.spec
        self.policy = policy
        s = self.spec
        self.heads = {
            (layer, g): ListHead(
                torch.zeros(0, dtype=torch.int64),
                torch.zeros(0, group.k_dim),
                torch.zeros(0, group.v_dim),
                torch.zeros(0, s.num_heads // group.num_kv_heads, dtype=torch.float64),
                torch.zeros(0, dtype=torch.float64),
                torch.zeros(0, dtype=torch.bool),
            )
            for group in s.kv_cache.groups
            for layer in group.caches
            for g in range(group.num_kv_heads)
        }
        self.sizes: dict[HeadId, int] = {}  # tokens that each head keeps; empty before the first eviction
        self.fresh_positions = torch.zeros(0, dtype=torch.int64)
        self.prompt_len, self.expected_len, self.seed = 0, 1, 0
        self.tokens: list[int] = []  # of the last prompt and its answer
        self.next_eviction = 0  # computed tokens at that moment

    @cached_property
    def full_layers(self) -> list[int]:
        cache = self.spec.kv_cache
        return [i for i, w in enumerate(cache.windows) if w is None and cache.source_cache(i) == i]

    # ---- attention -----------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """Append fresh tokens, and attend one query [R, D] after another. q [T, H, D]; k and v [T, G, D]."""
        s, o = self.spec, torch.zeros_like(q)
        G = s.kv_cache.attention(layer).num_kv_heads
        R = s.num_heads // G
        source = s.kv_cache.source_cache(layer)
        for g in range(G):
            head, queries = self.heads[source, g], slice(g * R, (g + 1) * R)
            if source == layer:
                head.append(self.fresh_positions, k[:, g], v[:, g])
            for t, p in enumerate(self.fresh_positions.tolist()):
                is_visible = (head.positions <= p) & (head.positions > p - (s.kv_cache.windows[layer] or 10**9))
                x = params.scale * q[t, queries] @ head.keys.T  # [R, n]
                if params.softcap:
                    x = params.softcap * (x / params.softcap).tanh()
                if params.alibi_slopes is not None:
                    x = x + params.alibi_slopes[queries, None] * (head.positions - p)
                x = x.masked_fill(~is_visible, -torch.inf)
                sinks = None if params.sink_logits is None else params.sink_logits[queries, None]  # [R, 1]
                o[t, queries] = softmax(x, sinks) @ head.values
                if source != layer:  # its queries give no mass
                    continue
                received = self.received_masses(x, sinks, head.positions, (layer, g), p)  # [R, n]
                head.masses = head.masses * self.policy.decay + received.double().T
        return o

    def received_masses(self, x: Tensor, sinks: Tensor | None, positions: Tensor, head: HeadId, p: int) -> Tensor:
        """Return what a query at position p with scores x [R, n] adds to the masses of tokens."""
        policy = self.policy
        if policy.name == "reread" and p < self.prompt_len and not policy.mix_h2o:
            return torch.zeros_like(x)
        if policy.name == "snapkv" and p < self.prompt_len - policy.num_queries:
            return torch.zeros_like(x)
        if policy.name != "keyformer":
            return softmax(x, sinks)
        tau = 1 + max(p - self.prompt_len + 1, 0) / self.expected_len
        draw = torch.tensor(p // policy.noise_period if policy.noise_period else -1)
        noise = sample_noise(GUMBEL, noise_key(torch.tensor(self.seed), *head, draw), positions)
        return softmax((x + noise) / tau, None if sinks is None else (sinks + GUMBEL_MEAN) / tau)

    # ---- scores --------------------------------------------------------------------------------------------------

    def masses(self, layer: int, g: int) -> list[list[float]]:
        """Return for each token of a head the masses of all query heads that count for it."""
        head = self.heads[layer, g]
        layers = self.full_layers if self.policy.scope == "shared" else [layer]
        assert all(torch.equal(self.heads[i, g].positions, head.positions) for i in layers)
        masses = torch.cat([self.heads[i, g].masses for i in layers], 1)
        if self.policy.norm_values:
            masses = masses * head.values.norm(dim=-1).double()[:, None]
        return masses.tolist()

    def rankings(self, layer: int, g: int, free: list[int]) -> list[list[int]]:
        """Return for each query head the free tokens, the highest mass first."""
        masses = self.masses(layer, g)
        return [sorted(free, key=lambda j: -masses[j][r]) for r in range(len(masses[0]))]

    def scores(self, layer: int, g: int, free: list[int]) -> dict[int, float]:
        """Return the score of each free token of a head."""
        head, policy = self.heads[layer, g], self.policy
        positions = head.position_list
        if policy.name in ("window", "sinks"):
            return {j: positions[j] for j in free}
        if policy.name == "dilated":
            return {j: positions[j] - 10**6 * (positions[j] % 2) for j in free}
        if policy.name == "random":  # a number of its own for each layer, head and position
            rng = torch.Generator().manual_seed(0)
            shape = len(self.full_layers), self.spec.kv_cache.only_group.num_kv_heads
            numbers = torch.rand(*shape, generator=rng, dtype=torch.float64)
            factor = 12.9898 + float(numbers[self.full_layers.index(layer), g])
            return {j: abs(math.fmod(math.sin((positions[j] + 1) * factor) * 43758.5453, 1)) for j in free}
        if policy.name == "knorm":
            norms = self.unscaled(layer, g, head.keys).norm(dim=-1).tolist()
            return {j: -norms[j] for j in free}
        if policy.name == "keydiff":
            keys = self.unscaled(layer, g, head.keys)
            units = keys / keys.norm(dim=-1, keepdim=True)
            mean = units.mean(0)
            similarity = (units @ mean / mean.norm()).tolist()
            return {j: -similarity[j] for j in free}
        if policy.name == "gate":
            return self.gate_scores(layer, g, free)
        if policy.heads in ("query", "union"):
            rankings = self.rankings(layer, g, free)
            return {j: -min(ranking.index(j) for ranking in rankings) for j in free}
        if policy.first:
            return self.larger_shares(layer, g, free)
        masses = self.masses(layer, g)
        return {j: max(masses[j]) if policy.heads == "kv-max" else sum(masses[j]) for j in free}

    def larger_shares(self, layer: int, g: int, free: list[int]) -> dict[int, float]:
        """Return of each token the larger share: of what the prompt got before the answer, or from the answer.

        Shares are of all tokens of the prompt that are there in the same precision: the two are ranked apart.
        """
        heads = [head for (i, _), head in self.heads.items() if i in self.full_layers]
        sums = torch.zeros(2, 2, dtype=torch.float64)  # before and since the answer began; exact and demoted
        for head in heads:
            for is_demoted in (False, True):
                mask = (head.positions < self.prompt_len) & (head.demoted == is_demoted)
                sums[:, int(is_demoted)] += torch.stack((head.reread[mask].sum(), head.since_reread[mask].sum()))
        head = self.heads[layer, g]
        shares = torch.stack((head.reread, head.since_reread)) / sums[:, head.demoted.long()]
        return {j: float(shares[:, j].max()) for j in free}

    @cached_property
    def gate(self) -> GateWeights:
        return random_gate(self.spec.kv_cache).attention

    def unscaled(self, layer: int, g: int, keys: Tensor) -> Tensor:
        """Return keys without the factors that balance them with queries."""
        factors = self.model.decoder.key_factors.get(layer)
        return keys if factors is None else keys / factors[g]

    def gate_scores(self, layer: int, g: int, free: list[int]) -> dict[int, float]:
        """Return the score of each free token of a head under the random gate."""
        head, i = self.heads[layer, g], self.full_layers.index(layer)
        p, received = head.positions[free], head.masses[free].sum(1)
        exact = [head.exact.get(x, (head.keys[j], head.values[j])) for j, x in zip(free, p.tolist(), strict=True)]
        k, v = (torch.stack(x).double() for x in zip(*exact, strict=True))
        k = self.unscaled(layer, g, k)
        if self.model.decoder.ropes:
            rope = self.model.decoder.ropes[0]
            k = rope.apply(k[:, None], rope.angles(-p, k.dtype))[:, 0]
        age = self.fresh_positions[-1] + 1 - p
        logs = [v.norm(dim=-1) + 1e-3, k.norm(dim=-1) + 1e-3, p + 1, received / age + 1e-7, age]
        x = float(self.gate.bias[i, g]) + k @ self.gate.key[i, g].double() + v @ self.gate.value[i, g].double()
        x = x + torch.stack([n.double() for n in logs], 1).log() @ self.gate.logs[i, g].double()
        return dict(zip(free, x.clamp(-8.0, 12.0).tolist(), strict=True))

    # ---- eviction ------------------------------------------------------------------------------------------------

    def evict(self, now: int) -> None:
        """Delete what the windows of sliding layers hide from the token at place `now`, and what is over the budget."""
        for (layer, _), head in self.heads.items():
            if window := self.spec.kv_cache.windows[layer]:
                head.keep((head.positions > now - window).nonzero()[:, 0].tolist())
        policy = self.policy
        full_heads = {h: head for h, head in self.heads.items() if h[0] in self.full_layers}
        positions = {h: head.position_list for h, head in full_heads.items()}
        if policy.first and now == self.prompt_len - 1:
            for head in self.heads.values():
                head.reread = head.masses.sum(1)
        at_prompt_end = (
            now == self.prompt_len - 1 + policy.first and len(next(iter(positions.values()))) > policy.budget
        )
        is_due = at_prompt_end or now < self.prompt_len - 1 or now == self.next_eviction
        num_held = sum(int((~head.demoted).sum()) for head in full_heads.values())
        if not is_due or num_held <= policy.budget * len(positions):
            return
        newest = now - policy.recent
        free = {h: [j for j, p in enumerate(ps) if policy.sinks <= p <= newest] for h, ps in positions.items()}
        scores = {h: self.scores(*h, free[h]) for h in positions}
        if at_prompt_end:
            self.sizes = self.divide_budget(positions, free, scores, policy.budget)
        if policy.demote and not any(head.max_demoted for head in full_heads.values()):
            self.divide_demotion(positions, free, scores, at_prompt_end)
        for h, ps in positions.items():
            head = self.heads[h]
            order = sorted(free[h], key=lambda j: (scores[h][j], ps[j]))
            demoted = [j for j in order if head.demoted[j]]
            num_evicted = len(ps) - int(head.demoted.sum()) - self.sizes.get(h, policy.budget)
            lowest = [j for j in order if not head.demoted[j]][:num_evicted]
            saved = lowest[max(len(lowest) - head.max_demoted, 0) :]
            forgotten = demoted[: max(len(demoted) + len(saved) - head.max_demoted, 0)]
            head.demote(saved)
            gone = {*lowest, *forgotten} - set(saved)
            head.keep([j for j in range(len(ps)) if j not in gone])
        self.next_eviction = now + policy.interval

    def divide_budget(
        self,
        positions: dict[HeadId, list[int]],
        free: dict[HeadId, list[int]],
        scores: dict[HeadId, dict[int, float]],
        budget: int,
    ) -> dict[HeadId, int]:
        """Return how many tokens each head keeps from the end of the prompt on, on average `budget`."""
        policy = self.policy
        protected = {h: len(ps) - len(free[h]) for h, ps in positions.items()}
        sizes = dict.fromkeys(positions, budget)
        if policy.heads == "union":
            for h in positions:
                num_kept = policy.budget - protected[h]
                sizes[h] = protected[h] + len({j for ranking in self.rankings(*h, free[h]) for j in ranking[:num_kept]})
        if policy.share == "none":
            return sizes
        for group in {None if policy.share == "all" else layer for layer, _ in positions}:
            members = [h for h in positions if group in (None, h[0])]
            order = sorted((-score, -positions[h][j], h) for h in members for j, score in scores[h].items())
            num_kept = budget * len(members) - sum(protected[h] for h in members)
            kept = [h for _, _, h in order[:num_kept]]
            sizes |= {h: protected[h] + kept.count(h) for h in members}
        return sizes

    def divide_demotion(
        self,
        positions: dict[HeadId, list[int]],
        free: dict[HeadId, list[int]],
        scores: dict[HeadId, dict[int, float]],
        at_prompt_end: bool,
    ) -> None:
        """Set how many tokens each head keeps in 4 bits."""
        policy, num_tokens = self.policy, max(map(len, positions.values()))
        both = min(policy.budget + policy.demote, num_tokens)
        upto = self.divide_budget(positions, free, scores, both)
        for h in positions:
            room = policy.budget + policy.demote - both
            self.heads[h].max_demoted = upto[h] - self.sizes[h] + room if at_prompt_end else policy.demote

    # ---- generation ----------------------------------------------------------------------------------------------

    def forward(self, tokens: list[int], first_position: int) -> Tensor:
        """Compute fresh tokens. Returns the logits [1, V] of the last."""
        self.fresh_positions = torch.arange(first_position, first_position + len(tokens))
        last = torch.tensor([len(tokens) - 1])
        return self.model.program.compute(torch.tensor(tokens), self.fresh_positions, last, self.attend)

    def reread(self, prompt: list[int]) -> None:
        """Compute the prompt's tokens once more after the prompt, a chunk at a time, and delete them."""
        instruction = self.policy.instruction
        size = self.policy.reread_chunk - len(instruction)
        if instruction:  # parts of about the same length
            size = math.ceil(self.prompt_len / math.ceil(self.prompt_len / size))
        for i in range(0, self.prompt_len, size):
            self.forward([*instruction, *prompt[i : i + size]], self.prompt_len)
            for head in self.heads.values():
                head.keep(list(range(self.prompt_len)))

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int, expected_len: int, seed: int) -> list[int]:
        """Return the greedy answer of `num_tokens` tokens, of a request that wants `expected_len`."""
        tokens, policy = list(prompt), self.policy
        self.prompt_len, self.expected_len, self.seed = len(prompt), expected_len, seed
        self.next_eviction = policy.budget + policy.interval - 1  # of a prompt that fits
        fresh = tokens
        if policy.chunk:
            n = policy.chunk + policy.budget  # the first chunk fills the budget, too
            while len(fresh) > n:  # the last chunk is computed below
                first = len(tokens) - len(fresh)
                self.forward(fresh[:n], first)
                self.evict(first + n - 1)
                fresh, n = fresh[n:], policy.chunk
        return self.answer(tokens, fresh, num_tokens)

    @torch.inference_mode()
    def go_on(self, message: list[int], num_tokens: int) -> list[int]:
        """Return the greedy answer to a message that follows the last answer, whose lists are not whole any more."""
        fresh = [self.tokens[-1], *message]
        tokens = [*self.tokens, *message]
        self.prompt_len = len(tokens)
        return self.answer(tokens, fresh, num_tokens)

    def answer(self, tokens: list[int], fresh: list[int], num_tokens: int) -> list[int]:
        """Append a greedy answer to a prompt, of which the last tokens `fresh` are not computed. Returns it."""
        while len(tokens) < self.prompt_len + num_tokens:
            logits = self.forward(fresh, len(tokens) - len(fresh))
            fresh = [int(logits.argmax())]
            if len(tokens) == self.prompt_len and self.policy.name == "reread":
                self.reread(tokens)
            self.evict(len(tokens) - 1)
            tokens += fresh
        self.tokens = tokens
        return tokens[self.prompt_len :]
