"""The operations of a program: a model is a stream of them, and a backend lowers each to what it runs.

An operation reads and writes buffers. A buffer is rows of numbers, one row for each fresh token of a step; layers share
buffers by name. With `add` an operation adds its result to `out` instead of replacing it. What an operation computes is
defined by its docstring and by reference/operations.py. A new operation is a class here, its definition there, and
what other backends lower it to (docs/design/programs.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import TILE_ROWS, Experts
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.ranks import ProcessGroup
from retain.kernels.rope import Rope
from retain.kernels.weights.weight import Weight

LOGITS = "logits"  # the name of the buffer that a program returns
HIDDEN_STATES = "hidden states"  # the name of one that it gives beside them, if some operation writes it
# In C++ and Triton they are numbers, in this order. The last one exists only with gates.
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", "sigmoid", "relu2", "swiglu_oai")


class WidthError(ValueError):
    """Raised where the tensors of a model do not fit the buffers of its program."""


@dataclass(frozen=True)
class Buffer:
    """Rows of `width` numbers, one for each fresh token. Equal names are the same memory."""

    name: str
    width: int


class Operation:
    """A step of a program: it replaces the rows of `out`, or a part of their columns, or adds to them."""

    out: Buffer

    def check(self) -> None:
        """Raise WidthError or ValueError unless tensors and buffers fit each other."""


@dataclass(frozen=True, eq=False)
class Embed(Operation):
    """Set out = factor * table[input_id - first].

    With `first`, even 0, the table may be a part of the vocabulary: rows of tokens that are not in it become 0.
    """

    out: Buffer
    table: Weight  # [V, out]
    factor: float = 1.0
    first: int | None = None

    def check(self) -> None:
        """Raise WidthError for a table of other rows."""
        check_equal("a row of the embedding", self.table.shape[1], self.out.width)


@dataclass(frozen=True, eq=False)
class EmbedPosition(Operation):
    """Add table[position + offset] to out. Padding tokens have position -1."""

    out: Buffer
    table: Tensor  # [offset + context, out]
    offset: int = 0

    def check(self) -> None:
        """Raise WidthError for a table of other rows."""
        check_equal("a row of the embedding", self.table.shape[1], self.out.width)


@dataclass(frozen=True, eq=False)
class Norm(Operation):
    """Set out = normalized(x) * weight + bias: LayerNorm with `subtract_mean` (arXiv 1607.06450), else RMSNorm.

    RMSNorm (arXiv 1910.07467) is computed in float32. A weight [heads, n] normalizes each of `heads` groups of n
    numbers separately, from number `first` on.
    """

    x: Buffer
    out: Buffer
    weight: Tensor  # [n], or [heads, n]
    bias: Tensor | None  # [n]
    eps: float
    subtract_mean: bool
    add: bool = False
    first: int = 0

    @property
    def is_by_head(self) -> bool:
        """Whether each head has its own weights."""
        return self.weight.dim() == 2

    @property
    def heads(self) -> int:
        """The number of groups that are normalized separately."""
        return self.weight.shape[0] if self.is_by_head else 1

    def check(self) -> None:
        """Raise WidthError for weights that do not fit the buffers."""
        n = self.weight.shape[-1]
        size = self.heads * n
        if self.weight.dim() > 2 or self.first < 0:
            raise WidthError(f"a norm has weights of shape {list(self.weight.shape)} from number {self.first} on")
        if not self.is_by_head:
            check_equal("the weight of a norm", n, self.x.width, self.out.width)
        elif self.first + size > min(self.x.width, self.out.width):
            raise WidthError(f"a norm of {self.heads} heads of {n} does not fit a buffer of width {self.x.width}")
        elif self.x != self.out and size < self.out.width:  # the other columns would be those of another layer
            raise WidthError(f"a norm of {self.heads} heads of {n} writes a part of a buffer of width {self.out.width}")
        check_equal("the bias of a norm", n if self.bias is None else self.bias.numel(), n)


@dataclass(frozen=True, eq=False)
class NamedRows:
    """Rows of a matrix of a checkpoint: all of its `total` in order, or those of numbers `index` [num_rows]."""

    name: str  # of its layer: without `.weight`
    total: int
    index: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Return how many rows these are."""
        return self.total if self.index is None else len(self.index)

    def select(self, index: Tensor) -> NamedRows:
        """Return those of these rows that have the places of an index, int64 [n]."""
        return NamedRows(self.name, self.total, index if self.index is None else self.index[index])


@dataclass(frozen=True, eq=False)
class MatMul(Operation):
    """Set out = x weight^T + bias. Parts of a stack of matrices keep their kinds.

    `rows` says what the checkpoint calls them, where a linear layer has them as they are there. No backend reads it.
    """

    x: Buffer
    out: Buffer
    weight: Weight  # [out, x]
    bias: Tensor | None = None  # [out]
    add: bool = False
    rows: tuple[NamedRows, ...] = ()

    def check(self) -> None:
        """Raise WidthError for a matrix or a bias of another shape."""
        rows, columns = self.weight.shape
        check_equal("the input of a linear layer", columns, self.x.width)
        num_biases = rows if self.bias is None else self.bias.numel()
        check_equal("the output of a linear layer", rows, self.out.width, num_biases)


@dataclass(frozen=True, eq=False)
class LowRank(Operation):
    """Add to out, from column `first` on, what the adapter i of each token says: (x a[i]^T) b[i] (arXiv 2106.09685).

    `Batch.adapters` says which; tokens without one change nothing. Rows of a[i] and b[i] from ranks[i] on do not count.
    The tensors are read at every step, where they are: on the program's device.
    """

    x: Buffer
    out: Buffer
    a: Tensor  # [n, rank, x]
    b: Tensor  # [n, rank, columns]
    ranks: Tensor  # int32 [n]
    first: int = 0

    def check(self) -> None:
        """Raise WidthError for tensors that do not fit the buffers."""
        n, rank, width = self.a.shape
        check_equal("the input of an adapter", width, self.x.width)
        check_equal("the rank of an adapter", rank, self.b.shape[1])
        check_equal("the number of adapters", n, len(self.b), len(self.ranks))
        if self.first < 0 or self.first + self.b.shape[2] > self.out.width:
            raise WidthError(f"an adapter of {self.b.shape[2]} columns does not fit a buffer of width {self.out.width}")


@dataclass(frozen=True, eq=False)
class HeadMatMul(Operation):
    """Set the target columns of each head in out = its source columns of x, times its own matrix.

    The matrices [target width, source width] lie one below the other.
    """

    x: Buffer
    out: Buffer
    weight: Weight  # [H target width, source width]
    source: HeadColumns
    target: HeadColumns

    def check(self) -> None:
        """Raise WidthError for columns or matrices that do not fit."""
        rows, width = self.weight.shape
        check_columns(self.x, self.source)
        check_columns(self.out, self.target)
        check_equal("the heads of a linear layer", self.source.num_heads, self.target.num_heads)
        check_equal("the input of a head", width, self.source.width)
        check_equal("the outputs of all heads", rows, self.target.num_heads * self.target.width)
        n = self.target.width
        if n % TILE_ROWS:
            raise WidthError(f"a linear layer of each head has {n} outputs, not a multiple of {TILE_ROWS}")


@dataclass(frozen=True, eq=False)
class CopyColumns(Operation):
    """Copy the columns of heads to another buffer.

    A program must write the other columns of that buffer, too, before it reads them: they hold any numbers until then,
    as of an earlier step.
    """

    x: Buffer
    out: Buffer
    source: HeadColumns
    target: HeadColumns

    def check(self) -> None:
        """Raise WidthError for columns that do not fit."""
        check_columns(self.x, self.source)
        check_columns(self.out, self.target)
        check_equal("the copied heads", self.source.num_heads, self.target.num_heads)
        check_equal("the copied columns of a head", self.source.width, self.target.width)


@dataclass(frozen=True, eq=False)
class Activate(Operation):
    """Set out = act(x[:n]), times x[n : 2 n] if `gated`; `act` is one of ACTIVATIONS, and n the width of out.

    "relu2" is relu(x)^2. "swiglu_oai" is that of gpt-oss, where g = min(x[:n], 7) and u = x[n : 2 n] in [-7, 7]:
    g sigmoid(1.702 g) (u + 1).
    """

    x: Buffer
    out: Buffer
    act: str
    gated: bool = False

    def check(self) -> None:
        """Raise WidthError for buffers of other widths, and ValueError for an activation that needs gates."""
        if self.act == "swiglu_oai" and not self.gated:
            raise ValueError(f"the activation {self.act} needs gates")
        check_equal("an activation", self.x.width // (2 if self.gated else 1), self.out.width)


@dataclass(frozen=True, eq=False)
class MixExperts(Operation):
    """Set out = the weighted sum of the experts that the router chooses by `scores`; see kernels/experts.py."""

    x: Buffer
    scores: Buffer
    out: Buffer
    experts: Experts
    add: bool = False

    def check(self) -> None:
        """Raise WidthError for matrices of other shapes, for sizes that no backend packs, and for the router's."""
        e = self.experts
        n = e.num_experts
        E = self.out.width
        inner = e.inner_size
        check_equal("the input of experts", e.hidden_size, self.x.width, E)
        if not 0 <= e.first <= self.scores.width - n:
            raise WidthError(f"{n} experts from number {e.first} on are not among {self.scores.width} scores")
        check_equal("the gates of experts", e.gate_up.shape[0], n * inner)
        check_equal("the output of experts", e.down.shape[0], n * E)
        for name, numbers, size in (
            ("a bias of experts", e.gate_up_bias, n * inner),
            ("a bias of experts", e.down_bias, n * E),
            ("the bias of a router", e.router.bias, self.scores.width),
            ("the scale of experts", e.router.expert_scale, self.scores.width),
        ):
            if numbers is not None and numbers.shape != (size,):
                raise WidthError(f"{name} has the shape {list(numbers.shape)}, but [{size}] is expected")
        for size in (inner, E):
            if size % TILE_ROWS:
                raise WidthError(f"experts of {e.intermediate_size} by {E}: sizes must be multiples of {TILE_ROWS}")
        r = e.router
        num_scores = self.scores.width
        are_groups = 1 <= r.top_groups <= r.num_groups and num_scores % r.num_groups == 0
        num_usable = num_scores // r.num_groups * r.top_groups if are_groups else 0
        if not 1 <= r.top_k <= num_usable:
            raise WidthError(f"a router that takes {r.top_k} of {num_usable} experts is not possible")


@dataclass(frozen=True, eq=False)
class Clip(Operation):
    """Clamp out between -limit and limit."""

    out: Buffer
    limit: float


@dataclass(frozen=True, eq=False)
class Softcap(Operation):
    """Set out = limit tanh(out / limit)."""

    out: Buffer
    limit: float


@dataclass(frozen=True, eq=False)
class Multiply(Operation):
    """Multiply the n numbers of out by numbers `first` to `first` + n of another buffer."""

    out: Buffer
    by: Buffer
    first: int = 0

    def check(self) -> None:
        """Raise WidthError for a buffer with fewer factors."""
        n = self.out.width
        if self.first < 0 or self.first + n > self.by.width:
            raise WidthError(f"{n} factors from {self.first} on do not fit a buffer of width {self.by.width}")


@dataclass(frozen=True, eq=False)
class Scale(Operation):
    """Multiply the first n numbers of out by factors."""

    out: Buffer
    factors: Tensor  # float32 [n]

    def check(self) -> None:
        """Raise WidthError for more factors than numbers."""
        check_factors(len(self.factors), self.out)


@dataclass(frozen=True, eq=False)
class ScaleByPosition(Operation):
    """Multiply the first n numbers of out by 1 + beta ln(1 + floor(position / period)). Padding has position -1."""

    out: Buffer
    n: int
    beta: float
    period: int

    def check(self) -> None:
        """Raise WidthError for more factors than numbers, and ValueError for no period."""
        check_factors(self.n, self.out)
        if self.period < 1:
            raise ValueError(f"queries cannot grow every {self.period} positions")


@dataclass(frozen=True, eq=False)
class Attend(Operation):
    """Rotate q and k of rows [q | k | v], write k - key_offset and v into their slots, then attend.

    Rows of `qkv` have H heads of q and G of k, of D numbers each, and G of v; they are undefined afterwards. Rows may
    be [q] alone: the layer attends to a cache that an earlier one has written, and changes no mass.
    """

    qkv: Buffer
    out: Buffer
    cache: int  # the number of the layer's cache in the model's spec
    heads: tuple[int, int, int]  # H, G, D
    params: AttentionParams
    rope: Rope | None = None

    @property
    def v_dim(self) -> int:
        """The numbers of a value."""
        return self.out.width // self.heads[0]

    @property
    def has_kv(self) -> bool:
        """Whether rows have k and v."""
        H, _, D = self.heads
        return self.qkv.width != H * D

    def check(self) -> None:
        """Raise WidthError for rows of other widths, and ValueError for parameters that make no sense."""
        H, G, D = self.heads
        check_equal("the attention output", H * self.v_dim, self.out.width)
        if self.has_kv:
            check_equal("q, k and v", (H + G) * D + G * self.v_dim, self.qkv.width)
        self.params.check(H, G, D)
        check_rope(self.rope, D)


@dataclass(frozen=True, eq=False)
class Convolve(Operation):
    """Set out = bias + sum_i weight[:, i] x[position - W + 1 + i], with zeros before the text.

    Write x [C] into slots of the cache, which have C / G numbers in each of G heads: those of K, then those of V.
    """

    x: Buffer
    out: Buffer
    cache: int
    weight: Tensor  # [C, W]
    bias: Tensor | None = None  # [C]

    def check(self) -> None:
        """Raise WidthError unless the weights have a channel for each number of a row."""
        channels, _ = self.weight.shape
        num_biases = channels if self.bias is None else self.bias.numel()
        check_equal("a convolution", channels, self.x.width, self.out.width, num_biases)


@dataclass(frozen=True, eq=False)
class AttendLinearly(Operation):
    """Set out = the linear attention of rows [q | k | v] with rows of gates; see kernels/linear_attention.py."""

    qkv: Buffer
    gates: Buffer
    out: Buffer
    caches: tuple[int, int]  # with the slots of tokens, and with states (`LinearTokensSpec`, `LinearStateSpec`)
    params: LinearAttention

    def check(self) -> None:
        """Raise WidthError unless the rows and the gates have the sizes that the parameters state."""
        p = self.params
        H = p.num_value_heads
        if H % p.num_key_heads:
            raise WidthError(f"{H} value heads cannot share {p.num_key_heads} key heads")
        check_equal("q, k and v of linear attention", p.qkv_width, self.qkv.width)
        check_equal("the gates of linear attention", p.gates_width, self.gates.width)
        check_equal("the output of linear attention", H * p.v_dim, self.out.width)
        check_equal("the decay of linear attention", H, len(p.decay), len(p.time_bias))
        if isinstance(p.rule, Mamba2Rule):
            check_equal("the skip of linear attention", H, len(p.rule.skip))


@dataclass(frozen=True, eq=False)
class WriteCache(Operation):
    """Do what `Attend` does before it attends: rotate k of rows [q | k | v], and write k and v into their slots.

    The rows are undefined afterwards. A token at position 0 is not written: its slot stays a hole. (A draft head reads
    the hidden state before a token; the first one has none.)
    """

    out: Buffer  # the rows
    cache: int
    heads: tuple[int, int, int]  # H, G, D
    rope: Rope | None = None

    @property
    def v_dim(self) -> int:
        """The numbers of a value."""
        H, G, D = self.heads
        return (self.out.width - (H + G) * D) // G

    def check(self) -> None:
        """Raise WidthError for rows of other widths."""
        H, G, D = self.heads
        check_equal("q, k and v", (H + G) * D + G * self.v_dim, self.out.width)
        check_rope(self.rope, D)


@dataclass(frozen=True, eq=False)
class LoadHiddenStates(Operation):
    """Set out = the hidden state before each token: that of the token before it, a row of `x`.

    For the first fresh token of each request it is that of the batch, which an earlier step has given. Without `x` each
    request has one fresh token.
    """

    out: Buffer
    x: Buffer | None = None

    def check(self) -> None:
        """Raise WidthError for buffers of two widths."""
        check_equal("the hidden states", self.x.width if self.x else self.out.width, self.out.width)


@dataclass(frozen=True, eq=False)
class AllGather(Operation):
    """Set out = the rows of x of all ranks side by side, in the order of ranks."""

    x: Buffer
    out: Buffer
    group: ProcessGroup

    def check(self) -> None:
        """Raise WidthError unless there is room for the rows of all ranks."""
        check_equal("the rows of all ranks", self.x.width * self.group.size, self.out.width)


@dataclass(frozen=True, eq=False)
class AllReduce(Operation):
    """Set out = the sum of the rows of x of all ranks, added in the order of ranks."""

    x: Buffer
    out: Buffer
    group: ProcessGroup
    add: bool = False

    def check(self) -> None:
        """Raise WidthError for buffers of two widths."""
        check_equal("the sum of all ranks", self.x.width, self.out.width)


@dataclass(frozen=True, eq=False)
class GatherRows(Operation):
    """Copy the rows of `logits_indices` to out; all later operations see N rows."""

    x: Buffer
    out: Buffer

    def check(self) -> None:
        """Raise WidthError for buffers of two widths."""
        check_equal("the gathered rows", self.x.width, self.out.width)


class BufferNumbers:
    """The numbers by which a backend knows the buffers of a program."""

    def __init__(self, create: Callable[[Buffer], int]):
        """`create` makes a buffer and returns its number."""
        self._create = create
        self._numbers: dict[str, int] = {}
        self._widths: dict[str, int] = {}

    def __getitem__(self, buffer: Buffer) -> int:
        """Return the number of a buffer; create it at the first call. Raises WidthError for another width."""
        width = self._widths.setdefault(buffer.name, buffer.width)
        check_equal(f"buffer {buffer.name!r}", buffer.width, width)
        if buffer.name not in self._numbers:
            self._numbers[buffer.name] = self._create(buffer)
        return self._numbers[buffer.name]


def check_columns(buffer: Buffer, columns: HeadColumns) -> None:
    """Raise WidthError unless heads do not overlap, and lie in a buffer."""
    c = columns
    if min(c.num_heads, c.width) < 1 or c.first < 0 or (c.num_heads > 1 and c.stride < c.width):
        raise WidthError(f"{c.num_heads} heads of {c.width} numbers, {c.stride} apart from {c.first} on, overlap")
    if c.end > buffer.width:
        raise WidthError(f"heads up to column {c.end} do not fit a buffer of width {buffer.width}")


def check_rope(rope: Rope | None, head_dim: int) -> None:
    """Raise WidthError if more pairs are rotated than a head has."""
    if rope and 2 * len(rope.freqs) > head_dim:
        raise WidthError(f"rope of {len(rope.freqs)} frequencies does not fit heads of {head_dim}")


def check_factors(n: int, buffer: Buffer) -> None:
    """Raise WidthError if a buffer's rows have fewer numbers than there are factors."""
    if not 0 <= n <= buffer.width:
        raise WidthError(f"{n} factors do not fit a buffer of width {buffer.width}")


def check_equal(name: str, *widths: int) -> None:
    """Raise WidthError unless all widths are equal."""
    if len(set(widths)) > 1:
        raise WidthError(f"{name} has width {widths[0]}, but {' and '.join(map(str, widths[1:]))} is expected")
