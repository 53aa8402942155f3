"""Checks of shapes that all backends share: the widths of a program's buffers, the arguments of a call."""

from __future__ import annotations

from torch import Tensor

from retain.kernels.api import KV, Batch
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import TILE_ROWS, Experts
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.rope import Rope

LOGITS_BUFFER = -1  # the buffer that a program returns


class WidthError(ValueError):
    """Raised where the tensors of a model do not fit the buffers of its program."""


class BufferShapes:
    """The buffers of a program: ids by name, widths by id. Every check raises WidthError if widths do not fit."""

    def __init__(self) -> None:
        self.buffer_ids: dict[str, int] = {}
        self.widths: dict[int, int] = {}

    def find(self, name: str, width: int) -> int | None:
        """Return the id of the buffer of that name, or None if there is none yet."""
        buffer_id = self.buffer_ids.get(name)
        if buffer_id is not None:
            check_equal(f"buffer {name!r}", width, self.widths[buffer_id])
        return buffer_id

    def register(self, name: str, buffer_id: int, width: int) -> int:
        """Add a buffer and return its id."""
        self.buffer_ids[name] = buffer_id
        self.widths[buffer_id] = width
        return buffer_id

    def check_embedding(self, out: int, width: int) -> None:
        """Check rows of an embedding table, `width` numbers each."""
        check_equal("a row of the embedding", width, self.widths[out])

    def check_norm(self, x: int, out: int, shape: tuple[int, ...], bias: int | None, first: int = 0) -> tuple[int, int]:
        """Check a norm with weights of this shape, [n] or [heads, n], and `bias` biases. Return heads and n."""
        heads, n = shape if len(shape) == 2 else (1, *shape)
        if len(shape) == 1:
            check_equal("the weight of a norm", n, self.widths[x], self.widths[out])
        elif first + heads * n > min(self.widths[x], self.widths[out]):
            raise WidthError(f"a norm of {heads} heads of {n} does not fit a buffer of width {self.widths[x]}")
        elif x != out and heads * n < self.widths[out]:  # the other columns would be those of another layer
            raise WidthError(f"a norm of {heads} heads of {n} writes a part of a buffer of width {self.widths[out]}")
        check_equal("the bias of a norm", n if bias is None else bias, n)
        return heads, n

    def check_linear(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> None:
        """Check a linear layer with a weight of this shape, [out, in], and `bias` biases."""
        rows, columns = shape
        check_equal("the input of a linear layer", columns, self.widths[x])
        check_equal("the output of a linear layer", rows, self.widths[out], rows if bias is None else bias)

    def check_head_linear(
        self, x: int, out: int, shape: tuple[int, ...], source: HeadColumns, target: HeadColumns
    ) -> None:
        """Check the matrices of all heads, one below the other, and the columns that they read and write."""
        rows, width = shape
        self._check_columns(x, source)
        self._check_columns(out, target)
        check_equal("the heads of a linear layer", source.num_heads, target.num_heads)
        check_equal("the input of a head", width, source.width)
        check_equal("the outputs of all heads", rows, target.num_heads * target.width)
        if target.width % TILE_ROWS:
            raise WidthError(f"a linear layer of each head has {target.width} outputs, not a multiple of {TILE_ROWS}")

    def check_copy_columns(self, x: int, out: int, source: HeadColumns, target: HeadColumns) -> None:
        """Check the columns that are copied."""
        self._check_columns(x, source)
        self._check_columns(out, target)
        check_equal("the copied heads", source.num_heads, target.num_heads)
        check_equal("the copied columns of a head", source.width, target.width)

    def _check_columns(self, buffer: int, columns: HeadColumns) -> None:
        """Check that heads do not overlap, and lie in a buffer."""
        c = columns
        if min(c.num_heads, c.width) < 1 or c.first < 0 or (c.num_heads > 1 and c.stride < c.width):
            raise WidthError(f"{c.num_heads} heads of {c.width} numbers, {c.stride} apart from {c.first} on, overlap")
        if c.end > self.widths[buffer]:
            raise WidthError(f"heads up to column {c.end} do not fit a buffer of width {self.widths[buffer]}")

    def check_activation(self, x: int, out: int, act: str, n: int, gated: bool) -> None:
        """Check an activation of n numbers a row, followed by n gates if `gated`."""
        if act == "swiglu_oai" and not gated:
            raise ValueError(f"the activation {act} needs gates")
        check_equal("an activation", n, self.widths[x] // (2 if gated else 1), self.widths[out])

    def check_experts(self, x: int, scores: int, out: int, experts: Experts) -> None:
        """Check the experts of a layer, and their router: also for sizes that no backend packs."""
        n = experts.num_experts
        width = experts.intermediate_size
        inner = experts.inner_size
        router = experts.router
        check_equal("the input of experts", experts.hidden_size, self.widths[x], self.widths[out])
        check_equal("the scores of experts", n, self.widths[scores])
        check_equal("the gates of experts", experts.gate_up.shape[0], n * inner)
        check_equal("the output of experts", experts.down.shape[0], n * self.widths[out])
        for name, numbers, size in (
            ("a bias of experts", experts.gate_up_bias, n * inner),
            ("a bias of experts", experts.down_bias, n * self.widths[out]),
            ("the bias of a router", router.bias, n),
            ("the scale of experts", router.expert_scale, n),
        ):
            if numbers is not None and numbers.shape != (size,):
                raise WidthError(f"{name} has the shape {list(numbers.shape)}, but [{size}] is expected")
        for size in (inner, self.widths[out]):
            if size % TILE_ROWS:
                raise WidthError(f"experts of {width} by {self.widths[out]}: sizes must be multiples of {TILE_ROWS}")
        are_groups = 1 <= router.top_groups <= router.num_groups and n % router.num_groups == 0
        num_usable = n // router.num_groups * router.top_groups if are_groups else 0
        if not 1 <= router.top_k <= num_usable:
            raise WidthError(f"a router that takes {router.top_k} of {num_usable} experts is not possible")

    def check_multiply(self, x: int, by: int, first: int) -> None:
        """Check a product with numbers of another buffer."""
        if first + self.widths[x] > self.widths[by]:
            raise WidthError(f"{self.widths[x]} factors from {first} on do not fit a buffer of width {self.widths[by]}")

    def check_scale(self, x: int, num_factors: int) -> None:
        """Check a product of the first numbers with factors."""
        if num_factors > self.widths[x]:
            raise WidthError(f"{num_factors} factors do not fit a buffer of width {self.widths[x]}")

    def check_scale_by_position(self, x: int, n: int, period: int) -> None:
        """Check a product with factors that grow with each period of positions."""
        self.check_scale(x, n)
        if period < 1:
            raise ValueError(f"queries cannot grow every {period} positions")

    def check_attention(
        self, qkv: int, out: int, heads: tuple[int, int, int], params: AttentionParams, rope: Rope | None
    ) -> tuple[int, bool]:
        """Check attention of H query heads and G kv heads with keys of D numbers; `heads` is (H, G, D).

        Returns the numbers of a value, which follow from the width of the output, and whether rows have k and v.
        """
        H, G, D = heads
        v_dim = self.widths[out] // H
        check_equal("the attention output", H * v_dim, self.widths[out])
        has_kv = self.widths[qkv] != H * D
        if has_kv:
            check_equal("q, k and v", (H + G) * D + G * v_dim, self.widths[qkv])
        params.check(H, G, D)
        if rope and 2 * len(rope.freqs) > D:
            raise WidthError(f"rope of {len(rope.freqs)} frequencies does not fit heads of {D}")
        return v_dim, has_kv

    def check_convolve(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> None:
        """Check a convolution with a weight of this shape, [channels, window], and `bias` biases."""
        channels, _ = shape
        check_equal("a convolution", channels, self.widths[x], self.widths[out], channels if bias is None else bias)

    def check_linear_attention(self, qkv: int, gates: int, out: int, params: LinearAttention) -> None:
        """Check the sizes of linear attention."""
        H = params.num_value_heads
        if H % params.num_key_heads:
            raise WidthError(f"{H} value heads cannot share {params.num_key_heads} key heads")
        check_equal("q, k and v of linear attention", params.qkv_width, self.widths[qkv])
        check_equal("the gates of linear attention", params.gates_width, self.widths[gates])
        check_equal("the output of linear attention", H * params.v_dim, self.widths[out])
        check_equal("the decay of linear attention", H, len(params.decay), len(params.time_bias))
        if isinstance(params.rule, Mamba2Rule):
            check_equal("the skip of linear attention", H, len(params.rule.skip))

    def check_gather_rows(self, x: int, out: int) -> None:
        """Check that the gathered rows keep their width."""
        check_equal("the gathered rows", self.widths[x], self.widths[out])


def check_equal(name: str, *widths: int) -> None:
    """Raise WidthError unless all widths are equal."""
    if len(set(widths)) > 1:
        raise WidthError(f"{name} has width {widths[0]}, but {' and '.join(map(str, widths[1:]))} is expected")


def check_write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
    """Raise ValueError unless fresh tokens fit the slots of a pool."""
    T, G, _ = k.shape
    if k.shape != (T, G, kv.k_dim) or v.shape != (T, G, kv.v_dim) or (slot_mapping.shape, pos.shape) != ((G, T), (T,)):
        expected = f"slot_mapping [G, T], k [T, G, {kv.k_dim}], v [T, G, {kv.v_dim}], pos [T]"
        raise shape_error("write", expected, slot_mapping=slot_mapping, k=k, v=v, pos=pos)


def check_batch(batch: Batch) -> None:
    """Raise ValueError unless the tables of all layers and the tensors of a batch have matching shapes."""
    T = len(batch.input_ids)
    B = len(batch.rows)
    for group in batch.groups:
        tables = group.tables
        L, _, G, _ = tables.pages.shape
        shapes = [x.shape for x in (batch.positions, group.slot_mapping, tables.query_start_loc)]
        num_mapped = 0 if group.slot_rule else T
        if shapes != [(T,), (L, G, num_mapped), (B + 1,)]:
            raise shape_error(
                "run",
                f"positions [{T}], slot_mapping [{L}, {G}, {num_mapped}], query_start_loc [{B + 1}]",
                positions=batch.positions,
                slot_mapping=group.slot_mapping,
                query_start_loc=tables.query_start_loc,
            )


def numel_or_none(x: Tensor | None) -> int | None:
    """Return the number of elements, or None if there is no tensor."""
    return None if x is None else x.numel()


def shape_error(function: str, expected: str, **got: Tensor) -> ValueError:
    """Return the error for arguments of a function whose shapes are not the expected ones."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in got.items())
    return ValueError(f"{function}: expected {expected}; got {shapes}")
