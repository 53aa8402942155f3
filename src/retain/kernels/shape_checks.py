"""What the programs of all backends check: how wide their buffers are. Who computes is not known here."""

from __future__ import annotations

from torch import Tensor

LOGITS_BUFFER = -1  # the buffer that a program returns


class BufferShapes:
    """Buffers by name and number. Every method raises ValueError where widths do not fit."""

    def __init__(self) -> None:
        self.buffer_ids: dict[str, int] = {}
        self.widths: dict[int, int] = {}

    def find(self, name: str, width: int) -> int | None:
        """The buffer of that name, None where there is none yet."""
        number = self.buffer_ids.get(name)
        if number is not None:
            check_equal(f"buffer {name!r}", width, self.widths[number])
        return number

    def register(self, name: str, buffer_id: int, width: int) -> int:
        """One more. Its number."""
        self.buffer_ids[name], self.widths[buffer_id] = buffer_id, width
        return buffer_id

    def check_embedding(self, out: int, width: int) -> None:
        """Rows of an embedding so wide."""
        check_equal("a row of an embedding", width, self.widths[out])

    def check_norm(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> tuple[int, int]:
        """By weights [n] or [heads, n], and so many biases: heads and n."""
        heads, n = shape if len(shape) == 2 else (1, *shape)
        if len(shape) == 1:
            check_equal("the weight of a norm", n, self.widths[x], self.widths[out])
        elif heads * n > min(self.widths[x], self.widths[out]):
            raise ValueError(f"{heads} heads of {n} are normalised in rows of {self.widths[x]}")
        check_equal("the bias of a norm", n if bias is None else bias, n)
        return heads, n

    def check_linear(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> None:
        """By a matrix [out, in], and so many biases."""
        rows, columns = shape
        check_equal("the input of a linear layer", columns, self.widths[x])
        check_equal("the output of a linear layer", rows, self.widths[out], rows if bias is None else bias)

    def check_activation(self, x: int, out: int, n: int, gated: bool) -> None:
        """So many numbers, or twice as many."""
        check_equal("an activation", n, self.widths[x] // (2 if gated else 1), self.widths[out])

    def check_rope(self, x: int, heads: int, head_dim: int, num_freqs: int) -> None:
        """So many heads by so many frequencies."""
        if heads * head_dim > self.widths[x] or 2 * num_freqs > head_dim:
            raise ValueError(f"{heads} heads of {head_dim} are turned in rows of {self.widths[x]}")

    def check_attention(self, qkv: int, out: int, heads: tuple[int, int, int], num_slopes: int | None) -> None:
        """H query heads and G kv heads of D."""
        H, G, D = heads
        check_equal("q, k and v", (H + 2 * G) * D, self.widths[qkv])
        check_equal("the heads' output", H * D, self.widths[out])
        check_equal("slopes", H if num_slopes is None else num_slopes, H)

    def check_gather_rows(self, x: int, out: int) -> None:
        """As wide as they were."""
        check_equal("the last rows", self.widths[x], self.widths[out])


def check_equal(name: str, *widths: int) -> None:
    """Raise ValueError unless all are the same."""
    if len(set(widths)) > 1:
        raise ValueError(f"{name} has {widths[0]} numbers where {', '.join(map(str, widths[1:]))} are wanted")


def numel_or_none(x: Tensor | None) -> int | None:
    """How many numbers it has."""
    return None if x is None else x.numel()
