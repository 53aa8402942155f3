"""What the programs of all backends check: how wide their buffers are. Who computes is not known here."""

from __future__ import annotations

from torch import Tensor

LOGITS = -1  # the buffer that a program returns


class Widths:
    """Buffers by name and number. Every method raises ValueError where widths do not fit."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.of: dict[int, int] = {}

    def number(self, name: str, width: int) -> int | None:
        """The buffer of that name, None where there is none yet."""
        number = self.numbers.get(name)
        if number is not None:
            fit(f"buffer {name!r}", width, self.of[number])
        return number

    def add(self, name: str, number: int, width: int) -> int:
        """One more. Its number."""
        self.numbers[name], self.of[number] = number, width
        return number

    def looked_up(self, out: int, width: int) -> None:
        """Rows of an embedding so wide."""
        fit("a row of an embedding", width, self.of[out])

    def normalised(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> tuple[int, int]:
        """By weights [n] or [heads, n], and so many biases: heads and n."""
        heads, n = shape if len(shape) == 2 else (1, *shape)
        if len(shape) == 1:
            fit("the weight of a norm", n, self.of[x], self.of[out])
        elif heads * n > min(self.of[x], self.of[out]):
            raise ValueError(f"{heads} heads of {n} are normalised in rows of {self.of[x]}")
        fit("the bias of a norm", n if bias is None else bias, n)
        return heads, n

    def multiplied(self, x: int, out: int, shape: tuple[int, ...], bias: int | None) -> None:
        """By a matrix [out, in], and so many biases."""
        rows, columns = shape
        fit("the input of a linear layer", columns, self.of[x])
        fit("the output of a linear layer", rows, self.of[out], rows if bias is None else bias)

    def activated(self, x: int, out: int, n: int, gated: bool) -> None:
        """So many numbers, or twice as many."""
        fit("an activation", n, self.of[x] // (2 if gated else 1), self.of[out])

    def turned(self, x: int, heads: int, head_dim: int, freqs: int) -> None:
        """So many heads by so many frequencies."""
        if heads * head_dim > self.of[x] or 2 * freqs > head_dim:
            raise ValueError(f"{heads} heads of {head_dim} are turned in rows of {self.of[x]}")

    def attended(self, qkv: int, out: int, heads: tuple[int, int, int], slopes: int | None) -> None:
        """H query heads and G kv heads of D."""
        H, G, D = heads
        fit("q, k and v", (H + 2 * G) * D, self.of[qkv])
        fit("the heads' output", H * D, self.of[out])
        fit("slopes", H if slopes is None else slopes, H)

    def picked(self, x: int, out: int) -> None:
        """As wide as they were."""
        fit("the last rows", self.of[x], self.of[out])


def fit(what: str, *widths: int) -> None:
    """Raise ValueError unless all are the same."""
    if len(set(widths)) > 1:
        raise ValueError(f"{what} has {widths[0]} numbers where {', '.join(map(str, widths[1:]))} are wanted")


def size(x: Tensor | None) -> int | None:
    """How many numbers it has."""
    return None if x is None else x.numel()
