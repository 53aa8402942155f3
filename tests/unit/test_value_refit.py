"""Fitted values: attention over what is kept gives what attention over everything gave, as far as it can."""

from __future__ import annotations

import pytest
import torch

from retain.kernels.attention_params import AttentionParams
from retain.kv.eviction import policies
from retain.kv.eviction.value_refit import PENALTY, fit_values, solve_ridge
from retain.kv.eviction.view import BlockQueries, CacheView
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of

G, R, N, S, D, V = 2, 3, 40, 50, 8, 6


def make_view(sinks: bool) -> CacheView:
    torch.manual_seed(0)
    pos = torch.stack([torch.randperm(S).int() for _ in range(G)])
    pos = torch.where(pos < N, pos, -1)
    k = torch.randn(1, G, S, D)
    v = torch.randn(1, G, S, V)
    params = AttentionParams(0.5, sink_logits=torch.randn(G * R) if sinks else None)
    queries = BlockQueries(torch.randn(G, R, 12, D), torch.arange(N - 12, N), params, None)
    return CacheView(pos[None], torch.zeros(1, G, 1, S), N - 1, lambda: (k, v), queries=queries)


@pytest.mark.parametrize("num_kept", [5, 20, 39])
def test_fitted_values_are_the_ridge_regression_of_what_is_missing(num_kept: int) -> None:
    """By plain tensors, of a softmax over the kept slots alone; more kept slots than queries, or fewer."""
    view = make_view(sinks=False)
    assert view.queries
    kept = torch.stack([torch.nonzero(view.pos[0, g] >= 0)[:num_kept, 0] for g in range(G)])
    found = fit_values(view, kept, torch.ones_like(kept, dtype=torch.bool))
    for g in range(G):
        q = view.queries.rotated[g].flatten(0, 1)
        used = view.pos[0, g] >= 0
        x = (0.5 * q @ view.keys[0, g, kept[g]].T).softmax(-1)
        y = (0.5 * q @ view.keys[0, g, used].T).softmax(-1) @ view.values[0, g, used]
        v = view.values[0, g, kept[g]]
        penalty = PENALTY * x.square().sum() / num_kept
        wanted = v + torch.linalg.solve(x.T @ x + penalty * torch.eye(num_kept), x.T @ (y - x @ v))
        torch.testing.assert_close(found[g], wanted, rtol=1e-3, atol=1e-4)
        assert (x @ found[g] - y).square().sum() < (x @ v - y).square().sum()


@pytest.mark.parametrize("sinks", [False, True])
def test_values_stay_where_everything_is_kept(sinks: bool) -> None:
    view = make_view(sinks)
    kept = torch.stack([torch.nonzero(view.pos[0, g] >= 0)[:, 0] for g in range(G)])
    found = fit_values(view, kept, torch.ones_like(kept, dtype=torch.bool))
    torch.testing.assert_close(found, view.values[0].gather(1, kept[..., None].expand(-1, -1, V)))


def test_both_systems_have_one_solution() -> None:
    x = torch.randn(9, 30)
    y = torch.randn(9, V)
    wide = solve_ridge(x, y)
    penalty = PENALTY * x.square().sum() / 30
    torch.testing.assert_close(
        wide, torch.linalg.solve(x.T @ x + penalty * torch.eye(30), x.T @ y), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "spec",
    ["h2o:budget=9,refit=8", "h2o:budget=9,refit=8,resume=off,demote=int4", "replay:budget=9,demote=int4"],
)
def test_values_are_fitted_once_to_all_that_is_kept(spec: str) -> None:
    with pytest.raises(ValueError, match="refit goes with resume=off"):
        policies.parse(spec)


@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_only_values_of_what_is_kept_change(family: str, kv_dtype: torch.dtype | None) -> None:
    """The same slots have the same keys, positions and masses. Outputs of the newest queries come nearer."""
    found = []
    for refit in (0, 30):
        engine = make_engine(family, backend="cpu", kv_dtype=kv_dtype, max_batched_tokens=50)
        request = make_request([7 * i % 97 for i in range(120)], 9, f"replay:budget=30,refit={refit}")
        engine.add(request)
        next(step for step in iter_steps(engine) if request.num_output_tokens)
        row = row_of(engine, request)
        (tables,) = (e.tables for e in row.evictors)
        pages = torch.from_numpy(tables.pages[row.index, tables.full_layers(row.index)]).long()
        slots = pages[..., None] * tables.page_size + torch.arange(tables.page_size)
        k, v = tables.store.read(slots.flatten())
        is_used = tables.kv.pos[pages].flatten() >= 0
        found.append((k[is_used], v[is_used], tables.kv.pos[pages], tables.kv.mass[pages]))
    (k, v, pos, mass), (other_k, other_v, other_pos, other_mass) = found
    assert torch.equal(pos, other_pos) and torch.equal(mass, other_mass)
    torch.testing.assert_close(k, other_k, rtol=1e-5, atol=1e-5)
    assert (v - other_v).abs().amax() > 0.01
