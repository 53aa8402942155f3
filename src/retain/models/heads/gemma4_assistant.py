"""Gemma 4's assistant: a few layers with queries alone, which attend to the target's last full and last sliding layer.

It has no cache of its own. Each drafted token has the position of the first one, as in training. The assistants of the
E series divide the vocabulary into clusters, and give logits to the tokens of the best clusters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.files import quote
from retain.kernels import ops
from retain.kernels.ops import HIDDEN_STATES, LOGITS, Attend, Buffer, Operation
from retain.kernels.slots.kv_cache_spec import SharedCacheSpec
from retain.models.decoder import DecoderLayer, ModelSpec
from retain.models.families import gemma4_text
from retain.models.family_config import FamilyConfig, add_defaults
from retain.models.heads import DraftHead, HeadTarget
from retain.models.layers import Embedding, Linear, RMSNorm, copy_row, load_linear, load_lm_head, load_norm
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": False,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "tie_word_embeddings": True,
}


def build(w: Weights, target: HeadTarget) -> DraftHead:
    """Build the assistant of a Gemma 4. Raises ValueError where the target has other sizes, or is no Gemma 4."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    E = target.spec.hidden_size
    if c["backbone_hidden_size"] != E:
        raise ValueError(f"the assistant is for a model with states of {c['backbone_hidden_size']} numbers, not {E}")
    tied = {"tie_word_embeddings": c["tie_word_embeddings"]}
    text = w.with_config(add_defaults(FamilyConfig({**c["text_config"], **tied}), gemma4_text.DEFAULTS))
    types = gemma4_text.read_layer_types(text.config)
    sources = find_sources(target.spec)
    own = len(target.spec.caches)  # layers are further caches, which share those of the target
    shared = tuple(SharedCacheSpec(sources[t]) for t in types)
    spec = gemma4_text.spec_from_config({**text.config, "num_kv_shared_layers": 0})
    spec = replace(spec, caches=(*target.spec.caches, *shared))
    if spec.vocab_size != target.spec.vocab_size:
        raise ValueError(f"the assistant knows {spec.vocab_size} tokens, the target {target.spec.vocab_size}")
    m = text.scope("model.")
    table = m.load_matrix("embed_tokens.weight", embedding=True)
    tied_to = m.full_name("embed_tokens.weight") if c["tie_word_embeddings"] else None
    clusters = ["masked_embedding.centroids"] if c["use_ordered_embeddings"] else []
    ropes = gemma4_text.get_ropes(text.config)
    layers = (gemma4_text.build_layer(m.scope(f"layers.{i}."), i, spec, ropes[t], own + i) for i, t in enumerate(types))
    assistant = Assistant(
        spec,
        target.embedding,
        load_linear(w, "pre_projection", bias=False),
        layers,
        load_norm(m, "norm", text.config["rms_norm_eps"]),
        load_lm_head(w, "lm_head", table, tied_to),
        load_linear(w, "post_projection", *clusters, bias=False),
        target.key_factors,
    )
    num_outputs = assistant.post_projection.weight.shape[0]
    if num_outputs != E and not clusters:
        raise ValueError(f"post_projection gives {num_outputs} numbers, not {E}")
    return DraftHead(assistant.emit(), E, make_restriction(w, spec.vocab_size, num_outputs - E))


def find_sources(spec: ModelSpec) -> dict[str, int]:
    """Return the cache of the target's last layer of each type. Raises ValueError for one without such layers."""
    windows = spec.kv_cache.windows
    last = {"full_attention" if window is None else "sliding_attention": i for i, window in enumerate(windows)}
    if len(last) < 2:
        raise ValueError("an assistant needs a target with full and with sliding layers")
    return {layer_type: spec.kv_cache.source_cache(i) for layer_type, i in last.items()}


@dataclass(frozen=True, eq=False)
class Assistant:
    """The layers of an assistant between a token with a hidden state of the target, and the next token's logits."""

    spec: ModelSpec  # of the assistant; the first caches are the target's
    embedding: Embedding  # the target's
    pre_projection: Linear  # [h, 2 E]
    layers: Iterator[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear
    post_projection: Linear  # [E, h]: the next hidden state; behind it the scores of clusters, if there are some
    key_factors: Mapping[int, Tensor]

    def emit(self) -> Iterator[Operation]:
        """Yield the operations of the assistant. Layers are loaded one after the other."""
        E = self.embedding.table.shape[1]
        token = Buffer("token", E)
        state = Buffer("state", E)
        both = Buffer("token, state", 2 * E)
        x = Buffer("x", self.spec.hidden_size)
        last = Buffer("last", self.spec.hidden_size)
        yield from self.embedding.emit(token)
        yield ops.LoadHiddenStates(state)
        yield copy_row(token, both)
        yield copy_row(state, both, E)
        yield from self.pre_projection.emit(both, x)
        for layer in self.layers:
            for op in layer.emit(x):
                yield from self._attend_to_target(op) if isinstance(op, Attend) else (op,)
        yield ops.GatherRows(x, last)
        yield from self.norm.emit(last, last)
        yield from self.lm_head.emit(last, Buffer(LOGITS, self.spec.vocab_size))
        yield from self.post_projection.emit(last, Buffer(HIDDEN_STATES, self.post_projection.weight.shape[0]))

    def _attend_to_target(self, op: Attend) -> Iterator[Operation]:
        """Yield an attention to the cache of the target, whose keys may be scaled: then queries are scaled back."""
        H, G, _ = op.heads
        cache = self.spec.kv_cache.source_cache(op.cache)
        if (factors := self.key_factors.get(cache)) is not None:
            yield ops.Scale(op.qkv, factors.reciprocal().repeat_interleave(H // G, 0).flatten())
        yield replace(op, cache=cache)


def make_restriction(w: Weights, vocab_size: int, num_scores: int) -> partial[Tensor] | None:
    """Return what keeps the logits of the best clusters' tokens; None where all tokens have logits.

    Raises ValueError unless the clusters, of which `num_scores` have scores, divide the vocabulary.
    """
    c = w.config
    if not c["use_ordered_embeddings"]:
        return None
    num_clusters = c["num_centroids"]
    k = c["centroid_intermediate_top_k"]
    if type(k) is not int or num_clusters != num_scores or not 1 <= k <= num_scores:
        raise ValueError(
            f"the best {quote(k)} of {quote(num_clusters)} clusters are wanted, of which {num_scores} are there"
        )
    tokens = w.checkpoint.read(w.full_name("masked_embedding.token_ordering")).long().clone()  # the file may be closed
    is_complete = torch.equal(tokens.sort()[0], torch.arange(vocab_size))
    if not is_complete or vocab_size % num_clusters:
        raise ValueError("masked_embedding.token_ordering does not divide the vocabulary into clusters")
    return partial(restrict, tokens.view(num_clusters, -1), k)


def restrict(clusters: Tensor, k: int, logits: Tensor, scores: Tensor) -> Tensor:
    """Return logits [N, V] of the tokens in the k clusters with the highest scores [N, clusters]; -inf for others.

    `clusters` int64 [clusters, n] are their tokens.
    """
    chosen = clusters.to(scores.device)[scores.topk(k).indices].flatten(1)  # [N, k n]
    return torch.full_like(logits, -torch.inf).scatter(1, chosen, logits.gather(1, chosen))
