"""Multi-token prediction (MTP): one more layer in the target's own file drafts (DeepSeek-V3, arXiv 2412.19437).

It reads a token and the target's hidden state before it, behind the final norm as vLLM has it. It caches every token,
so its layer is one of the target's caches; embedding and output matrix are the target's, too. A family says by
`MTP_LAYER` that its files may have such a layer. Of several only the first is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from types import ModuleType

from retain.kernels import ops
from retain.kernels.ops import HIDDEN_STATES, LOGITS, Attend, Buffer, Operation, WriteCache
from retain.kernels.slots.kv_cache_spec import DraftHeadSpec, FullAttentionSpec
from retain.models.decoder import Decoder, DecoderLayer
from retain.models.family_config import FamilyConfig, MTPLayer
from retain.models.layers import Embedding, Layer, Linear, RMSNorm, copy_row, load_linear, load_norm
from retain.models.weights import Weights

QWEN_NAMES = {  # beside `mtp.layers.0`, to DeepSeek's in layers.<n>
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
FIRST_LAYER = "layers.0.input_layernorm.weight"


@dataclass(frozen=True, eq=False)
class MTPHead:
    """A layer between a token with the hidden state before it, and the logits of the token behind it."""

    target_norm: RMSNorm
    embedding: Embedding
    embedding_norm: RMSNorm
    state_norm: RMSNorm
    projection: Linear  # [E, 2 E]: of both, normalized
    layer: DecoderLayer
    norm: RMSNorm
    lm_head: Layer
    vocab_size: int
    passes_normed: bool  # whether the next draft reads the state behind `norm`

    restrict = None

    @property
    def hidden_size(self) -> int:
        """Numbers of a state, which is the target's behind its final norm."""
        return self.projection.weight.shape[0]

    def emit_states(self, x: Buffer, states: Buffer) -> Iterator[Operation]:
        """Yield the final norm of the target, of all tokens."""
        yield from self.target_norm.emit(x, states)

    def emit_writes(self, states: Buffer) -> Iterator[Operation]:
        """Yield what a target computes so that all fresh tokens are cached; `states` are the target's of all tokens."""
        x = Buffer("x of the draft head", states.width)
        yield from self._join(ops.LoadHiddenStates(Buffer("state", states.width), states), x)
        yield from until_written(self.layer.emit(x))

    def emit(self) -> Iterator[Operation]:
        """Yield the operations of the head's own program, which computes one token of each request."""
        E = self.hidden_size
        x = Buffer("x", E)
        yield from self._join(ops.LoadHiddenStates(Buffer("state", E)), x)
        yield from self.layer.emit(x)
        last = Buffer("last", E)
        yield from normalize_last(x, last, self.norm, self.passes_normed)
        yield from self.lm_head.emit(last, Buffer(LOGITS, self.vocab_size))

    def _join(self, load: ops.LoadHiddenStates, x: Buffer) -> Iterator[Operation]:
        """Yield what makes the layer's input of the tokens and the states before them."""
        E = x.width
        token = Buffer("token", E)
        both = Buffer("token, state", 2 * E)
        yield from self.embedding.emit(token)
        yield load
        yield from self.embedding_norm.emit(token, token)
        yield from self.state_norm.emit(load.out, load.out)
        yield copy_row(token, both)
        yield copy_row(load.out, both, E)
        yield from self.projection.emit(both, x)


def normalize_last(x: Buffer, last: Buffer, norm: RMSNorm, passes_normed: bool) -> Iterator[Operation]:
    """Yield what normalizes the last row of each request, and gives it as the next state: before or behind that."""
    next_state = Buffer(HIDDEN_STATES, x.width)
    yield ops.GatherRows(x, last)
    if not passes_normed:
        yield copy_row(last, next_state)
    yield from norm.emit(last, last)
    if passes_normed:
        yield copy_row(last, next_state)


def until_written(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations of a layer up to its attention, and in its place one that only writes k and v."""
    for op in operations:
        if isinstance(op, Attend):
            yield WriteCache(op.qkv, op.cache, op.heads, op.rope)
            return
        yield op


def extend(w: Weights, family: ModuleType) -> Weights:
    """Return the weights of a model whose config has the MTP layer as its last. Raises ValueError without one."""
    layer: MTPLayer | None = getattr(family, "MTP_LAYER", None)
    if layer is None:
        raise ValueError(f"mtp: a {w.config['model_type']} model has no MTP layer")
    extended = w.with_config(FamilyConfig({**w.config, **layer.add_layer(w.config)}))
    extended = extended.with_aliases(name_as_layer(w.names(), layer.number(w.config)))
    if not find_layer(extended.names(), layer.number(w.config)):
        raise ValueError("mtp: the model's file has no MTP layer")
    return extended


def name_as_layer(names: Set[str], number: int) -> dict[str, str]:
    """Return the names that Qwen's `mtp.*` have as those of a layer: their names in the file, by the others."""
    own = {name for name in names if name.startswith("mtp.")}
    first = next((name for name in names - own if name.endswith(FIRST_LAYER)), FIRST_LAYER)
    prefix = f"{first.removesuffix(FIRST_LAYER)}layers.{number}."
    aliases = {}
    for name in own:
        stem, _, leaf = name.rpartition(".")
        if name.startswith("mtp.layers.0."):
            aliases[prefix + name.removeprefix("mtp.layers.0.")] = name
        elif stem in QWEN_NAMES:
            aliases[f"{prefix}{QWEN_NAMES[stem]}.{leaf}"] = name
    return aliases


def find_layer(names: Set[str], number: int) -> str:
    """Return the prefix of the MTP layer's tensors; "" where there are none."""
    end = f"layers.{number}.eh_proj.weight"
    return next((name.removesuffix("eh_proj.weight") for name in names if name.endswith(end)), "")


def split(decoder: Decoder, w: Weights, family: ModuleType) -> tuple[Decoder, MTPHead]:
    """Return the model of extended weights without its last layer, and the MTP head, whose cache is the last one."""
    described: MTPLayer = family.MTP_LAYER
    s = decoder.spec
    number = s.num_layers - 1
    last = s.caches[-1]
    if not isinstance(last, FullAttentionSpec) or not isinstance(decoder.norm, RMSNorm):
        raise ValueError("mtp: the MTP layer has no full attention")
    prefix = find_layer(w.names(), number)
    base = prefix.removesuffix(f"layers.{number}.")
    own = w.scope(prefix)
    eps = decoder.norm.eps
    norms = [load_norm(own, n, eps, described.norm_offset) for n in ("enorm", "hnorm", "shared_head.norm")]
    embedding = f"{base}embed_tokens.weight"
    shared_head = "lm_head.weight" if "lm_head.weight" in w else embedding
    table = load_unless_shared(w, f"{prefix}embed_tokens.weight", embedding)
    lm_head = load_unless_shared(w, f"{prefix}shared_head.head.weight", shared_head)
    head = MTPHead(
        target_norm=decoder.norm,
        embedding=replace(decoder.token_embedding, table=table.weight) if table else decoder.token_embedding,
        embedding_norm=norms[0],
        state_norm=norms[1],
        projection=load_linear(own, "eh_proj", bias=False),
        layer=decoder.load_layer(number),
        norm=norms[2],
        lm_head=lm_head or decoder.lm_head,
        vocab_size=s.vocab_size,
        passes_normed=described.passes_normed,
    )
    caches = (*s.caches[:-1], DraftHeadSpec(last.num_kv_heads, last.k_dim, last.v_dim))
    return replace(decoder, spec=replace(s, caches=caches), num_layers=number), head


def load_unless_shared(w: Weights, name: str, shared: str) -> Linear | None:
    """Load a matrix of the MTP layer's own; None where the file has none, or the target's once more."""
    if name not in w or (shared in w and w.equal(name, shared)):
        return None
    return Linear(w.load_matrix(name, embedding=True))
