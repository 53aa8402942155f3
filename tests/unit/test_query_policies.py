"""Policies that score a prompt by its queries: each is what its author's formula gives, from plain tensors."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.gate_weights import Gate, GateWeights
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.query_blocks import QueryBlocks
from retain.kv.eviction.query_scored import QueryScoredPolicy
from retain.kv.eviction.view import BlockQueries, CacheView, KeyTransform
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of

G, R, N, D, V = 2, 3, 60, 8, 10
ROPE = Rope(torch.tensor([1.0, 0.3, 0.1, 0.02]))
SCALE = 0.4
TABLES: Any = SimpleNamespace(layers=np.array([4, 7]))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A layer's prompt: unrotated queries [G, R, N, D], unrotated keys and values [G, N, D or V]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def rotated_q(self) -> Tensor:
        return torch.stack([rotate(heads, torch.arange(N)) for heads in self.q.flatten(0, 1)]).view_as(self.q)

    @property
    def rotated_k(self) -> Tensor:
        return torch.stack([rotate(keys, torch.arange(N)) for keys in self.k])


@pytest.fixture
def prompt() -> Prompt:
    torch.manual_seed(0)
    return Prompt(torch.randn(G, R, N, D) + 0.5, torch.randn(G, N, D), torch.randn(G, N, V))


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Rotate vectors [n, D] by positions [n], pair by pair: numbers i and i + D / 2 are a pair."""
    a, b = x.chunk(2, -1)
    angles = pos[:, None] * ROPE.freqs
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def view_of(prompt: Prompt, block: range, mass: Tensor | None = None) -> tuple[CacheView, Tensor]:
    """Return a view of slots in which the tokens up to a block's end lie in any order between holes, and their order.

    `order` [G, S] are the positions in the slots, -1 in holes.
    """
    order = torch.stack([torch.randperm(block.stop + 4) for _ in range(G)])
    order = torch.where(order < block.stop, order, -1)
    places = order.clamp(min=0)[..., None]
    k, v = prompt.rotated_k, prompt.v
    keys = k.gather(1, places.expand(-1, -1, D)).where(order[..., None] >= 0, 9.0)
    values = v.gather(1, places.expand(-1, -1, V)).where(order[..., None] >= 0, 9.0)
    found = torch.zeros(G, N) if mass is None else mass
    queries = BlockQueries(
        prompt.rotated_q[:, :, block.start : block.stop],
        torch.arange(block.start, block.stop),
        AttentionParams(SCALE),
        ROPE,
    )
    view = CacheView(
        order[None].int(),
        found.gather(1, places[..., 0]).where(order >= 0, 0)[None, :, None],
        block.stop - 1,
        lambda: (keys[None], values[None]),
        queries=queries,
    )
    return view, order


def score_prompt(policy: EvictionPolicy, prompt: Prompt) -> Tensor:
    """Return the masses of a prompt's tokens [G, N] when all blocks are scored, one after the other."""
    mass = torch.zeros(G, N)
    for block in policy.query_blocks:
        view, order = view_of(prompt, block, mass)
        added = policy.score_queries(view).sum(1)
        assert (added[order < 0] == 0).all()
        mass = mass.scatter_add(1, order.clamp(min=0), added.where(order >= 0, 0))
    return mass


def softmax_of(prompt: Prompt, q: Tensor, pos: Tensor, left_out: int | None = None, end: int = N) -> Tensor:
    """Return the outputs [G, R, n, V] of rotated queries at positions [n], perhaps without a token."""
    x = SCALE * q @ prompt.rotated_k[:, None, :end].transpose(-1, -2)
    x = x.masked_fill(torch.arange(end) > pos[:, None], -math.inf)
    if left_out is not None:
        x[..., left_out] = -math.inf
    return x.softmax(-1).nan_to_num(0) @ prompt.v[:, None, :end]


def changes_without(prompt: Prompt, q: Tensor, pos: Tensor, end: int = N) -> Tensor:
    """Return how far outputs move when a token is left out, squared and summed over queries and heads, [G, end]."""
    output = softmax_of(prompt, q, pos, end=end)
    moved = [softmax_of(prompt, q, pos, left_out=i, end=end) - output for i in range(end)]
    return torch.stack([m.square().sum((1, 2, 3)) for m in moved], -1)


def resolved(spec: str) -> QueryScoredPolicy:
    policy = policies.parse(spec).resolve(N)
    assert isinstance(policy, QueryScoredPolicy)
    return policy


@pytest.mark.parametrize("block", [100, 60, 23])
def test_replay_scores_what_outputs_behind_the_block_lose_without_a_token(prompt: Prompt, block: int) -> None:
    policy = resolved(f"replay:budget=20,block={block}")
    wanted = torch.zeros(G, N)
    for begin in range(0, N, block):
        end = min(begin + block, N)
        behind = torch.full((end - begin,), end)
        moved = torch.stack([rotate(q, behind) for q in prompt.q[:, :, begin:end].flatten(0, 1)])
        wanted[:, :end] += changes_without(prompt, moved.view(G, R, -1, D), behind, end)
    torch.testing.assert_close(score_prompt(policy, prompt), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("steps", [[60], [1] * 60, [30, 30], [50, 3, 7]])
def test_the_newest_queries_are_held_for_the_eviction(steps: list[int]) -> None:
    """However the prompt is divided; a fork takes them over, and a row that begins behind their first does not."""
    policy = resolved("replay:budget=20,refit=25")
    q = torch.randn(N, 4, D)
    blocks = QueryBlocks(policy, TABLES, np.array([1]), KeyTransform())
    position = 0
    for n in steps:
        assert blocks.wants(range(position, position + n))
        blocks.add(7, position, q[position : position + n])
        position += n
    assert torch.equal(blocks.newest.by_cache[7], q[-25:])
    fork = QueryBlocks(policy, TABLES, np.array([1]), KeyTransform())
    assert not fork.share_newest(None, N) and fork.share_newest(None, N - 25)
    assert fork.share_newest(blocks, N) and torch.equal(fork.newest.by_cache[7], q[-25:])
    other = QueryBlocks(resolved("replay:budget=20,refit=24"), TABLES, np.array([1]), KeyTransform())
    assert not other.share_newest(blocks, N)


@pytest.mark.parametrize("block", [100, 60, 23])
def test_gate_replay_scores_squared_weights_behind_the_block(prompt: Prompt, block: int) -> None:
    policy = policies.parse(f"gate_replay:budget=20,block={block}").resolve(N)
    wanted = torch.zeros(G, N)
    for begin in range(0, N, block):
        end = min(begin + block, N)
        moved = torch.stack(
            [rotate(q, torch.full((end - begin,), end)) for q in prompt.q[:, :, begin:end].flatten(0, 1)]
        )
        weights = (SCALE * moved.view(G, R, -1, D) @ prompt.rotated_k[:, None, :end].transpose(-1, -2)).softmax(-1)
        wanted[:, :end] += weights.square().sum((1, 2))
    torch.testing.assert_close(score_prompt(policy, prompt), wanted, rtol=1e-4, atol=1e-6)


def test_gate_replay_divides_a_mass_by_the_queries_that_saw_the_slot() -> None:
    """All of the slot's own block and of later ones, and of the answer; behind the prompt those from its own on."""
    block, end = 25, N + 9
    none = torch.zeros(1, 1, 1)
    weights = GateWeights(none, none, torch.tensor([[[0.0, 0, 0, 1, 0]]]), torch.zeros(1, 1))
    resolved = policies.parse(f"gate_replay:budget=20,block={block}").resolve(N)
    policy = resolved.fit(10 * N, lambda file: Gate(weights, weights))
    pos = torch.randperm(end).int().view(1, 1, -1)
    saw = torch.tensor([end - (p // block * block if p < N else p) for p in pos.flatten().tolist()])
    view = CacheView(
        pos, 0.5 * saw.view(1, 1, 1, -1), end - 1, lambda: (none, none), slot_scores=torch.zeros(1, 1, end)
    )
    assert isinstance(policy, BudgetPolicy)
    torch.testing.assert_close(policy.priority(view), torch.full((1, 1, end), math.log(0.5)))


def test_queries_of_a_shared_cache_are_those_of_the_layer_that_writes_into_it() -> None:
    policy = resolved("replay:budget=20,block=30")
    blocks = QueryBlocks(policy, TABLES, np.array([1]), KeyTransform())
    first, second, other = torch.randn(3, 20, 4, D)
    for position, q in ((0, first), (20, second)):
        blocks.add(7, position, q)
        blocks.add(7, position, q + 1)  # of a layer that only reads the cache
        blocks.add(4, position, other)
    (block,) = (x for x in blocks._blocks if x.positions == range(30))
    assert torch.equal(block.by_cache[7], torch.cat((first, second[:10])))
    assert list(block.by_cache) == [7]


@pytest.mark.parametrize("queries", [1000, 20])
def test_expected_is_the_expected_attention_of_normal_queries_at_the_next_positions(
    prompt: Prompt, queries: int
) -> None:
    policy = resolved(f"expected:budget=20,queries={queries},future=50")
    q = prompt.q[:, :, max(4, N - queries) :]
    mean = q.mean(2)
    deviation = q - mean[:, :, None]
    covariance = torch.einsum("grni,grnj->grij", deviation, deviation) / q.shape[2]
    columns = [rotate(unit.expand(50, D), torch.arange(N, N + 50)).mean(0) for unit in torch.eye(D)]
    R_mean = torch.stack(columns, 1)  # maps a column vector to its mean rotation
    mean = torch.einsum("ij,grj->gri", R_mean, mean)
    covariance = torch.einsum("ij,grjk,lk->gril", R_mean, covariance, R_mean)
    k = prompt.rotated_k[:, 4:]
    x = SCALE * torch.einsum("gri,gni->grn", mean, k)
    x = x + SCALE**2 / 2 * torch.einsum("gni,grij,gnj->grn", k, covariance, k)
    wanted = x.softmax(-1).mean(1) * prompt.v[:, 4:].norm(dim=-1)
    found = score_prompt(policy, prompt)
    assert (found[:, :4] == 0).all()
    torch.testing.assert_close(found[:, 4:], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pool", [1, 7])
def test_dropkv_scores_what_the_last_outputs_lose_without_a_token(prompt: Prompt, pool: int) -> None:
    policy = resolved(f"dropkv:budget=20,queries=9,pool={pool}")
    pos = torch.arange(N - 9, N)
    change = changes_without(prompt, prompt.rotated_q[:, :, -9:], pos)
    padded = torch.nn.functional.pad(change, (pool // 2, pool // 2))
    wanted = padded.unfold(-1, pool, 1).mean(-1)
    torch.testing.assert_close(score_prompt(policy, prompt), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk", [256, 26, 13])
def test_compactor_blends_leverage_and_attention_inside_chunks(prompt: Prompt, chunk: int) -> None:
    policy = resolved(f"compactor:budget=15,block={chunk},sketch=5")
    attention = torch.zeros(G, N - 8)
    q = prompt.rotated_q[:, :, 8:]
    k = prompt.rotated_k[:, 8:]
    for begin in range(0, N - 8, chunk):
        part = slice(begin, begin + chunk)
        attention[:, part] = (q[:, :, part] @ k[:, None, part].transpose(-1, -2)).softmax(-1).sum(2).mean(1)
    attention = torch.nn.functional.pad(attention * prompt.v[:, 8:].norm(dim=-1), (1, 1)).unfold(-1, 3, 1).mean(-1)
    keys = prompt.k[:, 8:]
    sketch = torch.randn(G, D, 5, generator=torch.Generator().manual_seed(0)) / math.sqrt(5)
    x = (keys - keys.mean(1, keepdim=True)) @ sketch
    inverse = torch.linalg.inv(x.transpose(1, 2) @ x + 0.01 * torch.eye(5))
    leverage = torch.einsum("gni,gij,gnj->gn", x, inverse, x)
    blended = 0.75 * (leverage - leverage.mean()) / leverage.std() + (attention - attention.mean()) / attention.std()
    found = score_prompt(policy, prompt)
    assert (found[:, :8] == 0).all()
    torch.testing.assert_close(found[:, 8:], blended - blended.min(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["replay", "expected", "compactor", "dropkv"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 9])
def test_prompts_of_few_tokens_have_finite_scores(prompt: Prompt, name: str, num_tokens: int) -> None:
    """Shorter than the sinks, too, and where a layer has one kv head."""
    policy = policies.parse(f"{name}:budget=20").resolve(num_tokens)
    assert isinstance(policy, QueryScoredPolicy)
    for block in policy.query_blocks:
        view, _ = view_of(prompt, block)
        assert view.queries
        queries = dataclasses.replace(view.queries, rotated=view.queries.rotated[:1])
        keys, values = view.read_kv()
        single = CacheView(
            view.pos[:, :1],
            view.mass[:, :1],
            view.query_position,
            lambda kv=(keys[:, :1], values[:, :1]): kv,
            queries=queries,
        )
        for each in (view, single):
            assert policy.score_queries(each).isfinite().all()


@pytest.mark.parametrize("name", ["replay", "expected", "compactor", "dropkv"])
@pytest.mark.parametrize("option", ["heads=query", "heads=union", "scope=shared"])
def test_options_that_leave_no_score_of_a_kv_head_are_refused(name: str, option: str) -> None:
    with pytest.raises(ValueError, match="scores are of a kv head"):
        policies.parse(f"{name}:budget=20,share=none,{option}")


@pytest.mark.parametrize("name", ["replay", "expected", "compactor", "dropkv"])
def test_scores_are_of_the_prompt_alone_where_the_budget_holds_all_of_it(name: str) -> None:
    """What the answer attends to before the first eviction counts as the answer's."""
    engine = make_engine("llama", backend="cpu")
    request = make_request(range(3, 43), 30, f"{name}:budget=50,interval=4")
    engine.add(request)
    next(step for step in iter_steps(engine) if request.num_output_tokens == 1)
    (evictor,) = row_of(engine, request).evictors
    scores, pos = evictor.slot_scores.get_state()
    assert (pos[..., :40] >= 0).all()
    at_first = scores[..., :40].clone()
    next(step for step in iter_steps(engine) if request.num_output_tokens == 12)
    assert torch.equal(evictor.slot_scores.get_state()[0][..., :40], at_first)
    assert at_first.any()
