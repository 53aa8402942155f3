"""Regular expressions of the decimal numbers in a range, with integers of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

FRACTION = r"(\.[0-9]+)?"
ZEROS = r"(\.0+)?"
CHUNK = 16  # digits at a time: a pattern of all would have as many characters as the square of their number
ABOVE_ZERO = r"\.[0-9]*[1-9][0-9]*"


def integer_pattern(low: int | None, high: int | None) -> str | None:
    """Return the pattern of the integers from `low` to `high`, without a bound where it is None. None: there are none.

    Zero has no sign.
    """
    found = []
    if low is None or low < 0:
        magnitudes = _natural_pattern(1 if high is None else max(-high, 1), None if low is None else -low)
        found += [f"-{magnitudes}"] if magnitudes else []
    if high is None or high >= 0:
        naturals = _natural_pattern(max(low or 0, 0), high)
        found += [naturals] if naturals else []
    return "|".join(found) or None


def magnitude_pattern(low: int, excludes_low: bool, high: int | None, excludes_high: bool) -> str | None:
    """Return the pattern of the numbers, with and without a fraction, of a range above 0. None: there are none."""
    found = []
    first = low + excludes_low
    if between := _natural_pattern(first, None if high is None else high - 1):
        found.append(between + FRACTION)
    if excludes_low and (high is None or low < high):
        found.append(f"{low}{ABOVE_ZERO}")
    if high is not None and not excludes_high and first <= high:
        found.append(f"{high}{ZEROS}")
    return "|".join(found) or None


def _natural_pattern(low: int, high: int | None) -> str | None:
    """Return the pattern of the integers from `low`, which is at least 0, to `high`, in parentheses."""
    if high is not None and low > high:
        return None
    length = len(str(low))
    if high is None:
        return _group([*_at_least(str(low)), f"[1-9][0-9]{{{length},}}"])
    end = len(str(high))
    if length == end:
        return _group(_between(str(low), str(high)))
    found = [*_at_least(str(low)), *_between("1" + "0" * (end - 1), str(high))]
    if length + 1 < end:
        found.append(f"[1-9][0-9]{{{length},{end - 2}}}")
    return _group(found)


def _between(low: str, high: str) -> Iterator[str]:
    """Yield patterns of the digits from `low` to `high`, which have as many."""
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    if same == len(low):
        yield low
        return
    first = int(low[same])
    last = int(high[same])
    num_digits = len(low) - same - 1
    found = [f"{first}{_group(_at_least(low[same + 1 :]))}", f"{last}{_group(_at_most(high[same + 1 :]))}"]
    if first + 1 < last:
        found.append(f"[{first + 1}-{last - 1}]{_any(num_digits)}")
    yield low[:same] + _group(found)


def _at_least(low: str) -> Iterator[str]:
    """Yield patterns of digits that are at least `low`, and as many."""
    if not low.strip("0"):
        yield _any(len(low))
        return
    rest = low[CHUNK:]
    yield low[:CHUNK] + (_group(_at_least(rest)) if rest else "")
    for i, digit in enumerate(low[:CHUNK]):
        if digit != "9":
            yield f"{low[:i]}[{int(digit) + 1}-9]{_any(len(low) - i - 1)}"


def _at_most(high: str) -> Iterator[str]:
    """Yield patterns of digits that are at most `high`, and as many."""
    if not high.strip("9"):
        yield _any(len(high))
        return
    rest = high[CHUNK:]
    yield high[:CHUNK] + (_group(_at_most(rest)) if rest else "")
    for i, digit in enumerate(high[:CHUNK]):
        if digit != "0":
            yield f"{high[:i]}[0-{int(digit) - 1}]{_any(len(high) - i - 1)}"


def _group(patterns: Iterable[str]) -> str:
    return f"({'|'.join(patterns)})"


def _any(num_digits: int) -> str:
    return f"[0-9]{{{num_digits}}}" if num_digits else ""
