"""What a policy sees of a prompt's queries in a running engine is what the model, written out, has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain import kernels
from retain.fit.dense import DenseModel, LayerAttention
from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.kv.checkpoints.masses import read_masses
from retain.models.weights import Weights
from tests.helpers.engines import iter_steps, make_engine, make_request
from tests.helpers.tiny_models import tiny_checkpoint

BACKENDS = [n for n in ("cpu", "reference", "triton") if kernels.import_backend(n).unavailable_reason() is None]
CASES = [  # the interpreter of Triton takes seconds: one family shows that the queries are there
    pytest.param(family, backend, marks=[] if family in ("llama", "qwen2") else pytest.mark.slow)
    for family in ("llama", "qwen2", "mpt", "gemma3_text", "gpt2", "phi3", "cohere2")
    for backend in BACKENDS
    if backend != "triton" or family == "llama"
]
PROMPT = [11 * i * i % 127 for i in range(60)]
BLOCK = 25


class RecordingModel(DenseModel):
    """A model that keeps the queries of each layer, [T, H, D], with keys and values."""

    def __init__(self, family: str):
        super().__init__(Weights(tiny_checkpoint(family), torch.float32))
        self.found: dict[int, tuple[Tensor, Tensor, Tensor, AttentionParams]] = {}

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams
    ) -> LayerAttention:
        self.found[layer] = q, k, v, params
        return super()._attend(layer, q, k, v, mask, params)


def changes_behind(model: RecordingModel, layer: int, begin: int, end: int) -> Tensor:
    """Return how far outputs move without each of the first `end` tokens, [G, end], of queries moved to that place.

    NaN where a token is all that a query sees, nearly: then it is a matter of rounding.
    """
    q, k, v, params = model.found[layer]
    rope = model.decoder.attention[layer].rope
    q = q[begin:end].transpose(0, 1)  # [H, n, D]
    if rope:
        steps = end - torch.arange(begin, end)
        q = torch.stack([rope.shift(heads, steps) for heads in q])
    G, R = len(k), len(q) // len(k)
    total = torch.zeros(G, end)
    for h, queries in enumerate(q):
        g = h // R
        distance = torch.arange(end) - end
        x = adjust_scores((params.scale * queries @ k[g, :end].T)[None], distance[None], params, slice(h, h + 1))[0]
        sink = None if params.sink_logits is None else params.sink_logits[h].view(1, 1)
        weights = softmax(x, sink)
        total[g] += torch.where((weights > 0.99).any(0), torch.nan, 0)
        output = weights @ v[g, :end]
        for i in range(end):
            without = x.clone()
            without[:, i] = -torch.inf
            total[g, i] += (softmax(without, sink) @ v[g, :end] - output).square().sum()
    return total


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_blocks_of_a_running_request_are_scored_as_in_the_model_written_out(family: str, backend: str) -> None:
    """With biases of keys, which the cache leaves out, and factors; in chunks, beside another request."""
    model = RecordingModel(family)
    model.forward(PROMPT)
    engine = make_engine(family, backend=backend, max_batched_tokens=17)
    request = make_request(PROMPT, 4, f"replay:budget=500,block={BLOCK}")
    engine.add(make_request(PROMPT[::-1], 30, "h2o:budget=40"), request)
    next(step for step in iter_steps(engine) if request.num_output_tokens)
    (row,) = (row for row in engine.cache.rows.values() if row.policy is request.policy)
    layers = [tables.layers[tables.full_layers(row.index)] for tables in row.groups]
    for caches, masses in zip(layers, read_masses(row.groups, row.index, len(PROMPT)), strict=True):
        for cache, found in zip(caches.tolist(), masses, strict=True):
            wanted = torch.zeros(len(found), len(PROMPT))
            for begin in range(0, len(PROMPT), BLOCK):
                end = min(begin + BLOCK, len(PROMPT))
                wanted[:, :end] += changes_behind(model, cache, begin, end)
            by_position = found.sum(2).flatten(1)[:, : len(PROMPT)]  # nothing was evicted
            is_known = ~wanted.isnan()
            assert is_known.float().mean() > 0.5
            torch.testing.assert_close(by_position[is_known], wanted[is_known], rtol=2e-3, atol=1e-5)
